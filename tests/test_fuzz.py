"""A share of the fuzzer, and whether it sees what it looks for."""

import argparse
import json
import shlex
import sys

import oracle
import pytest
import torch
from conftest import DEVICES

pytest.importorskip("hypothesis")  # the hub may run the tests without it

import fuzz  # noqa: E402
from hypothesis import Phase, find, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

CASE = {
    **{"function": "moe", "device": "cpu", "dtype": "float32", "T": 3, "K": 4, "N": 5, "E": 2, "k": 1},
    **{"distribution": "uniform", "seed": 0, "deterministic": False, "index_dtype": "int64", "between": 0},
    **{"layouts": dict.fromkeys(("ids", "dy", "x", "W", "weights")), "weights_dtype": "float32", "out_dtype": None},
}


@settings(fuzz.budget, max_examples=600)
@given(st.sampled_from(DEVICES).flatmap(fuzz.cases))
def test_any_call(kernel, case):
    fuzz.run_case(kernel, case)


class Wrong:
    """The package with a fault in moe: one value of the third row is off."""

    def __init__(self, kernel):
        self.kernel = kernel

    def moe(self, *arguments, **options):
        y = self.kernel.moe(*arguments, **options)
        off = torch.zeros_like(y)
        off[2:3, :1] = 100
        return y + off


def test_a_fault_is_made_small_and_can_be_called_again(monkeypatch, capsys):
    def run_case(kernel, case):
        if case["function"] == "moe" and case["T"] > 2:
            raise AssertionError("the third row is wrong")

    monkeypatch.setattr(fuzz, "run_case", run_case)
    monkeypatch.setattr(fuzz, "BATCH", 40)
    ran, failed = fuzz.hunt(None, "cpu", 1, lambda ran: ran >= 10, functions=("grouped_gemm", "moe"))
    assert ran >= len(failed) > 0
    # The fewest tokens that show it, with nothing special about the rest.
    case = failed[0]
    assert (case["function"], case["T"], case["K"], case["N"], case["E"]) == ("moe", 3, 1, 1, 1)
    assert set(case["layouts"].values()) == {None}
    reason, command = capsys.readouterr().out.splitlines()[:2]
    arguments = shlex.split(command)
    assert reason == "AssertionError: the third row is wrong"
    assert arguments[:3] == ["python", "tests/fuzz.py", "--case"] and json.loads(arguments[3]) == case


def test_the_seed_says_which_cases(kernel, monkeypatch):
    drawn = []
    monkeypatch.setattr(fuzz, "run_case", lambda kernel, case: drawn.append(case))
    monkeypatch.setattr(fuzz, "BATCH", 5)
    runs = []
    for seed in (3, 3, 4):
        drawn.clear()
        assert fuzz.hunt(kernel, "cpu", seed, lambda ran: ran >= 12) == (12, [])
        runs.append(list(drawn))
    assert len(runs[0]) == 12 and runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("failed", [[], [CASE]], ids=["all right", "one wrong"])
def test_command_line(monkeypatch, tmp_path, capsys, failed):
    """A run has its minutes, says its seed and how many cases there were, and fails where one did."""

    def hunt(kernel, device, seed, enough):
        assert (device, seed) == ("cpu", 9)
        now = fuzz.time.monotonic()
        assert not enough(10**9)
        monkeypatch.setattr(fuzz.time, "monotonic", lambda: now + 121)
        assert enough(0)
        return 1234, failed

    file = tmp_path / "counts.json"
    monkeypatch.setattr(fuzz, "hunt", hunt)
    command = ["fuzz.py", "--minutes", "2", "--device", "cpu", "--seed", "9", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    assert fuzz.main() == len(failed)
    assert json.loads(file.read_text()) == {"seed": 9, "minutes": 2.0, "cases": 1234, "failures": len(failed)}
    assert f"1234 cases on cpu in 2 minutes from seed 9: {len(failed)} failures" in capsys.readouterr().out


def test_one_case(kernel, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "--case", json.dumps(CASE)])
    assert fuzz.main() == 0
    assert "right" in capsys.readouterr().out
    monkeypatch.setattr(fuzz, "load_kernel", lambda: Wrong(kernel))
    with pytest.raises(AssertionError, match="largest value"):
        fuzz.main()


@settings(fuzz.budget, max_examples=50)
@given(st.integers(1, 3).flatmap(lambda dims: st.tuples(st.just(dims), fuzz.layouts(dims, repeats=True))), st.data())
def test_placed(drawn, data):
    """The values, but for those that repeat the first one of their dimension, which are rounded; NaN all around."""
    dims, layout = drawn
    t = torch.randn(data.draw(st.lists(st.integers(0, 4), min_size=dims, max_size=dims)))
    view = fuzz.placed(t, layout)
    want = fuzz.with_few_digits(t) if layout["repeated"] else t
    for d in layout["repeated"]:
        want = want.narrow(d, 0, min(1, want.shape[d])).expand(t.shape)
        assert view.stride(d) == 0 or t.shape[d] <= 1
    assert torch.equal(view, want)
    stored = view.new_empty(0).set_(view.untyped_storage())
    assert int((~stored.isnan()).sum()) == torch.Size([1 if d in layout["repeated"] else n for d, n in
                                                       enumerate(t.shape)]).numel() or not t.numel()  # fmt: skip


