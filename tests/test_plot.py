"""The plots of the records: that they show the figures, leave out what was not measured, and are not out of date."""

import compare
import matplotlib.pyplot as plt
import plot
import pytest
import record as records
import shapes
import sweep
import tiles
from PIL import Image

STAMP = {"source_digest": "a" * 64, "date": "2026-11-30"}
MATRICES = [shape for shape in shapes.SHAPES if shape.I is None]
PEERS = {"torch._grouped_mm": 1.5, "unfused": 4.0}  # how many times our milliseconds


def row(described, case, ms):
    flops = case.shape.flops * plot.PRODUCTS[case.pass_]
    times = {"ms": ms, "tflops": flops / ms * 1e-9, "dense_ms": ms / 2}
    return {**described, **times, "bytes_peak": 10**8, "peers": {k: v * ms for k, v in PEERS.items()}, **STAMP}


def swept(case):
    shape = case.shape
    slower = {"uniform": 1, "zipf": 1.25, "one": 2}[case.distribution]
    memory = {
        "bytes_saved": 4 * shape.S,
        "peers_bytes_peak": {"torch._grouped_mm": 10**6, "unfused": 14 * shape.S * shape.N},
        "peers_bytes_saved": {"torch._grouped_mm": 512, "unfused": 4 * shape.S * shape.N},
    }
    return {**row(sweep.describe(case, "wgmma"), case, slower * shape.flops * 1e-12), **memory}


def tried(case):
    """Tiles of 128 rows are as fast as what is picked, those of 8 four times as slow."""
    made = row(compare.describe(case, "wgmma"), case, 2.0)
    return {**made, "peers": {"8 rows": 8.0, "128 rows": 2.0}}


def full_record():
    """With figures that none was measured for: moe at 1000 TFLOP/s forward in the scale sweeps."""
    cases = [compare.Case("moe", shape, "bf16", "eager", "fwd") for shape in MATRICES]
    return {
        **{"gpu": "NVIDIA Test 1", "torch": "2.11.0", "cuda": "13.0"},
        "rows": [row(compare.describe(case, "mma"), case, 2.0) for case in cases],
        "sweeps": [swept(case) for case in sweep.cases("cuda")],
        "tiles": [tried(case) for case in tiles.cases("cuda")],
    }


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "PLOTS", tmp_path / "plots")
    return records.PLOTS


def drawn(folder):
    return {file.name for file in folder.iterdir()}


def figure_of(name, record):
    figure = plot.PLOTS[name].draw(plot.PLOTS[name].rows(record))
    plt.close(figure)
    return figure


def curves(axes):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def test_every_plot_is_drawn_and_always_the_same(folder):
    record = full_record()
    assert records.record_mismatches(record) == []
    plot.draw_all(record)
    assert drawn(folder) == {f"test-1-{name}.png" for name in plot.PLOTS}
    first = {file: file.read_bytes() for file in folder.iterdir()}
    for file, content in first.items():
        assert len(content) < 80_000
        with Image.open(file) as image:
            assert image.width == 1000
    plot.draw_all(record)
    assert {file: file.read_bytes() for file in folder.iterdir()} == first


@pytest.mark.parametrize(
    "lacking, left",
    [
        ("sweeps", {"peers", "tiles"}),
        ("rows", {"scale", "skew", "memory", "tiles"}),
        ("tiles", {"peers", "scale", "skew", "memory"}),
        ("base", {"peers", "skew", "tiles"}),
    ],
)
def test_what_was_not_measured_is_left_out(folder, capsys, lacking, left):
    record = full_record()
    if lacking == "base":
        record["sweeps"] = [row for row in record["sweeps"] if (row["shape"], row["pass"]) != (plot.BASE, "fwd")]
    else:
        del record[lacking]
    plot.draw_all(record)
    assert drawn(folder) == {f"test-1-{name}.png" for name in left}
    output = capsys.readouterr().out
    for name in plot.PLOTS.keys() - left:
        assert f"test-1-{name}.png is left out" in output


