"""The GPU record and its tools: README in step with it, its form, how measurements enter it, that failures show."""

import argparse
import copy
import gc
import json
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import compare
import decode
import memory
import model
import peers
import pytest
import readme_tables
import record as records
import record_gpu
import shapes
import tiles
import torch
from timing import captured

ROOT = Path(__file__).resolve().parents[1]

NOW, BEFORE = "a" * 64, "b" * 64
STAMP = {"source_digest": NOW, "date": "2026-11-30"}
ROW = {
    **{"op": "moe", "shape": "seed", "T": 4096, "K": 2048, "N": 2048, "I": None, "E": 8, "k": 2, "dtype": "bf16"},
    **{"path": "mma", "mode": "eager", "pass": "fwd", "distribution": "uniform", "ms": 0.2, "tflops": 687.2},
    **{"dense_ms": 0.1, "bytes_peak": 34_000_000, "peers": {"unfused": 0.5}, **STAMP},
}
SWEEP_ROW = {
    **{**ROW, "shape": "qwen3-up", "bytes_saved": 65_000},
    **{"peers_bytes_peak": {"unfused": 10**9}, "peers_bytes_saved": {}},
}
MLP_ROW = {
    **{**ROW, "op": "moe_mlp", "shape": "mlp", "T": 32768, "K": 2048, "N": 2048, "I": 768, "E": 128, "k": 8},
    **{"ms": 4.0, "tflops": 618.5, "dense_ms": 3.6, "bytes_peak": 2 * 10**9, "peers": {"SonicMoE": 4.4}},
}
DECODE_ROW = {
    **{**MLP_ROW, "shape": "few", "T": 4, "mode": "graph", "ms": 0.1},
    **{"peers": {"floor": 0.07, "transformers batched_mm": 0.3}},
}
MEMORY_ROW = {
    **{name: MLP_ROW[name] for name in (*records.KIND, "source_digest", "date")},
    **{"pass": "fwd+bwd", "bytes_peak": 2 * 10**9, "bytes_saved": 808_000_000},
    **{"peers_bytes_peak": {"unfused": 7 * 10**9}, "peers_bytes_saved": {"unfused": 4 * 10**9}},
}
MODEL_ROW = {
    **{"task": "training step", "experts": "grouped_gemm_moe"},
    **{"sequences": 4, "prompt": 2048, "new": 0, "tokens": 8192},
    **{"T": 8192, "H": 2048, "I": 768, "E": 128, "k": 8, "layers": 4, "transformers": "5.17.0", "dtype": "bf16"},
    **{"ms": 20.0, "bytes_peak": 9 * 10**9, "left_out": None, **STAMP},
}
OF_16 = {**MODEL_ROW, "task": "generate", "sequences": 16, "prompt": 16, "new": 64, "tokens": 1024, "T": 256}
OUT_OF_MEMORY = {"ms": None, "bytes_peak": None, "left_out": "OutOfMemoryError"}
RECORD = {
    **{"gpu": "NVIDIA Test 1", "torch": "2.11.0", "cuda": "13.0"},
    "tests": {"passed": 10, "failed": 0, "skipped": 1, **STAMP},
    "sanitizer": {"memcheck": 0, "racecheck": 0, "initcheck": 0, "synccheck": 0, **STAMP},
    "fuzz": {"seed": 7, "minutes": 10.0, "cases": 12345, "failures": 0, **STAMP},
    "correctness": [
        {"name": "moe", "dtype": "fp32", "metric": "max relative", "value": 1e-6, "limit": 1e-5, **STAMP},
    ],
    "rows": [ROW, {**ROW, "pass": "fwd+bwd", "ms": 0.6, "peers": {}}, MLP_ROW, DECODE_ROW],
    "sweeps": [SWEEP_ROW, {**SWEEP_ROW, "distribution": "zipf", "ms": 0.25, "bytes_peak": 33_619_968, "peers": {}}],
    "memory": [MEMORY_ROW, {**MEMORY_ROW, "op": "moe_mlp(rounded)", "bytes_peak": 3 * 10**9}],
    "tiles": [
        {**DECODE_ROW, "T": 1, "peers": {"8 rows": 0.1, "128 rows": 0.4}},
        {**DECODE_ROW, "T": 1024, "ms": 0.42, "peers": {"8 rows": 0.8, "128 rows": 0.4}},
    ],
    "transformers": [
        MODEL_ROW,
        {**MODEL_ROW, "experts": "eager", "ms": 80.0},
        {**MODEL_ROW, "experts": "batched_mm", **OUT_OF_MEMORY},
        OF_16,
        {**OF_16, "experts": "batched_mm", "ms": 25.0},
    ],
}
MACHINE = {name: RECORD[name] for name in records.MACHINE}
README = (
    "before\n<!-- table:correctness -->\n<!-- /table -->\n<!-- table:speed -->\nlast year\n<!-- /table -->\n"
    "<!-- table:mlp -->\n<!-- /table -->\n<!-- table:decode -->\n<!-- /table -->\n"
    "<!-- table:sweeps -->\n<!-- /table -->\n<!-- table:transformers -->\n<!-- /table -->\nafter\n"
)


