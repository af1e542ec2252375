"""The examples in one process: training a language model, and adapters on frozen experts."""

import json
import subprocess
import sys
from pathlib import Path

import problems
import pytest
import torch
from conftest import load_example

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SMALL = "--steps 60 --lr 0.05 --batch 8 --context 32 --hidden 64 --heads 2 --inner 32 --experts 4 --sample 20".split()


@pytest.fixture(scope="module")
def example():
    return load_example("train_moe_lm")


def train(example, folder, name, *options):
    """The report of a small run in this process."""
    report = folder / f"{name}.json"
    example.main([*SMALL, "--png", str(folder / f"{name}.png"), "--json", str(report), *options])
    return json.loads(report.read_text())


def test_command(tmp_path, device):
    files = ["--png", tmp_path / "plot.png", "--json", tmp_path / "report.json"]
    command = [sys.executable, EXAMPLES / "train_moe_lm.py", *SMALL, "--device", device, *files]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [step for step, _ in report["train"]] == list(range(1, 61))
    assert [step for step, _ in report["held_out"]] == list(range(6, 61, 6))
    assert report["train"][0][1] == pytest.approx(8, rel=1e-6)  # all bytes equally likely before the first step
    assert report["held_out_bits"] < report["unigram_bits"] - 0.5
    assert report["tokens_per_second"] > 0
    load = torch.tensor(report["expert_load"])
    assert load.shape == (2, 4)
    torch.testing.assert_close(load.sum(-1), torch.ones(2), rtol=1e-5, atol=0)
    assert report["sample"].startswith("def ")
    for shown in (f"{report['held_out_bits']:.3f}", f"{report['unigram_bits']:.3f}", "tokens/s", report["sample"]):
        assert shown in done.stdout


@pytest.mark.parametrize("dtype, tolerance", [("fp32", 1e-3), ("bf16", 1e-2)])
def test_reference_has_the_same_curve(example, tmp_path, monkeypatch, device, dtype, tolerance):
    """Of the losses of all steps; near-ties in the router keep runs that round differently from staying closer."""
    options = ["--device", device, "--dtype", dtype]
    reference = train(example, tmp_path, "reference", "--reference", *options)
    calls = []
    kernel_experts = example.kernel_experts
    monkeypatch.setattr(example, "kernel_experts", lambda *args: calls.append(args) or kernel_experts(*args))
    kernel = train(example, tmp_path, "kernel", *options)
    assert calls
    for curve in ("train", "held_out"):
        got, want = (torch.tensor(report[curve])[:, 1] for report in (kernel, reference))
        assert (got - want).abs().max() <= tolerance * want.max(), curve


def test_experts_agree_with_the_loop(example, kernel, device):
    """One layer's result and gradients, where nothing can hide behind training."""
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, inner, experts, top_k = 50, 24, 40, 5, 2
    shapes = (tokens, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner), (tokens, top_k)
    leaves = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    expert_ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices.to(device)
    dy = torch.randn(tokens, hidden, generator=generator).to(device)
    x, w_up, w_down, weights = leaves
    results = []
    for experts_of in (lambda *args: example.kernel_experts(kernel, *args), example.loop_experts):
        y = experts_of(x, w_up, w_down, expert_ids, weights)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for got, want in zip(*results):
        assert got.dtype is want.dtype
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_text_is_split_by_file_and_always_the_same(example):
    first, again = example.standard_library(), example.standard_library()
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    training, held_out = (bytes(part.tolist()) for part in first)
    assert len(training) > 10 * len(held_out) > 1e6
    assert held_out[:2000] not in training


def test_unigram_entropy(example):
    assert example.unigram_bits(torch.arange(256, dtype=torch.uint8)) == pytest.approx(8)
    assert example.unigram_bits(torch.tensor([7, 7, 7, 9], dtype=torch.uint8)) == pytest.approx(0.8112781244591328)


@pytest.mark.parametrize("shape", [(6, 6), (3, 8, 20), (3, 20, 8)])
def test_muon_updates_are_nearly_orthogonal(example, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(example.orthogonal(x))
    assert singular.min() > 0.3 and singular.max() < 1.3


@pytest.mark.parametrize("options", ["--hidden 30 --heads 4", "--top-k 9 --experts 8", "--top-k 0"])
def test_impossible_sizes_are_refused(example, options, capsys):
    with pytest.raises(SystemExit):
        example.parse(options.split())
    assert "must be" in capsys.readouterr().err


# Adapters

FEW = "--tokens 60 --hidden 24 --inner 16 --experts 5 --top-k 2 --rank 4 --steps 30".split()


@pytest.fixture(scope="module")
def adapters():
    return load_example("lora_experts")


def test_adapters_command(device):
    """It compares result and gradients with plain torch itself, and its loss has to fall."""
    command = [sys.executable, EXAMPLES / "lora_experts.py", "--device", device]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["W in fp32", "W in int8"]


def test_adapters_in_bfloat16(adapters, device, capsys):
    adapters.main([*FEW, "--device", device, "--dtype", "bf16"])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["W in bf16", "W in int8"]


@pytest.mark.parametrize("quantised", [False, True])
def test_adapters_ask_nothing_of_frozen_matrices(adapters, kernel, ops, device, quantised, monkeypatch):
    """The gradients of A and B are all the weight gradients; of dequantised matrices none is kept."""
    args = adapters.parse([*FEW, "--device", device])
    problem = adapters.Problem(args, quantised)
    made, matrices = [], adapters.Adapted.matrices
    monkeypatch.setattr(adapters.Adapted, "matrices", lambda self: made.append(matrices(self)) or made[-1])
    y = problem.result(kernel)
    assert len(made) == 2
    with problems.Calls(ops) as seen:
        y.sum().backward()
    assert seen.names().count("weight_grad") == 4
    assert len(made) == (3 if quantised else 2)  # x asks for no gradient, so the backward ends before w_up
    assert all(p.grad is not None for p in problem.parameters())


def test_dequantised_matrices_are_near(adapters):
    weight = torch.randn(3, 7, 33, generator=torch.Generator().manual_seed(0))
    weight[1, 2] = 0
    pair = adapters.Adapted(weight, 2, 1.0, True)
    assert pair.weight.dtype is torch.int8
    assert ((pair.matrices() - weight).abs() <= 0.501 * weight.abs().amax(-1, keepdim=True) / 127).all()


@pytest.mark.parametrize("part", ["scale", "gradient", "loss"])
def test_adapters_that_are_wrong_are_told(adapters, monkeypatch, part):
    """A product that is off, one whose gradient alone is, and a loss that stays."""
    in_order = adapters.in_order
    options = []
    if part == "scale":
        monkeypatch.setattr(adapters, "in_order", lambda *args: 1.01 * in_order(*args))
    if part == "gradient":
        slack = lambda rows: rows.detach() + 0.99 * (rows - rows.detach())  # noqa: E731
        monkeypatch.setattr(adapters, "in_order", lambda k, rows, *args: in_order(k, slack(rows), *args))
    if part == "loss":
        options = ["--lr", "0"]
    with pytest.raises(SystemExit, match="should fall" if part == "loss" else "the error is"):
        adapters.main([*FEW, *options])