def test_a_point_that_failed_leaves_a_gap(folder):
    record = full_record()
    for row in record["sweeps"]:
        if row["T"] == 2**18:
            row.update(ms=None, tflops=None, dense_ms=None, peers={}, bytes_peak=None)
        if row["T"] == 2**17:
            for part in "peers", "peers_bytes_peak", "peers_bytes_saved":
                del row[part]["unfused"]
    tokens = curves(figure_of("scale", record).axes[0])
    assert tokens["moe"][0] == [2**i for i in range(10, 18)]
    assert tokens["unfused"][1][-2] == pytest.approx(250) and tokens["unfused"][1][-1] != tokens["unfused"][1][-1]
    plot.draw_all(record)
    assert len(drawn(folder)) == len(plot.PLOTS)


def test_peers_show_the_rates_of_the_fastest_kernels():
    record = full_record()
    slower, faster = ({**record["rows"][1], "path": path, "ms": ms} for path, ms in (("fp32", 3.0), ("wgmma", 1.0)))
    record["rows"] += [faster, slower, {**faster, "op": "grouped_gemm", "ms": 0.1}, {**faster, "mode": "graph"}]
    rows = plot.peers_rows(record)
    assert [row["shape"] for row in rows] == [shape.name for shape in MATRICES]
    assert rows[1] is faster
    axes = figure_of("peers", record).axes[0]
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    flops = [shape.flops for shape in MATRICES]
    assert heights["moe"] == pytest.approx([n / (1 if i == 1 else 2) * 1e-9 for i, n in enumerate(flops)])
    assert heights["unfused"] == pytest.approx([n / 8 * 1e-9 for n in flops])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [row["shape"] for row in rows]


def test_scale_shows_one_size_a_panel():
    tokens, experts = map(curves, figure_of("scale", full_record()).axes)
    for found, sizes in (tokens, range(10, 19)), (experts, range(3, 10)):
        for name, rate in ("moe", 1000), ("dense cuBLAS", 2000), ("unfused", 250):
            assert found[name][0] == [2**i for i in sizes]
            assert found[name][1] == pytest.approx([rate] * len(sizes))


def test_skew_compares_with_uniform_routing():
    forward, both = figure_of("skew", full_record()).axes
    for axes in forward, both:
        assert [text.get_text() for text in axes.texts] == ["× 1.00", "× 0.80", "× 0.50"]
    assert [bar.get_height() for bar in both.containers[-1]] == pytest.approx([3000, 2400, 1500])
    dense = both.containers[0]
    assert dense.get_label() == "dense cuBLAS" and dense[0].get_height() == pytest.approx(2000)


def test_memory_shows_the_peak_and_what_is_kept():
    peak, kept = map(curves, figure_of("memory", full_record()).axes)
    rows = [16384 * 8 * 1536 * n for n in (14, 4)]
    assert peak["moe"][1] == [10**8] * 9 and peak["unfused"][1][4] == rows[0]
    assert kept["moe"][1][4] == 4 * 16384 * 8 and kept["unfused"][1][4] == rows[1]
    assert "torch._grouped_mm, product alone" not in peak


def test_tiles_are_compared_with_the_fastest():
    found = curves(figure_of("tiles", full_record()).axes[0])
    assert found["picked"] == found["of 128"] == ([2**i for i in range(17)], [1.0] * 17)
    assert found["tiles of 8 rows"][1] == [0.25] * 17 and "of 32" not in found


def test_the_caption_says_where_and_when():
    record = full_record()
    rows = record["rows"]
    assert plot.caption(record, rows) == "NVIDIA Test 1, torch 2.11.0, CUDA 13.0, bf16, 2026-11-30"
    later = {**rows[0], "date": "2026-12-02"}
    assert plot.caption(record, [later, *rows]).endswith("bf16, 2026-11-30 to 2026-12-02")


@pytest.mark.parametrize("file", sorted(records.RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_plots_are_in_step_with_the_record(file):
    assert out_of_date(records.read(file)) == []


def test_a_plot_that_its_record_left_behind_is_seen(folder):
    record = full_record()
    plot.draw_all(record)
    assert out_of_date(record) == []
    record["rows"][0]["peers"]["unfused"] += 1
    assert out_of_date(record) == ["test-1-peers.png"]


def out_of_date(record):
    """The plots, as far as they are drawn, that show other figures than the record has."""
    found = []
    for name, kind in plot.PLOTS.items():
        file = records.plot_file(record["gpu"], name)
        if file.exists():
            with Image.open(file) as image:
                if image.text["Source"] != plot.digest(record, kind.rows(record)):
                    found.append(file.name)
    return found
