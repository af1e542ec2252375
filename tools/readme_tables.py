#!/usr/bin/env python3
"""Write README's tables from the records in benchmarks/results; with --check, only say whether they are in step.

A table stands between the lines `<!-- table:NAME -->` and `<!-- /table -->`, NAME being `correctness`, `speed`,
`mlp`, `decode`, `sweeps` or `transformers`. With it stand the plots that benchmarks/plot.py has drawn.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from itertools import product

import record as records
from source_digest import source_digest

README = records.ROOT / "README.md"
NO_RECORD = "Nothing is recorded yet: `make record` on a machine with a GPU measures it."
OLDER = "†"
OLDER_NOTE = f"{OLDER} measured on sources that have changed since."
CAPTION = (
    "Medians of one run, the L2 filled with other memory before each. *Kernels*: `fp32` and `mma` are those of every "
    "GPU, `wgmma` Hopper's; where a shape has both, `mma` was asked for. *Of dense*: cuBLAS's time for products of as "
    "many operations (one, or three with the backward) over ours. The columns after it: how many times as fast as each "
    "peer."
)
OURS = "grouped_gemm_moe"  # as the package's experts function is registered there
MODEL_CAPTION = (
    "A Qwen3-MoE of {layers} layers with random weights (hidden {H}, {E} experts of {I}, top-{k}, {dtype}), the whole "
    "model, medians of one run. A training step is a forward and backward; *generate* adds {new} tokens to {prompt} of "
    "each sequence, greedily. *Peak*: beyond the weights. transformers itself takes `batched_mm` for `grouped_mm` "
    "where it decodes."
)
PRODUCTS = {"fwd": 1, "fwd+bwd": 3}
FLOOR = "floor"  # beside the peers of a few tokens: the time that reading their weights takes
BASE = "qwen3-up"  # the shape that the sweeps start from
DISTRIBUTIONS = {"uniform": "uniform", "zipf": "Zipf(1)", "one": "one expert"}
PLOTS = {
    "peers": "TFLOP/s of moe, of a dense product and of the peers at each shape",
    "skew": "TFLOP/s by routing",
    "scale": "TFLOP/s by tokens and by experts",
    "memory": "Memory by tokens",
    "tiles": "The rate of tiles of 8, 32 and 128 rows, and of those that are picked, by tokens",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; the exit status is 1 if a table is not in step"
    )
    args = parser.parse_args()
    found = {file.stem: records.read(file) for file in sorted(records.RESULTS.glob("*.json"))}
    digest = source_digest()
    for name, record in found.items():
        if is_older(record, digest):
            print(f"{name}: the record, or part of it, is older than the sources")
    text = README.read_text()
    wanted = with_tables(text, list(found.values()), digest)
    if args.check:
        if text != wanted:
            print(
                "README.md is not in step with benchmarks/results: run python tools/readme_tables.py", file=sys.stderr
            )
        return int(text != wanted)
    README.write_text(wanted)
    return 0


def with_tables(text: str, found: list[dict], digest: str) -> str:
    """The text with its tables made anew from the records."""
    for name, table in TABLES.items():
        block = re.compile(rf"(<!-- table:{name} -->\n).*?(<!-- /table -->)", re.DOTALL)
        body = "\n\n".join(filter(None, (table(record, digest) for record in found)))
        body = body or ("" if name in records.OPTIONAL else NO_RECORD)
        text, count = block.subn(lambda m, body=body: f"{m[1]}\n{body}\n\n{m[2]}" if body else f"{m[1]}{m[2]}", text)
        if count != 1:
            raise SystemExit(f"README.md has {count} places for the table {name}, and should have one")
    return text


def correctness_table(record: dict, digest: str) -> str:
    lines = [heading(record), *summaries(record, digest)]
    if rows := record.get("correctness"):
        header = ["", "dtype", "error", "measured", "limit", "holds"]
        lines += [markdown(header, [correctness_row(row, digest) for row in rows])]
    shown = {part: record[part] for part in ("tests", "sanitizer", "fuzz", "correctness") if part in record}
    return "\n\n".join(lines + note(shown, digest))


def correctness_row(row: dict, digest: str) -> list[str]:
    value, limit = row["value"], row["limit"]
    holds = "yes" if value is not None and value <= limit else "**no**"
    return [row["name"] + mark(row, digest), row["dtype"], row["metric"], scientific(value), scientific(limit), holds]


def summaries(record: dict, digest: str) -> list[str]:
    """A sentence each for the tests, the sanitizer and the fuzzer, as far as they are recorded."""
    lines = []
    if tests := record.get("tests"):
        failed = f"**{tests['failed']} failed**" if tests["failed"] else "0 failed"
        lines += [f"Tests: {tests['passed']} passed, {failed}, {tests['skipped']} skipped{mark(tests, digest)}."]
    if sanitizer := record.get("sanitizer"):
        counts = ", ".join(f"{tool} {errors(sanitizer[tool])}" for tool in records.SANITIZERS)
        lines += [f"compute-sanitizer: {counts}{mark(sanitizer, digest)}."]
    if fuzz := record.get("fuzz"):
        failed = f"**{fuzz['failures']} failed**" if fuzz["failures"] else "0 failed"
        drawn = f"{fuzz['cases']:,} random calls in {fuzz['minutes']:g} minutes from seed {fuzz['seed']}"
        lines += [f"Fuzzer: {drawn}, {failed}{mark(fuzz, digest)}."]
    return lines


def errors(count: int | None) -> str:
    return "**could not finish**" if count is None else "0 errors" if count == 0 else f"**{count} errors**"


def speed_table(record: dict, digest: str) -> str:
    found = [row for row in record.get("rows", []) if row["I"] is None]
    if not found:
        return f"{heading(record)}\n\n{NO_RECORD}"
    table = timings(found, dict(zip("TKNEk", "TKNEk")), digest)
    lines = [heading(record), *plots(record, "peers"), *rates(found, digest), *beside_float32(found, digest)]
    lines += [CAPTION, table]
    return "\n\n".join(lines + note({"rows": found}, digest))


def mlp_table(record: dict, digest: str) -> str:
    found = [row for row in record.get("rows", []) if row["I"] is not None and FLOOR not in row["peers"]]
    counted = [row for row in record.get("memory", []) if row["bytes_peak"] is not None]
    if not found and not counted:
        return ""
    lines = [heading(record)]
    lines += [*rates(found, digest), timings(found, dict(zip("THIEk", "TKIEk")), digest)] if found else []
    lines += memory(counted, digest) if counted else []
    return "\n\n".join(lines + note({"rows": found, "memory": counted}, digest))


def decode_table(record: dict, digest: str) -> str:
    """A few tokens, whose time is that of the weights."""
    found = [row for row in record.get("rows", []) if FLOOR in row["peers"] and row["ms"] is not None]
    tried = [row for row in record.get("tiles", []) if row["peers"]]
    if not found:
        return ""
    peers = [name for name in peers_of(found) if name != FLOOR]
    header = ["", "T, H, I, E, k", "dtype", "kernels", "mode", "µs", "of the floor's rate"]
    header += [f"× {name}" for name in peers]
    lines = []
    for row in found:
        which = [row["shape"] + mark(row, digest), listed(row, "TKIEk"), row["dtype"], row["path"], row["mode"]]
        lines.append([*which, f"{row['ms'] * 1e3:.1f}", *times_as_fast(row, [FLOOR, *peers])])
    parts = [heading(record), markdown(header, lines), *picked(tried), *note({"rows": found, "tiles": tried}, digest)]
    return "\n\n".join(parts + plots(record, "tiles"))


def picked(rows: list[dict]) -> list[str]:
    """A sentence on how good the rule is that picks the tiles."""
    if not rows:
        return []
    longer = {row["T"]: row["ms"] / min(row["peers"].values()) for row in rows}
    tokens, most = max(longer.items(), key=lambda item: item[1])
    said = f"With the tiles that it picks `moe_mlp` takes at most {most:.2f} times as long as with the best ones, at"
    return [f"{said} {tokens:,} of {min(longer):,} to {max(longer):,} tokens."]


def timings(found: list[dict], sizes: dict[str, str], digest: str) -> str:
    """sizes: the names that are shown, and those of the rows."""
    peers = peers_of(found)
    header = [
        "",
        ", ".join(sizes),
        "dtype",
        "kernels",
        "pass",
        "ms",
        "TFLOP/s",
        "of dense",
        *(f"× {name}" for name in peers),
        "peak MB",
    ]
    # What was measured on these sources first.
    rows = sorted(found, key=lambda row: row["source_digest"] != digest)
    return markdown(header, [speed_row(row, sizes.values(), peers, digest) for row in rows])


def memory(rows: list[dict], digest: str) -> list[str]:
    """What a training step of each operation allocates, and of the peers that ran beside the first."""
    ours = rows[0]
    T, K, N, I, E, k = (ours[name] for name in ("T", "K", "N", "I", "E", "k"))  # noqa: E741
    of_x, of_rows = 2 * T * K, 4 * T * k * I
    gradients = of_x + 2 * E * I * (2 * K + N) + 4 * T * k
    counted = {row["op"] + mark(row, digest): (row["bytes_saved"], row["bytes_peak"]) for row in rows}
    counted |= {name: (ours["peers_bytes_saved"][name], peak) for name, peak in ours["peers_bytes_peak"].items()}
    lines = [
        [
            name,
            f"{(saved + of_x) / 1e6:.0f}",
            f"{(saved + of_x) / (of_x + of_rows):.2f}",
            f"{peak / 1e6:.0f}",
            f"{peak / ours['bytes_peak']:.2f}",
        ]
        for name, (saved, peak) in counted.items()
    ]
    said = (
        f"A training step at {ours['shape']} in {ours['dtype']}. *Kept*: by the forward for the backward, x included, "
        f"and how many times 2·T·H + 4·S·I bytes that is. *Peak*: what a forward and backward allocate beyond the "
        f"inputs, {gradients / 1e6:.0f} MB of gradients included, and how many times ours that is."
    )
    return [said, markdown(["", "kept MB", "of 2·T·H + 4·S·I", "peak MB", "of ours"], lines)]


def rates(rows: list[dict], digest: str) -> list[str]:
    """A sentence an operation: how its fastest kernels compare, forward in bf16, on the sources as they are."""
    said = []
    current = [row for row in rows if row["source_digest"] == digest]
    for op in dict.fromkeys(row["op"] for row in rows):
        if found := fastest(current, op):
            ratios = {"dense": [row["dense_ms"] / row["ms"] for row in found]}
            for name in peers_of(found):
                ratios[name] = [row["peers"][name] / row["ms"] for row in found if name in row["peers"]]
            shown = [f"{span(values)} times {name}" for name, values in ratios.items()]
            said.append(f"The rate of `{op}`, forward in bf16, is {', '.join(shown)}.")
    return said


def beside_float32(rows: list[dict], digest: str) -> list[str]:
    """A sentence on how much faster than in exact float32 the tensor cores are, forward at the seed shape."""
    found = {
        (row["dtype"], row["path"]): row["ms"]
        for row in rows
        if (row["op"], row["shape"], row["mode"], row["pass"]) == ("moe", "seed", "eager", "fwd")
        and row["source_digest"] == digest
        and row["ms"] is not None
    }
    exact = found.get(("fp32", "fp32"))
    times = [f"{exact / ms:.1f} ({path})" for (dtype, path), ms in found.items() if exact and dtype == "bf16"]
    return [f"`moe` in bf16 is {' and '.join(times)} times as fast as in fp32, forward at seed."] if times else []


def span(values: list[float]) -> str:
    ends = [f"{end(values):.2f}" for end in (min, max)]
    return " to ".join(dict.fromkeys(ends))


def fastest(rows: list[dict], op: str) -> list[dict]:
    """A row a shape: of an operation's kernels, called eagerly, forward in bf16, the fastest."""
    found = {}
    for row in rows:
        kind = row["op"], row["dtype"], row["mode"], row["pass"], row["distribution"]
        if kind == (op, "bf16", "eager", "fwd", "uniform") and row["ms"] is not None:
            found[row["shape"]] = min(row, found.get(row["shape"], row), key=lambda row: row["ms"])
    return list(found.values())