def test_few_digits(device):
    """Nothing is lost of sums of products of them."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        t = torch.randn(200, device=device).to(dtype)
        few = fuzz.with_few_digits(t)
        assert ((few - t).abs() <= t.abs() / 8).all() and few.dtype == dtype
        products = (few[:100] * few[100:]).float()
        total = torch.zeros_like(products)
        for _ in range(5000):
            total += products
        assert torch.equal(total, 5000 * products)


@pytest.mark.parametrize("apart", [0, 1, 8])
def test_between(device, apart):
    """Values, strides and alignment stay, and so does what lies between the values."""
    wide = torch.randn(5, 12, device=device)
    for t in (wide, wide[:, 1:9], wide[1:, 3:].T, wide[:1].expand(5, 12), wide.bfloat16()[:, 3:7]):
        view, buffer = fuzz.between(t, apart)
        assert torch.equal(view, t)
        assert view.stride() == ((t.shape[1] + apart, 1) if apart else t.stride())
        assert view.data_ptr() % 16 == t.data_ptr() % 16
        assert buffer[: fuzz.FENCE].isnan().all() and buffer[-fuzz.FENCE :].isnan().all()


def test_results_lie_between_other_data(ops, device):
    """Those of the ops, under the mode: what was there stays where nothing is written, a sum is added to it."""
    inputs = oracle.make(6, 8, 16, 3, 1, device=device, distribution="single")
    routing = oracle.expert_order(inputs.ids, 3)[0].int(), torch.tensor([0, 6, 6], dtype=torch.int32, device=device)
    out, dot = torch.zeros(6, 16, device=device), torch.full((1, 6), 7.0, device=device)
    with fuzz.Between(ops.name, apart=1):
        ops.gemm(inputs.x, inputs.W, routing[1], routing[0], 1, True, False, None, None, None, None, out)
        ops.gemm(inputs.x, inputs.W, routing[1], routing[0], 1, True, False, None, None, out.clone(), dot, None)
    oracle.assert_close(out, inputs.x.double() @ inputs.W[1].double().T, 1e-5)
    oracle.assert_close(dot[0, routing[0].long()][None], (out.double() ** 2).sum(1)[None], 1e-5)


@pytest.mark.parametrize("where", ["before", "behind"])
def test_who_writes_outside_of_a_result_is_caught(ops, where):
    """An op that does so stands in for one of the package's."""
    with torch.library._scoped_library("fuzz_stand_in", "DEF") as library:
        library.define("sum_rows(Tensor rows, int top_k, Tensor(a!) out) -> ()")

        @torch.library.impl(library, "sum_rows", "CPU")
        def sum_rows(rows, top_k, out):
            out.zero_()
            start = out.storage_offset() + (-1 if where == "before" else out.numel())
            out.as_strided((1,), (1,), start).zero_()

        with pytest.raises(AssertionError, match="sum_rows has written outside of out"), fuzz.Between("fuzz_stand_in"):
            torch.ops.fuzz_stand_in.sum_rows(torch.ones(4, 3), 2, torch.ones(2, 3))


def test_who_reads_beyond_an_operand_is_caught(ops):
    with torch.library._scoped_library("fuzz_stand_in", "DEF") as library:
        library.define("sum_rows(Tensor rows, int top_k, Tensor(a!) out) -> ()")

        @torch.library.impl(library, "sum_rows", "CPU")
        def sum_rows(rows, top_k, out):
            out.fill_(rows.as_strided((rows.numel() + 1,), (1,)).sum())

        out = torch.ones(2, 3)
        with fuzz.Between("fuzz_stand_in"):
            torch.ops.fuzz_stand_in.sum_rows(torch.ones(4, 3), 2, out)
        assert out.isnan().all()


def test_every_public_function_is_drawn(kernel):
    """Each that computes something; route is called by the others, and experts_forward calls them."""
    names = {name.split("+")[0].split()[0] for name in fuzz.EVERY}
    public = {name for name in kernel.__all__ if callable(getattr(kernel, name)) and name[0].islower()}
    assert names == public - {"route", "experts_forward"}


def test_configurations_of_a_gpu_are_forced(hooks, monkeypatch):
    """Those that it has, on few blocks or on all; sizes reach beyond a tile, experts beyond a schedule's round."""
    names = [f"config-{i}" for i in range(5)]
    monkeypatch.setattr(hooks, "configs_here", lambda: [argparse.Namespace(name=name) for name in names])
    drawn = []

    @settings(fuzz.budget, max_examples=400, derandomize=True)
    @given(fuzz.cases("cuda"))
    def collect(case):
        assert json.loads(json.dumps(case)) == case
        drawn.append(case)

    collect()
    assert {name for case in drawn for name in case["configs"]} == set(names)
    assert {case["blocks"] for case in drawn} == {0, 1, 3}
    search = settings(fuzz.budget, max_examples=20_000, derandomize=True, phases=[Phase.generate])
    for size, most in ("N", 256), ("T", 256), ("E", 1023):
        find(fuzz.cases("cuda"), lambda case, size=size, most=most: case[size] > most, settings=search)
