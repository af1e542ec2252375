#!/usr/bin/env python3
"""Run every kernel configuration, dtype and epilogue once, at small sizes, for compute-sanitizer to watch.

    python tools/sanitize_sweep.py              all configurations
    python tools/sanitize_sweep.py --share 2/9  every ninth step of the sweep, from the third on

Results are compared with plain torch only closely enough to know that the kernels did their work. A gradient to x
reads the weight the other way round, so both orders of it occur whichever one it is stored in.
"""

import argparse
import importlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import kernels
import torch

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("LOCAL_KERNELS", f"phanerozoic/grouped-gemm-moe={ROOT}")
kernel = kernels.get_kernel("phanerozoic/grouped-gemm-moe", version=1, trust_remote_code=True)
hooks = importlib.import_module(f"{kernel.__name__}._testing")

DEVICE = "cuda"
TOKENS, EXPERTS = 120, 5
ALIGNED, UNALIGNED = (200, 136), (67, 45)  # K and N, neither of them multiples of a tile
DTYPES = {"fp32": [torch.float32], "mma": [torch.bfloat16, torch.float16], "wgmma": [torch.bfloat16, torch.float16]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", default="0/1", metavar="I/N", help="which of how many parts of the steps")
    share, shares = map(int, parser.parse_args().share.split("/"))
    torch.manual_seed(0)
    for step in steps()[share::shares]:
        start = time.monotonic()
        print(step(), f"{time.monotonic() - start:.0f} s", flush=True)


def steps() -> list[Callable[[], str]]:
    """Each says what it ran."""
    return [many_ids] + [
        partial(configurations, names, dtype) for path, names in config_sets() for dtype in DTYPES[path]
    ]


def configurations(names: list[str], dtype: torch.dtype) -> str:
    with hooks.forced(*names, blocks=4):  # each takes several tiles
        sweep(dtype, *ALIGNED)
        sweep(dtype, *ALIGNED, transposed=True)
        sweep(dtype, *UNALIGNED)
        many_groups(dtype)
        long_groups(dtype)
        wrong_ends(dtype)
    torch.cuda.synchronize()
    return f"{' '.join(names)} {dtype}"


def config_sets() -> list[tuple[str, list[str]]]:
    """A path and its configurations of one kind, a product's and a weight gradient's, which are watched together.

    Narrow tiles are of products alone.
    """
    sets = {}
    for config in hooks.configs_here():
        sets.setdefault((config.path, config.tile_m, config.tile_k, config.vectorized), []).append(config.name)
    return [(path, names) for (path, *_), names in sets.items()]


def sweep(dtype: torch.dtype, features: int, outputs: int, transposed: bool = False) -> None:
    x = random(TOKENS, features, dtype=dtype)
    weight = random(EXPERTS, outputs, features, dtype=dtype)
    if transposed:
        weight = weight.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    back = random(EXPERTS, features, outputs, dtype=dtype)
    bias, back_bias = random(EXPERTS, outputs, dtype=dtype), random(EXPERTS, features, dtype=dtype)
    for top_k in 1, 3:
        ids = skewed_ids(top_k)
        topk_weights = torch.rand(TOKENS, top_k, device=DEVICE, requires_grad=True)

        # A weighted sum by token, its row dot and its weight gradient; then the sum in slot order.
        y = kernel.moe(x, weight, ids, topk_weights)
        check(y, expected(x, weight, ids, topk_weights))
        differentiate(y, x, weight, topk_weights)
        torch.use_deterministic_algorithms(top_k == 3, warn_only=True)
        differentiate(kernel.moe(x, weight, ids, topk_weights, out_dtype=dtype), x, weight, topk_weights)
        torch.use_deterministic_algorithms(False)
        # The row dot alone.
        differentiate(kernel.moe(x.detach(), weight.detach(), ids, topk_weights), topk_weights)
        # Rows in expert order with a bias, and back by token.
        routing = kernel.route(ids, EXPERTS)
        hidden = kernel.gather_gemm(x, weight, routing, bias=bias)
        y = kernel.gemm_combine(hidden, back, routing, topk_weights, bias=back_bias)
        differentiate(y, x, weight, bias, back, back_bias, topk_weights)

    experts_of_two_matrices(dtype, features, outputs, transposed)

    # Groups that leave rows over, some of them empty.
    sizes = torch.tensor([0, 65, 0, 31, 0], device=DEVICE)
    differentiate(kernel.grouped_gemm(x, weight, sizes), x, weight)


def experts_of_two_matrices(dtype: torch.dtype, features: int, inner: int, transposed: bool) -> None:
    """An activation and its gradient, of gate and up in halves, in turn, and without a gate."""
    ids, x = skewed_ids(2), random(TOKENS, features, dtype=dtype)
    topk_weights = torch.rand(TOKENS, 2, device=DEVICE, requires_grad=True)
    for kind, gated, interleaved in (("silu", True, False), ("clamped_swiglu", True, True), ("gelu", False, False)):
        width = 2 * inner if gated else inner
        w_up, w_down = random(EXPERTS, width, features, dtype=dtype), random(EXPERTS, features, inner, dtype=dtype)
        if transposed:
            w_up = w_up.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        biases = {"bias_up": random(EXPERTS, width, dtype=dtype), "bias_down": random(EXPERTS, features, dtype=dtype)}
        form = {"activation": kind, "gated": gated, "interleaved": interleaved}
        y = kernel.moe_mlp(x, w_up, w_down, ids, topk_weights, **form, **biases)
        hidden = kernel.gather_gemm(x, w_up, kernel.route(ids, EXPERTS), bias=biases["bias_up"], **form)
        differentiate(y, x, w_up, w_down, topk_weights, *biases.values())
        differentiate(hidden, x, w_up)
        with torch.no_grad():
            kernel.moe_mlp(x, w_up, w_down, ids, topk_weights, **form)
        # One gradient of the three.
        differentiate(
            kernel.moe_mlp(x.detach(), w_up.detach(), w_down.detach(), ids, topk_weights, **form), topk_weights
        )


def many_groups(dtype: torch.dtype) -> None:
    """More than a schedule or a narrow tile looks at together, and than one pass sorts by."""
    kernel.route(torch.randint(-1, 1101, (TOKENS, 2), device=DEVICE), 1100)
    for groups in 300, 1100:
        x, weight = random(TOKENS, 16, dtype=dtype), random(groups, 8, 16, dtype=dtype)
        sizes = torch.zeros(groups, dtype=torch.int64, device=DEVICE)
        sizes[::11] = 1
        differentiate(kernel.grouped_gemm(x, weight, sizes), x, weight)


def long_groups(dtype: torch.dtype) -> None:
    """Experts of several row tiles and, for their gradients, of many stages, added to what is there too."""
    tokens, experts, features, outputs = 330, 3, 136, 200
    x, weight = random(tokens, features, dtype=dtype), random(experts, outputs, features, dtype=dtype)
    ids = torch.tensor([1, 0], device=DEVICE).expand(tokens, 2).clone()
    ids[300:, 0] = 2
    topk_weights = torch.rand(tokens, 2, device=DEVICE, requires_grad=True)
    y = kernel.moe(x, weight, ids, topk_weights)
    check(y, expected(x, weight, ids, topk_weights))
    differentiate(y, x, weight, topk_weights)
    dy, routing = torch.randn(tokens, outputs, device=DEVICE).to(dtype), kernel.route(ids, experts)
    for out_dtype in {torch.float32, dtype}:
        out = torch.zeros_like(weight, dtype=out_dtype)
        for _ in range(2):
            kernel.weight_grad(x, dy, routing, topk_weights, out=out, accumulate=True)
        check(out, 2 * kernel.weight_grad(x, dy, routing, topk_weights).float())
    ones = torch.ones_like(topk_weights)
    check(kernel.weight_grad(x, dy, routing).float(), kernel.weight_grad(x, dy, routing, ones).float())


def wrong_ends(dtype: torch.dtype) -> None:
    """Ends that descend, are negative or lie behind the rows, and ids of no expert, which nothing checks on a GPU."""
    x, weight = random(TOKENS, 72, dtype=dtype), random(4, 40, 72, dtype=dtype)
    topk_weights = torch.rand(TOKENS, 1, device=DEVICE, requires_grad=True)
    for ends in (40, -3, 20, 300), (-1, -(2**31), 10, 2**31 - 1), (2**31 - 1, 0, 0, 0), (-4, -3, -2, -1):
        offs = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        differentiate(kernel.grouped_gemm(x, weight, offs.long().diff(prepend=offs.new_zeros(1))), x, weight)
        for a, b in ((x, weight.mT), (x.T, x), (weight, x.T)):
            kernel.grouped_mm(a, b, offs=offs).sum().backward()
        ids = offs.long().repeat(TOKENS // 4)[:, None]
        routing = kernel.route(ids, 4)._replace(offs=offs)
        hidden = kernel.gather_gemm(x, weight, routing)
        kernel.gemm_combine(hidden, weight.mT, routing, topk_weights).sum().backward()
        kernel.weight_grad(x, hidden, routing, topk_weights, gather_dy=False)
        kernel.moe(x, weight, ids, topk_weights).sum().backward()


def many_ids() -> str:
    """What several blocks sort, in one pass and in two; and what takes a block several tiles."""
    for count, experts in ((5000, 128), (70_000, 1100), (700_000, 40)):
        ids = torch.randint(-1, experts + 1, (count, 1), device=DEVICE)
        wanted = ids.flatten().where((ids.flatten() >= 0) & (ids.flatten() < experts), experts).sort(stable=True)
        assert torch.equal(kernel.route(ids, experts).row_assignment.long(), wanted.indices)
    return "many ids"


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).mul(shape[-1] ** -0.5).to(dtype).requires_grad_()


def skewed_ids(top_k: int) -> torch.Tensor:
    """Most tokens choose expert 1, none expert 2, and some slots no expert at all."""
    scores = torch.rand(TOKENS, EXPERTS, device=DEVICE) + torch.tensor([0, 0.7, -9, 0, 0], device=DEVICE)
    ids = scores.topk(top_k, dim=-1).indices
    ids[::17, -1], ids[5::23, 0] = EXPERTS, -1
    return ids


def expected(x, weight, ids, topk_weights) -> torch.Tensor:
    products = torch.einsum("tk,enk->ten", x.float(), weight.float())
    chosen = (ids[..., None] == torch.arange(len(weight), device=DEVICE)) * topk_weights[..., None]
    return torch.einsum("tje,ten->tn", chosen, products).detach()


def check(y: torch.Tensor, want: torch.Tensor) -> None:
    error = float((y.detach() - want).norm() / want.norm())
    if not error < 1e-2:
        raise AssertionError(f"off by {error:.2g} (relative Frobenius norm)")


def differentiate(y: torch.Tensor, *arguments: torch.Tensor) -> None:
    for gradient in torch.autograd.grad(y, arguments, torch.randn_like(y)):
        if not gradient.isfinite().all():
            raise AssertionError("a gradient is not finite")


if __name__ == "__main__":
    main()