def speed_row(row: dict, sizes: Iterable[str], peers: list[str], digest: str) -> list[str]:
    pass_ = row["pass"] + (", graph" if row["mode"] == "graph" else "")
    which = [f"{row['op']} {row['shape']}{mark(row, digest)}", listed(row, sizes), row["dtype"], row["path"], pass_]
    ms = row["ms"]
    if ms is None:
        return [*which, "**failed**", *[""] * (3 + len(peers))]
    dense = row["dense_ms"] * PRODUCTS[row["pass"]] / ms
    peak = "" if row["bytes_peak"] is None else f"{row['bytes_peak'] / 1e6:.0f}"
    return [*which, f"{ms:.3f}", f"{row['tflops']:.0f}", f"{dense:.2f}", *times_as_fast(row, peers), peak]


def listed(row: dict, sizes: Iterable[str]) -> str:
    return ", ".join(str(row[name]) for name in sizes)


def peers_of(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["peers"]))


def times_as_fast(row: dict, peers: list[str]) -> list[str]:
    return [f"{row['peers'][name] / row['ms']:.2f}" if name in row["peers"] else "" for name in peers]


def sweeps_table(record: dict, digest: str) -> str:
    """The routings at the base; tokens and experts are for the plots."""
    if not record.get("sweeps"):
        return f"{heading(record)}\n\n{NO_RECORD}"
    found = [row for row in record["sweeps"] if row["ms"] is not None]
    failed = len(record["sweeps"]) - len(found)
    base = {(row["pass"], row["distribution"]): row for row in found if row["shape"] == BASE}
    kinds = [kind for kind in product(PRODUCTS, DISTRIBUTIONS) if kind in base]
    header = ["routing", "pass", "ms", "TFLOP/s", "of uniform", "of dense", "× unfused"]
    table = markdown(header, [skew_row(base[kind], base.get((kind[0], "uniform")), digest) for kind in kinds])
    lines = [heading(record), *plots(record, "skew"), table, *plots(record, "scale", "memory"), *allocations(found)]
    lines += [f"**{failed} of {len(record['sweeps'])} points failed.**"] if failed else []
    return "\n\n".join(lines + note({"sweeps": record["sweeps"]}, digest))