def changed(**parts):
    return {**copy.deepcopy(RECORD), **parts}


def tables(*found):
    return readme_tables.with_tables(README, list(found), NOW)


def recorded():
    return sorted(records.RESULTS.glob("*.json"))


def test_readme_is_in_step_with_the_record():
    succeed("tools/readme_tables.py", "--check")


@pytest.mark.parametrize("file", recorded(), ids=lambda file: file.stem)
def test_each_record_has_the_form(file):
    assert records.record_mismatches(json.loads(file.read_text())) == []


def test_the_form_accepts_a_record_and_part_of_one():
    assert records.record_mismatches(RECORD) == []
    assert records.record_mismatches(MACHINE) == []


@pytest.mark.parametrize(
    "record, found",
    [
        (changed(tests={"passed": 10, **STAMP}), ["record.tests lacks failed", "record.tests lacks skipped"]),
        (changed(sanitizer={**RECORD["sanitizer"], "memcheck": "0"}), ["record.sanitizer.memcheck is '0'"]),
        (changed(fuzz={**RECORD["fuzz"], "cases": 0.5}), ["record.fuzz.cases is 0.5"]),
        (changed(rows=[ROW, {**ROW, "speed": 1}]), ["record.rows[1] should not have speed"]),
        (changed(rows=[{**ROW, "peers": {"unfused": None}}]), ["record.rows[0].peers.unfused is None"]),
        (changed(rows=ROW), [f"record.rows is {ROW!r}"]),
        (
            changed(sweeps=[{**SWEEP_ROW, "peers_bytes_peak": {"unfused": 1.5}}]),
            ["record.sweeps[0].peers_bytes_peak.unfused is 1.5"],
        ),
        (changed(memory=[{**MEMORY_ROW, "bytes_saved": 0.5}]), ["record.memory[0].bytes_saved is 0.5"]),
        (changed(memory=[{**MEMORY_ROW, "ms": 1.0}]), ["record.memory[0] should not have ms"]),
        (changed(notes="fast"), ["record should not have notes"]),
    ],
)
def test_the_form_refuses(record, found):
    assert records.record_mismatches(record) == found


def test_rows_replace_those_of_their_kind():
    again = {**ROW, "ms": 0.15}
    other = {**ROW, "path": "wgmma"}
    result = records.merged(RECORD, {**MACHINE, "rows": [other, again]})
    assert result["rows"] == [again, *RECORD["rows"][1:], other]
    assert {**result, "rows": None} == {**RECORD, "rows": None}


@pytest.mark.parametrize(
    "name, item", [("correctness", {"name": "grouped_gemm"}), ("sweeps", {"T": 1024}), ("memory", {"T": 1})]
)
def test_other_parts_are_replaced_whole(name, item):
    part = [{**RECORD[name][0], **item}]
    assert records.merged(RECORD, {**MACHINE, name: part}) == changed(**{name: part})


@pytest.mark.parametrize("before, kept", [(NOW, 3), (BEFORE, None)])
def test_a_sanitizer_joins_those_of_the_same_sources(before, kept):
    others = dict.fromkeys(("memcheck", "initcheck", "synccheck"), 3)
    record = changed(sanitizer={**others, "racecheck": 4, **STAMP, "source_digest": before})
    result = records.merged(record, {**MACHINE, "sanitizer": {"racecheck": 0, **STAMP}})
    assert result["sanitizer"] == {**dict.fromkeys(others, kept), "racecheck": 0, **STAMP}


