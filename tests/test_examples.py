"""The example trains, as its command and with the torch loop in place of the kernels, to the same curve."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_moe_lm.py"
SMALL = "--steps 60 --lr 0.05 --batch 8 --context 32 --hidden 64 --heads 2 --inner 32 --experts 4 --sample 20".split()


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_moe_lm", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(example, folder, name, *options):
    """The report of a small run in this process."""
    report = folder / f"{name}.json"
    example.main([*SMALL, "--png", str(folder / f"{name}.png"), "--json", str(report), *options])
    return json.loads(report.read_text())


def test_command(tmp_path, device):
    files = ["--png", tmp_path / "plot.png", "--json", tmp_path / "report.json"]
    command = [sys.executable, EXAMPLE, *SMALL, "--device", device, *files]
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