def transformers_table(record: dict, digest: str) -> str:
    """Tokens a second of a whole model with each implementation of its experts."""
    found = record.get("transformers")
    if not found:
        return ""
    ours = {model_task(row): row["ms"] for row in found if row["experts"] == OURS}
    lines = [model_row(row, ours[model_task(row)], digest) for row in found]
    header = ["", "experts", "tokens/s", "of ours", "peak MB"]
    versions = f"{heading(record)[:-1]}, transformers {found[0]['transformers']}."
    caption = MODEL_CAPTION.format(**{**found[0], **{name: found[-1][name] for name in ("prompt", "new")}})
    return "\n\n".join([versions, caption, markdown(header, lines), *note({"transformers": found}, digest)])


def model_task(row: dict) -> str:
    each = row["new"] or row["prompt"]
    return f"{row['task']}, {row['sequences']} × {each} tokens"


def model_row(row: dict, ours_ms: float | None, digest: str) -> list[str]:
    which = [model_task(row) + mark(row, digest), row["experts"]]
    if row["ms"] is None:
        said = f"left out: {row['left_out']}"
        return [*which, f"**{said}**" if row["experts"] == OURS else said, "", ""]
    peak = "" if row["bytes_peak"] is None else f"{row['bytes_peak'] / 1e6:.0f}"
    of_ours = "" if ours_ms is None else f"{ours_ms / row['ms']:.2f}"
    return [*which, f"{row['tokens'] / row['ms'] * 1e3:,.0f}", of_ours, peak]