def test_the_first_part_makes_a_record():
    assert records.merged({}, {**MACHINE, "rows": [ROW]}) == {**MACHINE, "rows": [ROW]}


@pytest.mark.parametrize("name, other", [("gpu", "NVIDIA Test 2"), ("torch", "2.13.0"), ("cuda", "12.6")])
def test_a_record_keeps_to_one_machine(name, other):
    with pytest.raises(ValueError, match=f"{MACHINE[name]}.*{other}"):
        records.merged(RECORD, {**MACHINE, name: other, "rows": []})


def test_a_record_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "results" / "test.json"
    records.write(file, RECORD)
    assert records.read(file) == RECORD
    with pytest.raises(ValueError):
        records.write(file, changed(gpu=float("nan")))
    assert records.read(file) == RECORD
    assert records.read(tmp_path / "none.json") == {}


def test_tables_show_the_figures():
    text = tables(RECORD)
    assert "| moe | fp32 | max relative | 1.0e-06 | 1.0e-05 | yes |" in text
    assert "Tests: 10 passed, 0 failed, 1 skipped." in text
    assert "memcheck 0 errors, racecheck 0 errors, initcheck 0 errors, synccheck 0 errors." in text
    assert "Fuzzer: 12,345 random calls in 10 minutes from seed 7, 0 failed." in text
    sizes = "4096, 2048, 2048, 8, 2"
    assert f"| moe seed | {sizes} | bf16 | mma | fwd | 0.200 | 687 | 0.50 | 2.50 | 34 |" in text
    assert f"| moe seed | {sizes} | bf16 | mma | fwd+bwd | 0.600 | 687 | 0.50 |  | 34 |" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "last year" not in text
    assert readme_tables.with_tables(text, [RECORD], NOW) == text
    assert readme_tables.OLDER not in text


def test_speed_in_a_sentence():
    """The fastest kernels of these sources at each shape; what is older stands last and is not counted."""
    old = {**ROW, "ms": 0.01, "source_digest": BEFORE}
    text = tables(changed(rows=[old, ROW, {**ROW, "path": "wgmma", "ms": 0.125}, {**ROW, "shape": "other"}]))
    assert "`moe`, forward in bf16, is 0.50 to 0.80 times dense, 2.50 to 4.00 times unfused." in text
    assert text.index("| 0.125 |") < text.index("| 0.010 |")
    assert "The rate of" not in tables(changed(rows=[old]))


def test_tables_show_the_sweeps():
    text = tables(RECORD)
    assert (
        "| uniform | fwd | 0.200 | 687 | 1.00 | 0.50 | 2.50 |\n| Zipf(1) | fwd | 0.250 | 687 | 0.80 | 0.40 |  |" in text
    )
    assert "allocated 8.0 to 54.4 bytes an assignment." in text
    assert "The unfused path allocated 14.39 to 14.40 times 2·S·(K+N) bytes more than `moe` altogether." in text
    alone = [{**row, "peers_bytes_peak": {}} for row in RECORD["sweeps"]]
    assert "bytes an assignment.\n" in tables(changed(sweeps=alone))
    failed = {**SWEEP_ROW, "ms": None, "tflops": None, "dense_ms": None, "bytes_peak": None}
    assert "| Zipf(1) | fwd | 0.250 | 687 |  | 0.40 |  |" in tables(changed(sweeps=[failed, RECORD["sweeps"][1]]))
    assert "points failed" not in text and "**1 of 1 points failed.**" in tables(changed(sweeps=[failed]))


def test_tensor_cores_are_compared_with_float32():
    exact = {**ROW, "dtype": "fp32", "path": "fp32", "ms": 1.6}
    said = "`moe` in bf16 is 8.0 (mma) and 16.0 (wgmma) times as fast as in fp32, forward at seed."
    assert said in tables(changed(rows=[ROW, {**ROW, "path": "wgmma", "ms": 0.1}, exact]))
    old = {**ROW, "path": "wgmma", "ms": 0.1, "source_digest": BEFORE}
    assert "is 8.0 (mma) times as fast" in tables(changed(rows=[ROW, old, exact]))
    assert "times as fast as in fp32" not in tables(changed(rows=[exact])) + tables(RECORD)


