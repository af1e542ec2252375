"""The example of expert parallelism: ranks that share out a layer's experts are one process that has them all."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import torch
from conftest import load_example, load_kernel

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "expert_parallel.py"
E, H, INNER, TOP_K = 8, 24, 20, 3
CASES = {  # how many tokens each rank has, and which experts they go to
    "even": ((12, 12), "uniform"),
    "uneven": ((17, 6), "uniform"),
    "a rank without tokens": ((9, 0), "uniform"),
    "a rank without work": ((8, 8), "uniform"),
    "skipped ids": ((15, 10), "skipped"),
    "nothing to do": ((5, 5), "all_skipped"),
}
GPUS = torch.cuda.device_count()
WORLDS = [
    pytest.param("gloo", 2, id="2 ranks"),
    pytest.param("gloo", 4, id="4 ranks"),
    pytest.param(
        "nccl", 2, id="2 GPUs", marks=[pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]
    ),
]

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def case_inputs(name, ranks):
    """(x, w_up, w_down, topk_weights, expert_ids, dy) of all ranks, and the tokens of each."""
    counts, distribution = CASES[name]
    counts = [counts[rank % 2] for rank in range(ranks)]
    x, w_up, ids, weights = oracle.make(sum(counts), H, 2 * INNER, E, TOP_K, distribution=distribution)
    if name == "a rank without work":  # the experts of the last one get nothing
        ids = ids % (E - E // ranks)
    w_down = oracle.make(1, INNER, H, E, 1, seed=1).W
    dy = oracle.make(sum(counts), H, 1, 1, 1, seed=2).x
    return (x, w_up, w_down, weights, ids, dy), counts


FORMS = ("dispatched", "replicated")


def work(rank, ranks, backend, folder):
    """A rank's results and gradients of every case, and of a second backward through the same call."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    experts, found = load_example("expert_parallel").FORMS, {}
    for form, name in itertools.product(FORMS, CASES):
        (x, w_up, w_down, weights, ids, dy), counts = case_inputs(name, ranks)
        if form == "dispatched":
            x, weights, ids, dy = (t.split(counts)[rank] for t in (x, weights, ids, dy))
        mine = slice(rank * E // ranks, (rank + 1) * E // ranks)
        weights = torch.where(oracle.is_live(ids, E), weights, float("nan"))
        *leaves, ids, dy = (t.to(device) for t in (x, w_up[mine], w_down[mine], weights, ids, dy))
        x, w_up, w_down, weights = leaves = [t.detach().requires_grad_() for t in leaves]
        y = experts[form](load_kernel(), x, w_up, w_down, ids, weights)
        first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        again = torch.autograd.grad(y, leaves, dy)
        found[form, name] = [[t.detach().cpu() for t in (y, *gradients)] for gradients in (first, again)]
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("backend, ranks", WORLDS)
def test_equals_one_process(tmp_path, backend, ranks):
    """Result and all gradients of both forms; a NaN in the weight of a skipped id stays there."""
    torch.multiprocessing.spawn(work, (ranks, backend, tmp_path), nprocs=ranks)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for name in CASES:
        (*tensors, ids, dy), counts = case_inputs(name, ranks)

        def whole(x, w_up, w_down, weights, ids=ids):
            return oracle.moe_mlp(x, w_up, w_down, ids, weights)

        want = [whole(*tensors), *oracle.gradients(whole, tensors, dy)]
        for form, number in itertools.product(FORMS, range(2)):
            of_ranks = list(zip(*(part[form, name][number] for part in parts), strict=True))
            for i, (shares, wanted) in enumerate(zip(of_ranks, want, strict=True)):
                if form == "dispatched" or i in (2, 3):  # tokens are shared out, or experts
                    shares = [torch.cat(shares)]
                for share in shares:
                    assert share.dtype == torch.float32
                    oracle.assert_close(share, wanted, 1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_command(dtype):
    """As its users run it: it compares each form with one process itself."""
    sizes = "--tokens 40 --hidden 24 --inner 16 --experts 6 --top-k 2 --steps 1".split()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run([*command, *sizes, "--dtype", dtype], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^(\w+): 2 ranks, [\d.]+ ms a step, error (\S+)$", done.stdout, re.M)
    assert [form for form, _ in lines] == ["dispatched", "replicated"]
    assert all(float(error) < (1e-5 if dtype == "fp32" else 0.03) for _, error in lines)


def test_experts_that_ranks_cannot_share():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run([*command, "--experts", "5"], capture_output=True, text=True)
    assert done.returncode != 0 and "--experts must be a multiple of the 2 ranks" in done.stderr
