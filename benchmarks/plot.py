#!/usr/bin/env python3
"""Draw README's plots from the records in benchmarks/results into docs/plots; what was not measured is left out.

A plot carries the digest of the figures that it shows, by which a test sees whether it is out of date.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import record as records  # noqa: E402
from readme_tables import BASE, DISTRIBUTIONS, PRODUCTS, fastest  # noqa: E402

MISSING = float("nan")
SIZE = 8, 3.8  # inches: 100 pixels each at README's width
STYLE = {
    **{"font.size": 9, "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False},
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.alpha": 0.3},
}


class Look(NamedTuple):
    label: str
    color: str
    marker: str


# In the order of legends. The colours are Okabe and Ito's, which the colour-blind tell apart too.
LOOKS = {
    "dense": Look("dense cuBLAS", "#000000", "s"),
    "torch._grouped_mm": Look("torch._grouped_mm, product alone", "#e69f00", "^"),
    "ScatterMoE": Look("ScatterMoE", "#009e73", "D"),
    "unfused": Look("unfused", "#cc79a7", "v"),
    "moe": Look("moe", "#0072b2", "o"),
    "8 rows": Look("tiles of 8 rows", "#e69f00", "^"),
    "32 rows": Look("of 32", "#009e73", "D"),
    "128 rows": Look("of 128", "#cc79a7", "v"),
    "moe_mlp": Look("picked", "#0072b2", "o"),
}


def main() -> int:
    for file in sorted(records.RESULTS.glob("*.json")):
        draw_all(records.read(file))
    return 0


def draw_all(record: dict) -> None:
    records.PLOTS.mkdir(parents=True, exist_ok=True)
    for name, plot in PLOTS.items():
        file, rows = records.plot_file(record["gpu"], name), plot.rows(record)
        if not rows:
            print(f"{file.name} is left out: the record's {plot.part} have nothing for it")
            continue
        with plt.rc_context(STYLE):
            figure = plot.draw(rows)
            handles, labels = figure.axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
            figure.supxlabel(caption(record, rows), fontsize="small", color="#555555")
            figure.savefig(file, dpi=125, metadata={"Software": None, "Source": digest(record, rows)})
            plt.close(figure)
        print(file)


def caption(record: dict, rows: list[dict]) -> str:
    dates = sorted({row["date"] for row in rows})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"{record['gpu']}, torch {record['torch']}, CUDA {record['cuda']}, bf16, {when}"


def digest(record: dict, rows: list[dict]) -> str:
    return hashlib.sha256(json.dumps([caption(record, rows), rows]).encode()).hexdigest()


def peers_rows(record: dict) -> list[dict]:
    return fastest(record.get("rows", []), "moe")


def draw_peers(rows: list[dict]) -> plt.Figure:
    figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
    bars(axes, [row["shape"] for row in rows], rows, [f"{row['tflops']:.0f}" for row in rows])
    axes.set_ylabel("TFLOP/s, forward")
    return figure


def scale_rows(record: dict) -> list[dict]:
    """None if the point where both sweeps meet is missing."""
    rows = swept(record, "fwd", "uniform")
    return rows if any(row["shape"] == BASE for row in rows) else []


def draw_scale(rows: list[dict]) -> plt.Figure:
    figure, panels = plt.subplots(1, 2, figsize=SIZE, sharey=True, layout="constrained")
    for axes, size, label in zip(panels, "TE", ("tokens T", "experts E for the same rows")):
        points = along(rows, size)
        lines(axes, [row[size] for row in points], [rates(row) for row in points])
        axes.set_xlabel(label)
    panels[0].set(ylabel=f"TFLOP/s, forward, {BASE}", ylim=(0, None))
    return figure


def skew_rows(record: dict) -> list[dict]:
    rows = [row for pass_ in PRODUCTS for name in DISTRIBUTIONS for row in swept(record, pass_, name)]
    return [row for row in rows if row["shape"] == BASE]


def draw_skew(rows: list[dict]) -> plt.Figure:
    """Above our bars their rates as multiples of that of uniform routing."""
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    figure, [panels] = plt.subplots(1, len(passes), figsize=SIZE, sharey=True, squeeze=False, layout="constrained")
    for axes, pass_ in zip(panels, passes):
        points = [row for row in rows if row["pass"] == pass_]
        uniform = next((row["ms"] for row in points if row["distribution"] == "uniform"), MISSING)
        names = [DISTRIBUTIONS[row["distribution"]] for row in points]
        bars(axes, names, points, [f"× {uniform / row['ms']:.2f}" for row in points])
        axes.set_xlabel({"fwd": "forward", "fwd+bwd": "forward and backward"}[pass_])
    panels[0].set_ylabel(f"TFLOP/s (× of uniform), {BASE}")
    return figure


def memory_rows(record: dict) -> list[dict]:
    return [row for row in along(scale_rows(record), "T") if row["bytes_peak"] is not None]


def draw_memory(rows: list[dict]) -> plt.Figure:
    figure, panels = plt.subplots(1, 2, figsize=SIZE, sharey=True, layout="constrained")
    tokens = [row["T"] for row in rows]
    result = [4 * row["T"] * row["N"] for row in rows]
    panels[0].plot(tokens, result, color="#cccccc", linewidth=8, label="float32 [T, N], the result")
    titles = "during a forward", "kept for the backward beside the result"
    for axes, which, title in zip(panels, ("peak", "saved"), titles):
        lines(axes, tokens, [allocated(row, which) for row in rows])
        axes.set_xlabel("tokens T")
        axes.set_title(title, fontsize="medium")
    panels[0].set(yscale="log", ylabel=f"memory beside the arguments, {BASE}")
    panels[0].yaxis.set_major_formatter(EngFormatter("B"))
    return figure


def allocated(row: dict, which: str) -> dict[str, float]:
    """Bytes by series: `peak` or `saved`."""
    return {"moe": row[f"bytes_{which}"], "unfused": row[f"peers_bytes_{which}"].get("unfused", MISSING)}


def tiles_rows(record: dict) -> list[dict]:
    return [row for row in record.get("tiles", []) if row["peers"]]


def draw_tiles(rows: list[dict]) -> plt.Figure:
    figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
    times = [{**row["peers"], "moe_mlp": row["ms"]} for row in rows]
    lines(axes, [row["T"] for row in rows], [{name: min(t.values()) / ms for name, ms in t.items()} for t in times])
    axes.set(xlabel="tokens T", ylabel="rate, of that of the fastest tiles", ylim=(0, None))
    return figure


def swept(record: dict, pass_: str, distribution: str) -> list[dict]:
    """The points of the sweeps that were measured."""
    found = [row for row in record.get("sweeps", []) if row["ms"] is not None]
    return [row for row in found if (row["pass"], row["distribution"]) == (pass_, distribution)]


def along(rows: list[dict], size: str) -> list[dict]:
    """Of the scale sweeps' rows those where only this size, T or E, differs from the base's, in its order."""
    fixed = {"T": "E", "E": "T"}[size]
    at = {row[fixed] for row in rows if row["shape"] == BASE}
    return sorted((row for row in rows if row[fixed] in at), key=lambda row: row[size])


def rates(row: dict) -> dict[str, float]:
    """TFLOP/s by series."""
    products = PRODUCTS[row["pass"]]
    flops = 2 * row["T"] * row["k"] * row["K"] * row["N"] * products
    times = {"moe": row["ms"], "dense": row["dense_ms"] * products, **row["peers"]}
    return {name: flops / ms * 1e-9 for name, ms in times.items()}


def bars(axes: plt.Axes, groups: list[str], rows: list[dict], labels: list[str]) -> None:
    """A group a row, a bar for each series that a row has; the labels stand on ours."""
    points = [rates(row) for row in rows]
    names = [name for name in LOOKS if any(name in point for point in points)]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [group + (i + 0.5) * width - 0.4 for group in range(len(groups))]
        heights = [point.get(name, MISSING) for point in points]
        drawn = axes.bar(places, heights, width, color=LOOKS[name].color, label=LOOKS[name].label)
    axes.bar_label(drawn, labels, fontsize="small", padding=1)
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="x", length=0)


def lines(axes: plt.Axes, sizes: list[int], points: list[dict[str, float]]) -> None:
    """A line for each series that a point has, over sizes that are powers of two."""
    for name, look in LOOKS.items():
        if any(name in point for point in points):
            values = [point.get(name, MISSING) for point in points]
            axes.plot(sizes, values, color=look.color, marker=look.marker, markersize=4, label=look.label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(n) if n < 1024 else f"{n // 1024}k" for n in sizes])
    axes.minorticks_off()


class Plot(NamedTuple):
    part: str
    rows: Callable[[dict], list[dict]]
    draw: Callable[[list[dict]], plt.Figure]


PLOTS = {
    "peers": Plot("rows", peers_rows, draw_peers),
    "scale": Plot("sweeps", scale_rows, draw_scale),
    "skew": Plot("sweeps", skew_rows, draw_skew),
    "memory": Plot("sweeps", memory_rows, draw_memory),
    "tiles": Plot("tiles", tiles_rows, draw_tiles),
}

if __name__ == "__main__":
    sys.exit(main())