def test_mlps_have_a_table_of_their_own():
    text = tables(RECORD)
    speed, mlp = (text[text.index(f"<!-- table:{name}") :].split("<!-- /table -->")[0] for name in ("speed", "mlp"))
    assert "moe_mlp" not in speed and "moe seed" not in mlp
    assert "SonicMoE" not in speed and "× unfused" not in mlp
    assert "`moe_mlp`, forward in bf16, is 0.90 times dense, 1.10 times SonicMoE." in mlp
    assert "|  | T, H, I, E, k | dtype | kernels | pass | ms | TFLOP/s | of dense | × SonicMoE | peak MB |" in mlp
    assert "| moe_mlp mlp | 32768, 2048, 768, 128, 8 | bf16 | mma | fwd | 4.000 | 618 | 0.90 | 1.10 | 2000 |" in mlp
    assert "1343 MB of gradients included" in mlp
    assert "| moe_mlp | 942 | 1.00 | 2000 | 1.00 |\n| moe_mlp(rounded) | 942 | 1.00 | 3000 | 1.50 |" in mlp
    assert "| unfused | 4134 | 4.40 | 7000 | 3.50 |" in mlp


def test_mlps_that_were_not_measured_do_not_appear():
    one = changed(rows=[ROW])
    del one["memory"]
    assert "moe_mlp" not in tables(one) and tables(one).count(readme_tables.NO_RECORD) == 2
    assert tables(one, RECORD).count(readme_tables.NO_RECORD) == 0
    uncounted = {**MEMORY_ROW, "bytes_peak": None, "bytes_saved": None}
    assert "of gradients" not in tables(changed(memory=[uncounted]))
    old = {**MEMORY_ROW, "source_digest": BEFORE}
    assert tables(changed(memory=[old])).count("| moe_mlp † |") == 1


def test_tables_show_the_plots_that_are_drawn(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "PLOTS", tmp_path)
    assert "![" not in tables(RECORD)
    for name in readme_tables.PLOTS:
        (tmp_path / f"test-1-{name}.png").touch()
    text = tables(RECORD)
    assert [text.count(f"](docs/plots/test-1-{name}.png)") for name in readme_tables.PLOTS] == [1] * len(
        readme_tables.PLOTS
    )


def test_tables_without_a_record_say_so():
    assert tables().count(readme_tables.NO_RECORD) == 5
    assert tables().endswith("<!-- table:transformers -->\n<!-- /table -->\nafter\n")


def test_tables_mark_what_is_older_than_the_sources():
    old = {**ROW, "source_digest": BEFORE}
    text = tables(changed(rows=[ROW, {**old, "pass": "fwd+bwd"}]))
    assert text.count("moe seed † |") == 1 and text.count(readme_tables.OLDER_NOTE) == 1
    assert readme_tables.is_older(changed(tests={**RECORD["tests"], "source_digest": BEFORE}), NOW)
    text = tables(changed(fuzz={**RECORD["fuzz"], "source_digest": BEFORE}))
    assert "from seed 7, 0 failed †." in text and text.count(readme_tables.OLDER_NOTE) == 1
    assert not readme_tables.is_older(RECORD, NOW)


@pytest.mark.parametrize(
    "record, shown",
    [
        (changed(tests={**RECORD["tests"], "failed": 2}), "**2 failed**"),
        (changed(sanitizer={**RECORD["sanitizer"], "memcheck": 3}), "memcheck **3 errors**, racecheck 0 errors"),
        (changed(sanitizer={**RECORD["sanitizer"], "racecheck": None}), "racecheck **could not finish**"),
        (changed(fuzz={**RECORD["fuzz"], "minutes": 2, "failures": 3}), "in 2 minutes from seed 7, **3 failed**."),
        (changed(correctness=[{**RECORD["correctness"][0], "value": 2e-5}]), "| 2.0e-05 | 1.0e-05 | **no** |"),
        (changed(correctness=[{**RECORD["correctness"][0], "value": None}]), "| none | 1.0e-05 | **no** |"),
        (changed(rows=[{**ROW, "ms": None, "tflops": None, "dense_ms": None, "peers": {}}]), "**failed**"),
    ],
)
def test_tables_show_failures(record, shown):
    assert records.record_mismatches(record) == []
    assert shown in tables(record)