def skew_row(row: dict, uniform: dict | None, digest: str) -> list[str]:
    ms = row["ms"]
    ratios = [
        uniform["ms"] / ms if uniform else None,
        row["dense_ms"] * PRODUCTS[row["pass"]] / ms,
        row["peers"]["unfused"] / ms if "unfused" in row["peers"] else None,
    ]
    shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
    return [
        DISTRIBUTIONS[row["distribution"]] + mark(row, digest),
        row["pass"],
        f"{ms:.3f}",
        f"{row['tflops']:.0f}",
        *shown,
    ]


def allocations(rows: list[dict]) -> list[str]:
    """What moe's forwards allocate beyond their float32 results, and how much less that is than the unfused path's."""
    forwards = [row for row in rows if row["pass"] == "fwd" and row["bytes_peak"] is not None]
    extra = [(row["bytes_peak"] - 4 * row["T"] * row["N"]) / (row["T"] * row["k"]) for row in forwards]
    if not extra:
        return []
    said = f"Beyond its result a forward of `moe` allocated {min(extra):.1f} to {max(extra):.1f} bytes an assignment."
    saved = [
        (row["peers_bytes_peak"]["unfused"] - row["bytes_peak"]) / (2 * row["T"] * row["k"] * (row["K"] + row["N"]))
        for row in forwards
        if "unfused" in row["peers_bytes_peak"]
    ]
    if saved:
        said += f" The unfused path allocated {span(saved)} times 2·S·(K+N) bytes more than `moe` altogether."
    return [said]


def plots(record: dict, *names: str) -> list[str]:
    files = {name: records.plot_file(record["gpu"], name) for name in names}
    return [f"![{PLOTS[name]}](docs/plots/{file.name})" for name, file in files.items() if file.exists()]


def heading(record: dict) -> str:
    return f"**{record['gpu']}**, torch {record['torch']}, CUDA {record['cuda']}."


def mark(item: dict, digest: str) -> str:
    return "" if item["source_digest"] == digest else f" {OLDER}"


def note(shown: dict, digest: str) -> list[str]:
    """shown: parts of a record, or what a table has of them."""
    return [OLDER_NOTE] if is_older(shown, digest) else []


def is_older(record: dict, digest: str) -> bool:
    parts = [record[name] for name in records.PARTS if name in record]
    items = [item for part in parts for item in (part if isinstance(part, list) else [part])]
    return any(item["source_digest"] != digest for item in items)


def scientific(value: float | None) -> str:
    return "none" if value is None else "0" if value == 0 else f"{value:.1e}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TABLES = {
    "correctness": correctness_table,
    "speed": speed_table,
    "mlp": mlp_table,
    "decode": decode_table,
    "sweeps": sweeps_table,
    "transformers": transformers_table,
}

if __name__ == "__main__":
    sys.exit(main())
