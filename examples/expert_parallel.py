"""Expert parallelism: each of R ranks holds E / R experts of a Mixture-of-Experts layer.

    torchrun --nproc-per-node 2 examples/expert_parallel.py                                # gloo, on CPUs
    torchrun --nproc-per-node 8 examples/expert_parallel.py --device cuda --dtype bf16     # NCCL, a GPU a rank

Two forms of the same layer, both differentiable in everything:

dispatched   every rank has tokens of its own. Each goes to the ranks of its experts and the results come back, by
             all-to-all. The ranks may have different numbers of tokens.
replicated   every rank has all tokens. Each takes part in what its own experts do, and the ranks' results are added.

Each is compared with the whole layer in one process, result and gradients, and timed. Needs torch and kernels.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# ----------------------------------------------------------------------------------------------- dispatched to ranks


def dispatched_experts(
    kernel, x: Tensor, w_up: Tensor, w_down: Tensor, expert_ids: Tensor, weights: Tensor, group=None
) -> Tensor:
    """SwiGLU experts of all ranks on this rank's tokens.

    x [T,H], w_up [E/R,2I,H], w_down [E/R,H,I] of the experts from rank * E/R on, expert_ids [T,k] out of all E (others
    are skipped) and weights [T,k] -> [T,H] in x's dtype. T may differ between ranks and be 0.
    """
    ranks, local_experts = dist.get_world_size(group), w_up.shape[0]
    num_tokens, top_k = expert_ids.shape

    # Sorted by expert, assignments are sorted by rank too. The host has to know how many rows come from each.
    routing = kernel.route(expert_ids, ranks * local_experts)
    sent = routing.offs.diff(prepend=routing.offs.new_zeros(1)).view(ranks, local_experts)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sizes = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    assignment = routing.row_assignment[: sum(sizes[0])].long()  # skipped ids come last, and stay here

    # Routing weights travel with their rows: the experts' product multiplies by them, and has their gradient for free.
    rows = AllToAll.apply(x.index_select(0, assignment // top_k), *sizes, group)
    row_weights = AllToAll.apply(weights.flatten().index_select(0, assignment), *sizes, group)

    # From each rank come the rows of the first expert here, then of the second. They are not sorted: the product reads
    # them where they lie.
    experts = torch.arange(local_experts, device=x.device).repeat(ranks)
    ids = experts.repeat_interleave(received.flatten(), output_size=rows.shape[0])
    rows = kernel.moe_mlp(rows, w_up, w_down, ids[:, None], row_weights[:, None])

    rows = AllToAll.apply(rows, *reversed(sizes), group)
    by_token = rows.new_zeros(num_tokens * top_k, rows.shape[1]).index_copy(0, assignment, rows)
    return by_token.view(num_tokens, top_k, rows.shape[1]).sum(1, dtype=torch.float32).to(x.dtype)


class AllToAll(torch.autograd.Function):
    """Consecutive rows to each rank, `sent` says how many, and `received` rows from each; back in the backward."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int], group) -> Tensor:
        ctx.way_back = received, sent, group
        return exchanged(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, d: Tensor) -> tuple:
        return exchanged(d, *ctx.way_back), None, None, None


def exchanged(rows: Tensor, sent: list[int], received: list[int], group) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


# ---------------------------------------------------------------------------------------------- replicated on ranks


def replicated_experts(
    kernel, x: Tensor, w_up: Tensor, w_down: Tensor, expert_ids: Tensor, weights: Tensor, group=None
) -> Tensor:
    """The same where x, expert_ids and weights are those of all tokens, the same on all ranks; so are the results."""
    x, weights = (Copied.apply(t, group) for t in (x, weights))
    first = dist.get_rank(group) * w_up.shape[0]
    # Experts of other ranks get ids outside of [0, E/R), which are skipped.
    y = kernel.moe_mlp(x, w_up, w_down, expert_ids.long() - first, weights, out_dtype=torch.float32)
    return Added.apply(y, group).to(x.dtype)


class Copied(torch.autograd.Function):
    """What all ranks have, going to work that is shared out: the parts of its gradient are added."""

    @staticmethod
    def forward(ctx, tensor: Tensor, group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx, d: Tensor) -> tuple:
        return added(d, ctx.group), None


class Added(torch.autograd.Function):
    """The sum of the ranks' parts, which all ranks get, so that each has the whole gradient of its part."""

    @staticmethod
    def forward(ctx, tensor: Tensor, group) -> Tensor:
        return added(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, d: Tensor) -> tuple:
        return d, None


def added(tensor: Tensor, group) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


# -------------------------------------------------------------------------------------------------------- comparison

FORMS = {"dispatched": dispatched_experts, "replicated": replicated_experts}


def compare(kernel, form: str, args: argparse.Namespace, device: torch.device) -> tuple[float, float]:
    """(largest error of result and gradients relative to the largest value, seconds a step), over all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    # The first numbers are the weights, which all ranks draw alike; tokens are drawn alike where they are replicated.
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    w_up = (normal(args.experts, 2 * args.inner, args.hidden) / args.hidden**0.5).to(dtype)
    w_down = (normal(args.experts, args.hidden, args.inner) / args.inner**0.5).to(dtype)
    if form == "dispatched":
        generator.manual_seed(1 + rank)
    x, dy = (normal(args.tokens, args.hidden).to(dtype) for _ in range(2))
    weights, expert_ids = normal(args.tokens, args.experts).softmax(-1).topk(args.top_k)
    mine = slice(rank * args.experts // ranks, (rank + 1) * args.experts // ranks)

    def step(experts: Callable, *tensors: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        x, w_up, w_down, weights = leaves
        y = experts(kernel, x, w_up, w_down, expert_ids, weights)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    want = step(lambda kernel, *tensors: kernel.moe_mlp(*tensors), x, w_up, w_down, weights)
    for gradient in want[2:4] if form == "dispatched" else ():  # of the weights, by the tokens of all ranks
        dist.all_reduce(gradient)
    want[2:4] = (gradient[mine] for gradient in want[2:4])

    local = x, w_up[mine], w_down[mine], weights
    got = step(FORMS[form], *local)
    error = max(float((g.double() - w.double()).abs().max() / w.double().abs().max()) for g, w in zip(got, want))
    start = time.perf_counter()
    for _ in range(args.steps):
        step(FORMS[form], *local)
    if device.type == "cuda":
        torch.cuda.synchronize()
    found = torch.tensor([error, (time.perf_counter() - start) / args.steps], dtype=torch.float32, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return tuple(found.tolist())


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    for name, default in {"tokens": 512, "hidden": 128, "inner": 64, "experts": 16, "top-k": 4, "steps": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse(argv)
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    from kernels import get_kernel

    kernel = get_kernel("phanerozoic/grouped-gemm-moe", version=1, trust_remote_code=True)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        if args.experts % dist.get_world_size():
            raise SystemExit(f"--experts must be a multiple of the {dist.get_world_size()} ranks")
        limit = 1e-5 if args.dtype == "fp32" else 0.03  # the ranks' parts are rounded before they are added
        for form in FORMS:
            error, seconds = compare(kernel, form, args, device)
            if dist.get_rank() == 0:
                print(
                    f"{form}: {dist.get_world_size()} ranks, {1e3 * seconds:.2f} ms a step, error {error:.1e}",
                    flush=True,
                )
            if not error <= limit:
                raise SystemExit(f"{form}: the error is {error:.1e}, and may be {limit:.0e}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