@pytest.mark.parametrize("marks", ["", "<!-- table:speed -->\n<!-- /table -->\n" * 2])
def test_tables_need_their_place(marks):
    with pytest.raises(SystemExit, match="should have one"):
        readme_tables.with_tables("<!-- table:correctness -->\n<!-- /table -->\n" + marks, [RECORD], NOW)


def test_tests_are_counted():
    suite = '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/></testsuites>'
    assert record_gpu.count_tests(suite, 1) == {"passed": 3, "failed": 3, "skipped": 3}
    good = '<testsuites><testsuite tests="2" failures="0" errors="0" skipped="0"/></testsuites>'
    assert record_gpu.count_tests(good, 0) == {"passed": 2, "failed": 0, "skipped": 0}
    assert record_gpu.count_tests(good, 3) == {"passed": 2, "failed": 1, "skipped": 0}
    assert record_gpu.count_tests(None, 139) == {"passed": 0, "failed": 1, "skipped": 0}


def test_fuzzed_cases_are_counted():
    found = {"seed": 7, "minutes": 1.5, "cases": 90, "failures": 0}
    assert record_gpu.count_cases(json.dumps(found), 7, 1.5, 0) == found
    assert record_gpu.count_cases(json.dumps({**found, "failures": 2}), 7, 1.5, 1) == {**found, "failures": 2}
    assert record_gpu.count_cases(json.dumps(found), 7, 1.5, 1) == {**found, "failures": 1}
    assert record_gpu.count_cases(None, 7, 1.5, 139) == {**found, "cases": 0, "failures": 1}


def test_the_fuzzer_is_run_where_it_is_asked_for(monkeypatch):
    commands = []
    monkeypatch.setattr(record_gpu, "python", lambda *command: commands.append(list(map(str, command))) or 0)
    counts, good = record_gpu.run_fuzz(argparse.Namespace(minutes=2.0, seed=7))
    assert counts == {"seed": 7, "minutes": 2.0, "cases": 0, "failures": 0} and good
    ((script, *options, _),) = commands
    assert script == str(ROOT / "tests" / "fuzz.py")
    assert options == ["--device", "cuda", "--minutes", "2.0", "--seed", "7", "--json"]
    assert records.OPTIONAL < set(record_gpu.PARTS) == set(records.PARTS)


def test_sanitizer_errors_are_counted():
    memcheck, racecheck = "===== ERROR SUMMARY: {} errors\n", "== RACECHECK SUMMARY: {} hazards displayed (0 errors)\n"
    assert record_gpu.count_errors(memcheck.format(0), 0) == 0
    assert record_gpu.count_errors(memcheck.format(12), 0) == 12
    assert record_gpu.count_errors(racecheck.format(4), 0) == 4
    assert record_gpu.count_errors(memcheck.format(0), 1) is None
    assert record_gpu.count_errors("Device not supported\n", 0) is None


