"""The sweeps: the routings they draw, the points they measure, and the rows that come of it."""

import json
import sys

import pytest
import record as records
import shapes
import sweep
import torch

QWEN = shapes.Shape("qwen3-up", 16384, 2048, 1536, 128, 8)


def loads(distribution, top_k):
    """What share of the tokens each expert gets, the most popular first; ids of each token."""
    shape = shapes.Shape("test", 20_000, 1, 1, 16, top_k)
    torch.manual_seed(0)
    ids = shapes.draw_ids(shape, "cpu", distribution)
    assert ids.shape == (shape.T, top_k) and ids.dtype == torch.int64
    return torch.bincount(ids.flatten(), minlength=16).sort(descending=True).values / shape.T, ids


@pytest.mark.parametrize("distribution", ["uniform", "zipf"])
def test_first_choices_have_the_popularity(distribution):
    shares, _ = loads(distribution, 1)
    popularity = 1 / torch.arange(1.0, 17) if distribution == "zipf" else torch.ones(16)
    assert (shares - popularity / popularity.sum()).abs().max() < 0.015


@pytest.mark.parametrize("distribution", ["uniform", "zipf"])
def test_a_token_has_different_experts(distribution):
    _, ids = loads(distribution, 4)
    assert (ids.sort(dim=1).values.diff(dim=1) > 0).all()


def test_second_choices_are_drawn_among_the_rest():
    """Of experts of popularity p the second is j behind i with p_i p_j / (1 - p_i)."""
    shares, ids = loads("zipf", 2)
    popularity = 1 / torch.arange(1.0, 17)
    p = popularity / popularity.sum()
    second = p * (p / (1 - p)).sum() - p * p / (1 - p)
    assert (shares - (p + second)).abs().max() < 0.015


def test_one_expert_gets_every_row():
    shares, _ = loads("one", 4)
    assert shares[0] == 4 and shares[1:].eq(0).all()


def test_each_point_is_measured_once():
    cases = sweep.cases("cuda")
    assert len(set(cases)) == len(cases) == 20
    uniform = [case.shape for case in cases if (case.pass_, case.distribution) == ("fwd", "uniform")]
    assert QWEN in uniform
    assert sorted(shape.T for shape in uniform if shape.E == QWEN.E) == [2**i for i in range(10, 19)]
    assert sorted(shape.E for shape in uniform if shape.T == QWEN.T) == [2**i for i in range(3, 10)]
    skew = {(case.pass_, case.distribution) for case in cases if case.shape == QWEN}
    assert skew == {(pass_, name) for pass_ in ("fwd", "fwd+bwd") for name in ("uniform", "zipf", "one")}
    assert {case.shape.name for case in cases} >= {"qwen3-up", "qwen3-up T=1024", "qwen3-up E=512"}


def test_a_sweep_on_a_cpu(monkeypatch, tmp_path, capsys):
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--device", "cpu", "--json", str(file)])
    monkeypatch.setattr(sweep, "BUDGET_S", 0)
    assert sweep.main() == 0
    rows = json.loads(file.read_text())
    assert records.mismatches(rows, [records.SWEEP_ROW]) == []
    assert [(row["shape"], row["pass"], row["distribution"]) for row in rows] == [
        (case.shape.name, case.pass_, case.distribution) for case in sweep.cases("cpu")
    ]
    assert all(row["ms"] > 0 and row["dense_ms"] > 0 and set(row["peers"]) == {"loop"} for row in rows)
    assert "zipf" in capsys.readouterr().out


def test_a_point_that_fails_is_told(monkeypatch, tmp_path, capsys):
    """As too little memory would: the others are measured, the exit status says so."""
    measure = sweep.measure

    def failing(case, inputs, device):
        if case.distribution == "zipf":
            raise torch.OutOfMemoryError("no room")
        return measure(case, inputs, device)

    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--device", "cpu", "--json", str(file)])
    monkeypatch.setattr(sweep, "BUDGET_S", 0)
    monkeypatch.setattr(sweep, "measure", failing)
    assert sweep.main() == 1
    rows = json.loads(file.read_text())
    assert records.mismatches(rows, [records.SWEEP_ROW]) == []
    assert {row["distribution"] for row in rows if row["ms"] is None} == {"zipf"}
    assert "no room" in capsys.readouterr().err


@pytest.mark.gpu
def test_memory_is_counted_on_a_gpu():
    """The unfused pipeline keeps its rows for the backward, moe a few words for each of them."""
    shape = shapes.Shape("test", 1024, 256, 192, 8, 4)
    case = sweep.Case("moe", shape, "bf16", "eager", "fwd")
    row = sweep.measure(case, shapes.draw(shape, torch.bfloat16, "cuda"), "cuda")
    result, rows = 4 * shape.T * shape.N, 2 * shape.S * (shape.K + shape.N)
    assert row["bytes_peak"] >= result and row["bytes_saved"] < 32 * shape.S
    assert row["peers_bytes_peak"]["unfused"] >= result + rows and row["peers_bytes_saved"]["unfused"] >= rows
