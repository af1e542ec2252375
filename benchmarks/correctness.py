"""Measures what the package promises about its numbers, on fresh random inputs: a row a promise, with its limit.

Errors are relative: `max relative` is the largest error over the largest value, `relative Frobenius` the norm of the
error over the norm of the values. Groups are uneven and some are empty. What is compared by group is measured at sizes
that are multiples of a kernel's tile and at sizes that are not; the worst counts.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import arguments
import package
import peers
import torch
from shapes import DTYPES

MAX, FROBENIUS, ABSOLUTE = "max relative", "relative Frobenius", "max absolute"


class Row(NamedTuple):
    name: str
    dtype: str
    metric: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.value <= self.limit  # NaN does not


class Sizes(NamedTuple):
    T: int
    K: int
    N: int
    E: int


ALIGNED = {"cuda": Sizes(2048, 2048, 2048, 8), "cpu": Sizes(128, 256, 192, 8)}
TENSOR_CORES = Sizes(4096, 512, 512, 8), Sizes(4096, 2048, 2048, 8)
RAGGED = {"cuda": Sizes(1037, 771, 517, 11), "cpu": Sizes(77, 67, 45, 11)}
MLP = {"cuda": (4096, 1024, 512, 32, 4), "cpu": (128, 64, 48, 8, 4)}  # T, H, I, E, k


def main() -> int:
    parser = arguments.parser(__doc__)
    parser.add_argument("--seed", type=int, help="of the inputs; random if left out")
    args = parser.parse_args()
    print("seed", torch.seed() if args.seed is None else torch.manual_seed(args.seed).initial_seed())
    rows = []
    for row in measure(package.load(), args.device):
        rows.append(row)
        verdict = "" if row.holds else "  FAILED"
        print(f"{row.name:56}{row.dtype:6}{row.metric:20}{row.value:10.2e} of {row.limit:.1e}{verdict}", flush=True)
    if args.json:
        args.json.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    return 0 if all(row.holds for row in rows) else 1


def measure(kernel, device: str) -> Iterator[Row]:
    """The rows, one after another."""
    if device == "cuda":
        yield from against_torch(kernel)
    yield against_groups(kernel, device, "fp32", 1e-5)
    yield against_groups(kernel, device, "bf16", 3.9e-3)
    for top_k, limit in ((1, 2.8e-4), (2, 3.8e-4)):
        yield against_plain_moe(kernel, device, "fp32", top_k, MAX, limit)
    yield against_plain_moe(kernel, device, "bf16", 2, FROBENIUS, 2.3e-3)
    yield as_accurate_as_unfused(kernel, device)
    yield equal_to_unfused(kernel, device)
    yield from gradients(kernel, device)
    yield weight_gradient_by_group(kernel, device)
    yield from finite_differences(kernel, device)
    yield from mlp(kernel, device, "fp32")
    yield from mlp(kernel, device, "bf16")


def against_torch(kernel) -> Iterator[Row]:
    """Both round float32 sums to bf16. They differ where sums taken in another order fall on either side of a tie."""
    for sizes in TENSOR_CORES:
        problem = grouped_problem(sizes, "bf16", "cuda")
        value = frobenius(kernel.grouped_gemm(*problem), peers.grouped_mm(*problem))
        yield Row(f"grouped_gemm against torch._grouped_mm, K = {sizes.K}", "bf16", FROBENIUS, value, 2e-5)


def against_groups(kernel, device, dtype, limit) -> Row:
    errors = []
    for sizes in ALIGNED[device], RAGGED[device]:
        problem = grouped_problem(sizes, dtype, device)
        errors.append(max_relative(kernel.grouped_gemm(*problem), peers.grouped_loop(*doubled(*problem))))
    return Row("grouped_gemm against float64 by group", dtype, MAX, worst(errors), limit)


def against_plain_moe(kernel, device, dtype, top_k, metric, limit) -> Row:
    """Plain torch multiplies in the operands' dtype and rounds each product to it."""
    error_of = max_relative if metric == MAX else frobenius
    errors = []
    for sizes in ALIGNED[device], RAGGED[device]:
        problem = moe_problem(sizes, top_k, dtype, device)
        errors.append(error_of(kernel.moe(*problem), peers.loop(*problem)))
    return Row(f"moe against plain torch, top-{top_k}", dtype, metric, worst(errors), limit)