@pytest.mark.parametrize(
    "output, status, found", [("ERROR SUMMARY: 0 errors", 0, 0), ("ERROR SUMMARY: 2 errors", 1, 32), ("", 1, None)]
)
def test_each_share_of_a_sweep_is_watched(monkeypatch, output, status, found):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, status, stdout=output)

    monkeypatch.setattr(record_gpu.subprocess, "run", run)
    monkeypatch.setattr(record_gpu.shutil, "which", lambda *_, **__: "compute-sanitizer")
    counts, good = record_gpu.run_sanitizer(argparse.Namespace(sanitizers="racecheck,initcheck"))
    assert counts == {"racecheck": found, "initcheck": found} and good == (found == 0)
    shares = sorted((command[2], command[-1]) for command in commands)
    assert shares == sorted((tool, f"{i}/16") for tool in counts for i in range(16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_run_keeps_what_it_reads():
    read = torch.ones(4, device="cuda")
    alive = weakref.ref(read)
    replay = captured(partial(torch.neg, read))
    del read
    gc.collect()
    assert alive() is not None
    replay()


def test_a_few_tokens_have_a_table_of_their_own():
    record = changed(rows=[MLP_ROW, DECODE_ROW])
    assert "| few | 4, 2048, 768, 128, 8 | bf16 | mma | graph | 100.0 | 0.70 | 3.00 |" in readme_tables.decode_table(
        record, NOW
    )
    assert "few" not in readme_tables.mlp_table(record, NOW)
    assert readme_tables.decode_table(changed(rows=[MLP_ROW]), NOW) == ""
    said = "takes at most 1.05 times as long as with the best ones, at 1,024 of 1 to 1,024 tokens."
    assert said in readme_tables.decode_table(RECORD, NOW)


def test_a_model_has_a_table_of_its_own():
    table = readme_tables.transformers_table(RECORD, NOW)
    assert "torch 2.11.0, CUDA 13.0, transformers 5.17.0." in table
    assert "4 layers with random weights (hidden 2048, 128 experts of 768, top-8, bf16)" in table
    assert "adds 64 tokens to 16 of each sequence" in table
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert rows == [
        "| training step, 4 × 2048 tokens | grouped_gemm_moe | 409,600 | 1.00 | 9000 |",
        "| training step, 4 × 2048 tokens | eager | 102,400 | 0.25 | 9000 |",
        "| training step, 4 × 2048 tokens | batched_mm | left out: OutOfMemoryError |  |  |",
        "| generate, 16 × 64 tokens | grouped_gemm_moe | 51,200 | 1.00 | 9000 |",
        "| generate, 16 × 64 tokens | batched_mm | 40,960 | 0.80 | 9000 |",
    ]
    failed = changed(transformers=[{**MODEL_ROW, **OUT_OF_MEMORY}, {**MODEL_ROW, "experts": "eager"}])
    assert "| **left out: OutOfMemoryError** |  |  |" in readme_tables.transformers_table(failed, NOW)
    assert "| eager | 409,600 |  | 9000 |" in readme_tables.transformers_table(failed, NOW)


def test_some_rows_can_be_chosen(monkeypatch):
    monkeypatch.setattr(record_gpu, "json_of", lambda *command: (list(command), 0))
    args = argparse.Namespace(ops="moe_mlp", shapes=None, path="mma")
    assert record_gpu.run_rows(args) == (["compare.py", "--ops=moe_mlp", "--path=mma"], True)
    args = argparse.Namespace(ops=None, shapes=None, path=None)
    assert record_gpu.run_rows(args) == (["compare.py", "decode.py"], True)


def test_a_part_that_fails_is_recorded_and_told(monkeypatch, tmp_path, capsys):
    file = tmp_path / "test.json"
    counts = {"passed": 1, "failed": 2, "skipped": 0}
    correctness = [{"name": "moe", "dtype": "fp32", "metric": "max relative", "value": 1e-6, "limit": 1e-5}]
    parts = {"tests": lambda args: (counts, False), "correctness": lambda args: (correctness, True)}
    monkeypatch.setattr(record_gpu, "PARTS", parts)
    monkeypatch.setattr(record_gpu, "built_from", record_gpu.source_digest)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test 1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    monkeypatch.setattr(sys, "argv", ["record_gpu.py", "--output", str(file)])
    assert record_gpu.main() == 1
    assert "tests FAILED" in capsys.readouterr().out
    record = records.read(file)
    assert records.record_mismatches(record) == []
    assert {**record["tests"], **counts} == record["tests"] and record["correctness"][0]["value"] == 1e-6

    monkeypatch.setattr(sys, "argv", ["record_gpu.py", "--output", str(file), "--only", "correctness"])
    assert record_gpu.main() == 0
    assert records.read(file)["tests"] == record["tests"]

    monkeypatch.setattr(record_gpu, "built_from", lambda: BEFORE)
    with pytest.raises(SystemExit):
        record_gpu.main()
    assert "built from other sources" in capsys.readouterr().err


def test_a_gpu_names_its_file():
    assert records.file_name("NVIDIA H200") == "h200"
    assert records.file_name("NVIDIA RTX PRO 6000 Blackwell") == "rtx-pro-6000-blackwell"


def succeed(*command):
    """Runs it with one thread: threads that wait for each other make small problems slow on a busy machine."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def measured(script, tmp_path, *options):
    file = tmp_path / "rows.json"
    succeed(f"benchmarks/{script}", "--device", "cpu", "--json", file, *options)
    return json.loads(file.read_text())


def test_speed_is_measured_on_a_cpu_too(tmp_path):
    rows = measured("compare.py", tmp_path, "--shapes", "cpu-top2,cpu-mlp", "--dtypes", "fp32")
    assert records.mismatches(rows, [records.ROW]) == []
    kinds = [(row["op"], row["I"], row["pass"]) for row in rows]
    ops = {"moe": None, "grouped_gemm": None, "moe_mlp": 64, "moe_mlp(rounded)": 64}
    assert kinds == [(op, inner, pass_) for op, inner in ops.items() for pass_ in ("fwd", "fwd+bwd")]
    assert all(row["ms"] > 0 and row["dense_ms"] > 0 and set(row["peers"]) == {"loop"} for row in rows)


def test_mlps_are_measured_at_the_shapes_of_models(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare.py", "--device", "cuda", "--ops", "moe_mlp,moe_mlp(rounded)"])
    cases = compare.cases(compare.parse_arguments())
    assert {case.dtype for case in cases} == {"bf16"} and {case.mode for case in cases} == {"eager"}
    free, rounded = ({case.shape.name for case in cases if case.op == op} for op in ("moe_mlp", "moe_mlp(rounded)"))
    assert len(free) == 5 and rounded == free - {"mixtral-8x7b"}
    qwen = next(case.shape for case in cases if case.shape.name == "qwen3-30b-a3b")
    assert qwen.flops == 6 * 32768 * 8 * 2048 * 768
    inputs = shapes.draw(next(s for s in shapes.CPU_SHAPES if s.I), torch.float32, "cpu")
    pre = inputs.x @ inputs.w_up[0].T
    rows = torch.randn(128, 64) @ inputs.w_down[0].T
    assert 0.8 < pre.std() < 1.25 and 0.8 < rows.std() < 1.25


@pytest.mark.parametrize("op", ["moe(deterministic)", "grouped_mm"])
def test_ways_that_only_a_gpu_times_by_default(op):
    inputs = shapes.draw(shapes.CPU_SHAPES[1], torch.float32, "cpu")
    row = compare.measure(compare.Case(op, shapes.CPU_SHAPES[1], "fp32", "eager", "fwd+bwd"), inputs, "cpu")
    assert row["ms"] > 0 and row["peers"]["loop"] > 0


def test_deterministic_algorithms_are_on_while_they_are_timed():
    def settings():
        return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory

    before = settings()
    assert before != (True, False) == compare.deterministically(settings)() and settings() == before


def test_few_tokens_are_measured_on_a_cpu_too(tmp_path):
    (row,) = measured("decode.py", tmp_path)
    assert records.mismatches([row], [records.ROW]) == []
    assert (row["op"], row["I"], row["pass"]) == ("moe_mlp", 64, "fwd")
    assert 0 < row["peers"]["floor"] < row["ms"] and row["peers"]["loop"] > 0


def test_few_tokens_are_those_of_models():
    cases = decode.cases("cuda")
    assert {(case.op, case.pass_) for case in cases} == {("moe_mlp", "fwd")}
    assert [[c.shape for c in cases if (c.mode, c.dtype) == (mode, "bf16")] for mode in ("graph", "eager")] == [
        list(shapes.DECODE_SHAPES)
    ] * 2
    qwen, mixtral = ({c.shape.T for c in cases if c.shape.name.startswith(name)} for name in ("qwen3", "mixtral"))
    assert qwen == {1, 4, 16, 64, 256} and mixtral == {1, 4, 16, 64}
    assert {case.dtype for case in cases if case.shape.T == 16} == {"bf16", "fp16", "fp32"}
    inputs = shapes.draw(shapes.CPU_SHAPES[2], torch.bfloat16, "cpu", "one")
    assert decode.touched_bytes(inputs) == 3 * 96 * 64 * 2


@pytest.mark.parametrize("op, inner", [("moe", None), ("moe(deterministic)", None), ("moe_mlp", 64)])
def test_peers_compute_what_ours_does(op, inner):
    """But for torch._grouped_mm, which does a part of moe's work."""
    shape = shapes.Shape("test", 128, 96, 96, 8, 4, I=inner)
    inputs = shapes.draw(shape, torch.bfloat16, "cuda" if torch.cuda.is_available() else "cpu")
    _, others = compare.contenders(compare.Case(op, shape, "bf16", "eager", "fwd"), inputs, "cuda")
    others.pop("torch._grouped_mm", None)
    assert ("moe" if op == compare.DETERMINISTIC else "unfused") in others
    if op == "moe_mlp":
        others |= {name: partial(peer, *vars(inputs).values()) for name, peer in peers.TRANSFORMERS.items()}
    for name, other in others.items():
        if compare.runs_at_all(name, other):
            compare.check_agreement(other(), inputs, op)


def test_tiles_are_measured_on_a_cpu_too(tmp_path):
    (row,) = measured("tiles.py", tmp_path)
    assert records.mismatches([row], [records.ROW]) == [] and row["ms"] > 0


@pytest.mark.gpu
def test_tiles_of_each_height_are_tried():
    shape = shapes.Shape("test", 64, 256, 256, 8, 4, I=192)
    inputs = shapes.draw(shape, torch.bfloat16, "cuda")
    row = tiles.measure(compare.Case("moe_mlp", shape, "bf16", "graph", "fwd"), inputs, "cuda")
    assert set(row["peers"]) == {"8 rows", "32 rows", "128 rows"}
    assert list(tiles.heights(replace(shape, T=2**20))) == [128]


def test_memory_is_measured_on_a_cpu_too(tmp_path):
    rows = measured("memory.py", tmp_path)
    assert records.mismatches(rows, [records.MEMORY_ROW]) == []
    assert [row["op"] for row in rows] == ["moe_mlp", "moe_mlp(rounded)"]


@pytest.mark.gpu
def test_a_gpu_keeps_what_an_mlp_is_the_activation_of():
    shape = shapes.Shape("test", 1024, 256, 256, 8, 4, I=192)
    row = memory.measure(compare.Case("moe_mlp", shape, "bf16", "eager", "fwd+bwd"), "cuda")
    pre = 4 * shape.S * shape.I
    assert pre <= row["bytes_saved"] < pre + 32 * shape.S
    assert row["peers_bytes_saved"]["unfused"] >= pre + 2 * shape.S * (shape.K + shape.I + shape.N)
    assert row["peers_bytes_peak"]["unfused"] > row["bytes_peak"]


def test_a_model_is_measured_on_a_cpu_too(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    rows = measured("model.py", tmp_path)
    assert records.mismatches(rows, [records.MODEL_ROW]) == []
    tasks = [(task.name, task.tokens) for task in model.TASKS["cpu"]]
    assert [(row["task"], row["tokens"], row["experts"]) for row in rows] == [
        (*task, experts) for task in tasks for experts in model.IMPLEMENTATIONS
    ]
    assert all(row["ms"] > 0 and row["left_out"] is None for row in rows)


def test_experts_that_fail_or_are_wrong_are_left_out(monkeypatch, capsys):
    moe = pytest.importorskip("transformers.integrations.moe", reason="this transformers has no experts functions")

    def no_memory(*args):
        raise torch.OutOfMemoryError("not enough")

    made = model.make("cpu")
    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS, "batched_mm", no_memory)
    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS, model.OURS, lambda module, x, *_: torch.zeros_like(x))
    rows = model.measure(made, model.TASKS["cpu"][0], "cpu")
    found = {row["experts"]: row["left_out"] for row in rows}
    assert found == {"eager": None, model.OURS: "AssertionError", "grouped_mm": None, "batched_mm": "OutOfMemoryError"}
    assert [row["experts"] for row in rows if row["ms"]] == ["eager", "grouped_mm"]
    assert model.report(rows) == 1 and "batched_mm          left out: OutOfMemoryError" in capsys.readouterr().out
    assert all(p.grad is None for p in made.parameters())


def test_correctness_is_measured_on_a_cpu_too(tmp_path):
    rows = measured("correctness.py", tmp_path)
    assert records.mismatches(rows, [records.CORRECTNESS]) == []


def test_the_hub_can_run_the_benchmark():
    pytest.importorskip("tabulate")
    cli = ["-c", "from kernels.cli import main; main()"]
    succeed(*cli, "benchmark", ".", "--iterations", "3", "--warmup", "1")


def test_the_sanitizer_sweep_computes_what_it_checks(monkeypatch):
    import sanitize_sweep

    monkeypatch.setattr(sanitize_sweep, "DEVICE", "cpu")
    torch.manual_seed(0)
    for features, outputs in sanitize_sweep.ALIGNED, sanitize_sweep.UNALIGNED:
        sanitize_sweep.sweep(torch.float32, features, outputs, transposed=True)
    sanitize_sweep.many_groups(torch.float32)
    sanitize_sweep.long_groups(torch.float32)
    sanitize_sweep.many_ids()
    assert not torch.are_deterministic_algorithms_enabled()
