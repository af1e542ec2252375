"""The deliberate faults of tools/mutate.py: that they still fit the sources, and how what becomes of them is told.

Whether the tests catch them needs a GPU: `python tools/mutate.py --run`.
"""

import re
import subprocess
import sys

import mutate
import pytest
from mutate import MUTATIONS, PENDING, ROOT

import build as build_tool

each = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)


@each
def test_it_applies_once(mutation):
    text = (ROOT / "csrc" / mutation.file).read_text()
    changed = mutate.mutated(mutation, text)
    assert changed != text and changed.count(mutation.new) > text.count(mutation.new)


def test_one_that_does_not_apply_says_so():
    mutation = MUTATIONS[0]
    for text, count in (("", 0), (2 * mutation.old, 2)):
        with pytest.raises(build_tool.BuildError, match=f"{mutation.name}: .* {count} times"):
            mutate.mutated(mutation, text)


@each
def test_its_tests_are_there(mutation):
    assert mutation.tests
    for test in mutation.tests:
        file, function = test.split("::")
        assert re.search(rf"^def {function}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), test


def test_names_differ():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names) and mutate.UNCHANGED not in names


def test_each_part_of_the_kernels_has_some():
    files = {mutation.file for mutation in MUTATIONS}
    for part in ("simt/", "mma/", "wgmma/", "narrow.cuh", "route.cu", "schedule.cu", "weight_grad.cuh", "sum_rows.cu"):
        assert any(file.startswith(part) for file in files), part


@each
def test_a_source_is_compiled_with_it(mutation):
    listed = [name for section in build_tool.Project.read(ROOT, "cuda").sections for name in section.files]
    units = [build_tool.Unit(name, "", [], []) for name in listed if name.endswith((".cpp", ".cu"))]
    unit = mutate.unit_with(mutation.file, units, ROOT)
    assert mutation.file.split("/")[0] not in ("simt", "mma", "wgmma") or mutation.file.split("/")[0] in unit.source


def test_each_gets_a_variant_of_its_own(monkeypatch, tmp_path):
    """One fault at a time, in a copy."""
    before = {file: file.read_text() for file in (ROOT / "csrc").rglob("*.cu*")}
    built = {}

    def build(args):
        faults = [m.name for m in MUTATIONS if m.old not in (args.root / "csrc" / m.file).read_text()]
        built[args.output.name] = faults, args.arch

    monkeypatch.setattr(build_tool, "build", build)
    chosen = list(MUTATIONS[:3])
    mutate.build(chosen, True, tmp_path, 1)
    assert built == {"unchanged": ([], ["9.0"]), **{m.name: ([m.name], ["9.0"]) for m in chosen}}
    assert all(file.read_text() == text for file, text in before.items())


def test_the_table_lists_them():
    text = mutate.TABLE.read_text()
    assert text == mutate.with_results(text, {})


def test_the_table_takes_results():
    text = "words\n\n| name | old header\n"
    first, second = (mutation.name for mutation in MUTATIONS[:2])
    one = mutate.with_results(text, {first: "survived"})
    assert one.startswith("words\n\n| name | fault |")
    assert len(re.findall(rf"^\| `{first}` .* \| survived, \d{{4}}-\d\d-\d\d \|$", one, re.MULTILINE)) == 1
    assert one.count(f"| {PENDING} |") == len(MUTATIONS) - 1
    both = mutate.with_results(one, {second: "caught by `test_ops.py::test_gemm`"})
    assert "| survived, " in both and "| caught by `test_ops.py::test_gemm`, " in both
    assert mutate.with_results(both, {}) == both


@pytest.mark.parametrize(
    "status, output, wanted",
    [
        (0, "12 passed, 1 skipped in 3s", "survived"),
        (0, "3 skipped in 1s", "no answer, pytest ended with 0"),
        (1, "FAILED tests/test_ops.py::test_gemm[None-cuda] - x\n1 failed", "caught by `test_ops.py::test_gemm`"),
        (1, "ERROR tests/test_ops.py::test_gemm - x\n1 error", "caught by `test_ops.py::test_gemm`"),
        (1, "", "no answer, pytest ended with 1"),
        (4, "ERROR: not found: tests/test_ops.py::test_gemm", "no answer, pytest ended with 4"),
        (5, "no tests ran", "no answer, pytest ended with 5"),
        (-11, "", "caught, the process ended with -11"),
    ],
)
def test_verdict(status, output, wanted):
    assert mutate.verdict(status, output) == wanted


def test_a_variant_meets_its_tests(monkeypatch, tmp_path):
    """pytest runs them with the variant in place of the build; one that hangs is caught."""
    seen = []
    script = "import os, sys; print(os.environ['LOCAL_KERNELS'], *sys.argv[1:]); print('1 passed')"

    class Popen(subprocess.Popen):
        def __init__(self, command, **options):
            seen.append((command, options["env"]["LOCAL_KERNELS"]))
            super().__init__([sys.executable, "-c", script], **options)

    monkeypatch.setattr(mutate.subprocess, "Popen", Popen)
    assert mutate.tried(tmp_path, ("test_ops.py::test_gemm",)) == "survived"
    ((command, kernels),) = seen
    assert command[1:3] == ["-m", "pytest"] and command[-1] == "tests/test_ops.py::test_gemm"
    assert kernels == f"phanerozoic/grouped-gemm-moe={tmp_path}"
    script = "import time; time.sleep(60)"
    assert mutate.tried(tmp_path, ("test_ops.py::test_gemm",), 0.2) == "caught, no end in 0.2 s"


def test_a_run(monkeypatch, tmp_path, capsys):
    """Survivors are named and make the exit status 1; where a test fails without a fault nothing is said of faults."""
    table = tmp_path / "table.md"
    table.write_text("| name |\n")
    monkeypatch.setattr(mutate, "TABLE", table)
    for name in (mutate.UNCHANGED, *(m.name for m in MUTATIONS[:2])):
        (tmp_path / name / "torch-variant").mkdir(parents=True)
        (tmp_path / name / "torch-variant" / "metadata.json").touch()
    results = {mutate.UNCHANGED: "survived", MUTATIONS[0].name: "caught by `a`", MUTATIONS[1].name: "survived"}
    monkeypatch.setattr(mutate, "tried", lambda variant, *how: results[variant.parent.name])
    assert mutate.run(list(MUTATIONS[:1]), True, tmp_path) == 0
    assert mutate.run(list(MUTATIONS[:2]), True, tmp_path) == 1
    assert f"1 of 2 are caught.\n  not {MUTATIONS[1].name}" in capsys.readouterr().out
    assert table.read_text().count("| survived, ") == 1
    results[mutate.UNCHANGED] = "caught by `a`"
    assert mutate.run(list(MUTATIONS[:1]), True, tmp_path) == 1
    assert "The sources as they are: caught by `a`." in capsys.readouterr().err
    with pytest.raises(build_tool.BuildError, match="has no variant"):
        mutate.run(list(MUTATIONS[2:3]), False, tmp_path)