def as_accurate_as_unfused(kernel, device) -> Row:
    """The limit is the error of the unfused form, which rounds its products to bf16."""
    problem = moe_problem(ALIGNED[device], 2, "bf16", device)
    want = peers.loop(*doubled(*problem))
    value, limit = (frobenius(function(*problem), want) for function in (kernel.moe, peers.loop))
    return Row("moe against float64; its limit, plain torch's error", "bf16", FROBENIUS, value, limit)


def equal_to_unfused(kernel, device) -> Row:
    """Gather, grouped_gemm, weight and a sum over a token's slots in their order, against moe."""
    errors = []
    for sizes in ALIGNED[device], RAGGED[device]:
        x, weight, ids, topk_weights = moe_problem(sizes, 2, "fp32", device)
        routing = kernel.route(ids, sizes.E)
        assignment = routing.row_assignment.long()
        rows = kernel.grouped_gemm(x[assignment // 2], weight, torch.bincount(ids.flatten(), minlength=sizes.E))
        by_assignment = torch.empty_like(rows)
        by_assignment[assignment] = rows * topk_weights.flatten()[assignment, None]
        first, second = by_assignment.view(sizes.T, 2, sizes.N).unbind(1)
        errors.append(float((kernel.moe(x, weight, ids, topk_weights) - (first + second)).abs().max()))
    return Row("moe against gather, grouped_gemm, scatter", "fp32", ABSOLUTE, worst(errors), 0.0)


def gradients(kernel, device) -> Iterator[Row]:
    """Against autograd of plain torch in float64."""
    errors = {"x": [], "W": [], "topk_weights": []}
    for sizes in ALIGNED[device], RAGGED[device]:
        x, weight, ids, topk_weights = moe_problem(sizes, 2, "fp32", device)
        dy = torch.randn(sizes.T, sizes.N, device=device)
        _, *got = differentiated(kernel.moe, x, weight, ids, topk_weights, dy)
        _, *want = differentiated(peers.loop, *doubled(x, weight, ids, topk_weights, dy))
        for name, ours, exact in zip(errors, got, want, strict=True):
            errors[name].append(max_relative(ours, exact))
    for name, limit in (("x", 3e-4), ("W", 2e-4), ("topk_weights", 8e-5)):
        yield Row(f"gradient to {name} against autograd", "fp32", MAX, worst(errors[name]), limit)


def weight_gradient_by_group(kernel, device) -> Row:
    errors = []
    for sizes in ALIGNED[device], RAGGED[device]:
        rows, weight, group_sizes = grouped_problem(sizes, "fp32", device)
        weight.requires_grad_()
        y = kernel.grouped_gemm(rows, weight, group_sizes)
        dy = torch.randn_like(y, requires_grad=False)
        y.backward(dy)
        groups = zip(*(t.double().split(group_sizes.tolist()) for t in (dy, rows)), strict=True)
        errors.append(max_relative(weight.grad, torch.stack([a.T @ b for a, b in groups])))
    return Row("weight gradient against float64 by group", "fp32", MAX, worst(errors), 4e-4)


def finite_differences(kernel, device) -> Iterator[Row]:
    """The slope of <moe, dy> along a random direction, over the norm of the gradient.

    moe is linear in each argument, so a long step has no truncation error.
    """
    x, weight, ids, topk_weights = moe_problem(RAGGED[device], 2, "fp32", device)
    dy = torch.randn(x.shape[0], weight.shape[1], device=device)
    _, *analytic = differentiated(kernel.moe, x, weight, ids, topk_weights, dy)
    arguments = {"x": x, "W": weight, "topk_weights": topk_weights}
    for gradient, (name, argument) in zip(analytic, arguments.items(), strict=True):
        direction = torch.randn_like(argument)
        losses = []
        for step in 1.0, -1.0:
            moved = {**arguments, name: argument + step * direction}
            y = kernel.moe(moved["x"], moved["W"], ids, moved["topk_weights"])
            losses.append((y.double() * dy).sum())
        slope = (losses[0] - losses[1]) / 2
        error = (slope - (gradient.double() * direction).sum()).abs() / gradient.double().norm()
        yield Row(f"gradient to {name} against finite differences", "fp32", "relative", float(error), 1e-4)


def mlp(kernel, device, dtype) -> Iterator[Row]:
    """SwiGLU MLPs. In bf16 the limit is also 1.02 times the error of the unfused form, if that is lower."""
    problem = mlp_problem(*MLP[device], dtype, device)
    want = differentiated(peers.mlp_loop, *doubled(*problem))

    def errors(function):
        return map(frobenius, differentiated(function, *problem), want)

    limits = [1e-5] * 5
    if dtype == "bf16":
        limits = map(min, [4e-3] + [6e-3] * 4, (1.02 * error for error in errors(peers.unfused_mlp)))
    names = ["moe_mlp", *(f"moe_mlp, gradient to {name}," for name in ("x", "w_up", "w_down", "topk_weights"))]
    for name, value, limit in zip(names, errors(kernel.moe_mlp), limits, strict=True):
        yield Row(f"{name} against float64", dtype, FROBENIUS, value, limit)


def differentiated(function: Callable, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The result, and the gradients to the floating arguments; the last argument is the incoming gradient."""
    *arguments, dy = (t.clone() for t in arguments)
    leaves = [t.requires_grad_() for t in arguments if t.is_floating_point()]
    y = function(*arguments)
    return y, *torch.autograd.grad(y, leaves, dy)


def grouped_problem(sizes: Sizes, dtype: str, device: str) -> tuple[torch.Tensor, ...]:
    """rows, weight, group_sizes: uneven groups, the first, a middle and the last of them empty."""
    share = torch.rand(sizes.E, device=device) ** 2
    share[[0, sizes.E // 2, -1]] = 0
    cuts = (share.cumsum(0) / share.sum() * sizes.T).round().long()
    group_sizes = cuts.diff(prepend=cuts.new_zeros(1))
    return (*operands(sizes, dtype, device), group_sizes)


def moe_problem(sizes: Sizes, top_k: int, dtype: str, device: str) -> tuple[torch.Tensor, ...]:
    """x, weight, expert_ids, topk_weights: no expert twice in a row, popular experts and one that nobody chose."""
    popularity = torch.rand(sizes.E, device=device)
    popularity[sizes.E // 2] = -2
    ids = (torch.rand(sizes.T, sizes.E, device=device) + popularity).topk(top_k, dim=-1).indices
    return (*operands(sizes, dtype, device), ids, torch.rand(sizes.T, top_k, device=device))


def mlp_problem(T: int, H: int, I: int, E: int, top_k: int, dtype: str, device: str) -> tuple[torch.Tensor, ...]:  # noqa: E741
    """x, w_up, w_down, expert_ids, topk_weights, routed as in moe_problem, and the incoming gradient."""
    x, w_up, ids, topk_weights = moe_problem(Sizes(T, H, 2 * I, E), top_k, dtype, device)
    _, w_down = operands(Sizes(0, I, H, E), dtype, device)
    return x, w_up, w_down, ids, topk_weights, torch.randn_like(x)


def operands(sizes: Sizes, dtype: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(sizes.T, sizes.K, device=device)
    weight = torch.randn(sizes.E, sizes.N, sizes.K, device=device) / sizes.K**0.5
    return x.to(DTYPES[dtype]), weight.to(DTYPES[dtype])


def doubled(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def frobenius(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = doubled(got.detach(), want.detach())
    return float((got - want).norm() / want.norm())


def max_relative(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = doubled(got.detach(), want.detach())
    return float((got - want).abs().max() / want.abs().max())


def worst(errors: list[float]) -> float:
    return float(torch.tensor(errors, dtype=torch.float64).max())  # NaN if one is


if __name__ == "__main__":
    sys.exit(main())
