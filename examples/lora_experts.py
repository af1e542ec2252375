"""Low-rank adapters on frozen experts of a Mixture-of-Experts layer, by the package's pieces.

    python examples/lora_experts.py                                  # seconds on a CPU
    python examples/lora_experts.py --device cuda --dtype bf16 --tokens 8192 --hidden 2048 --inner 768 --experts 64

Each expert's matrix W is frozen; beside it a pair A, B of rank r is trained: W v + scale · B (A v). The tokens are
sorted by expert once, for the products of all pairs. No gradient is computed for W.

W is stored in the dtype of the products or, quantised, as int8 with a scale a row. Then each product makes all of its W
anew, E·N·K values in its dtype, which are given back behind it, and its backward does so once more.

Both are compared with plain torch in float64, result and gradients, and trained a little. Needs torch and kernels.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------------------- adapters


class Adapted(nn.Module):
    """E frozen matrices [E,N,K], and a trainable pair of rank r for each: A [E,r,K] and B [E,N,r] in float32."""

    def __init__(self, weight: Tensor, rank: int, scale: float, quantised: bool):
        super().__init__()
        num_experts, outputs, features = weight.shape
        self.scale = scale
        self.a = nn.Parameter(torch.randn(num_experts, rank, features, device=weight.device) * features**-0.5)
        self.b = nn.Parameter(torch.zeros(num_experts, outputs, rank, device=weight.device))
        weight, row_scale = quantise(weight) if quantised else (weight, None)
        self.register_buffer("weight", weight)
        self.register_buffer("row_scale", row_scale)  # [E,N,1]

    def matrices(self) -> Tensor:
        """The frozen matrices in the products' dtype."""
        return self.weight if self.row_scale is None else self.weight * self.row_scale

    @contextlib.contextmanager
    def frozen(self) -> Iterator[Tensor]:
        """The same for a product. Of dequantised ones autograd keeps where they come from, and makes them once more."""
        weight = self.matrices()
        address = weight.data_ptr()
        if self.row_scale is None:
            yield weight
            return

        def pack(saved: Tensor) -> Tensor | None:
            return None if saved.data_ptr() == address else saved

        def unpack(kept: Tensor | None) -> Tensor:
            return self.matrices() if kept is None else kept

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield weight


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [E,N,K] and a scale a row [E,N,1] in weight's dtype: the row's largest value is 127 of them."""
    row_scale = weight.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127  # of a row of zeros not 0
    return (weight.float() / row_scale).round().clamp(-127, 127).to(torch.int8), row_scale


def lora_experts(kernel, x: Tensor, up: Adapted, down: Adapted, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """SwiGLU experts: x [T,H], up of [E,2I,H], down of [E,H,I], expert_ids and weights [T,k] -> float32 [T,H]."""
    routing = kernel.route(expert_ids, up.weight.shape[0])
    a_up, b_up, a_down, b_down = (t.to(x.dtype) for t in (up.a, up.b, down.a, down.b))

    # From tokens to rows in expert order, [S,2I]. What B multiplies, [S,r], is in that order already.
    low = kernel.gather_gemm(x, a_up, routing) * up.scale
    with up.frozen() as w_up:
        rows = kernel.gather_gemm(x, w_up, routing) + in_order(kernel, low, b_up, routing)
    h = swiglu(rows)

    # And back to tokens: both products add to them what they have.
    low = in_order(kernel, h, a_down, routing) * down.scale
    with down.frozen() as w_down:
        y = kernel.gemm_combine(h, w_down, routing, weights)
    return y + kernel.gemm_combine(low, b_down, routing, weights)


def in_order(kernel, rows: Tensor, matrices: Tensor, routing) -> Tensor:
    """Rows [S,K] in expert order by matrices [E,N,K], to rows [S,N]."""
    return kernel.grouped_mm(rows, matrices.transpose(1, 2), offs=routing.offs)


def swiglu(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return F.silu(gate) * up


def loop_experts(x: Tensor, up: Adapted, down: Adapted, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """The same in torch alone, one expert after the other, in x's dtype."""
    w_up, w_down = (m.matrices().to(x.dtype) + m.scale * (m.b.to(x.dtype) @ m.a.to(x.dtype)) for m in (up, down))
    y = torch.zeros_like(x)
    for expert in range(w_up.shape[0]):
        token, slot = torch.where(expert_ids == expert)
        rows = F.linear(swiglu(F.linear(x[token], w_up[expert])), w_down[expert])
        y = y.index_add(0, token, rows * weights[token, slot, None])
    return y


# ------------------------------------------------------------------------------------------- comparison and training


class Problem:
    """A frozen layer, adapters for it, and tokens that are routed."""

    def __init__(self, args: argparse.Namespace, quantised: bool):
        generator = torch.Generator().manual_seed(0)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(args.device)

        up = normal(args.experts, 2 * args.inner, args.hidden) / args.hidden**0.5
        down = normal(args.experts, args.hidden, args.inner) / args.inner**0.5
        self.up, self.down = (Adapted(w.to(dtype), args.rank, 2.0, quantised) for w in (up, down))
        self.x = normal(args.tokens, args.hidden).to(dtype)
        self.weights, self.expert_ids = normal(args.tokens, args.experts).softmax(-1).topk(args.top_k)
        self.dy = normal(args.tokens, args.hidden)

    def parameters(self) -> list[Tensor]:
        return [*self.up.parameters(), *self.down.parameters()]

    def result(self, kernel) -> Tensor:
        return lora_experts(kernel, self.x, self.up, self.down, self.expert_ids, self.weights)

    def draw_pairs(self) -> None:
        """Pairs that do something: a B of 0, as training begins with, changes nothing and gives A no gradient."""
        for pair in self.up, self.down:
            nn.init.normal_(pair.b, std=pair.b.shape[-1] ** -0.5)


def compare(kernel, args: argparse.Namespace, quantised: bool) -> float:
    """The largest error of result and gradients, relative to the largest value of each."""
    problem = Problem(args, quantised)
    problem.draw_pairs()

    def step(experts: Callable, dtype: torch.dtype | None = None) -> list[Tensor]:
        x, weights = (t.detach().to(dtype or t.dtype).requires_grad_() for t in (problem.x, problem.weights))
        y = experts(x, problem.up, problem.down, problem.expert_ids, weights)
        gradients = torch.autograd.grad(y, [x, weights, *problem.parameters()], problem.dy.to(y.dtype))
        return [y.detach(), *gradients]

    got = step(lambda *tensors: lora_experts(kernel, *tensors))
    want = step(loop_experts, torch.float64)
    return max(float((g.double() - w.double()).abs().max() / w.double().abs().max()) for g, w in zip(got, want))


def train(kernel, args: argparse.Namespace, quantised: bool) -> tuple[float, float, float]:
    """(loss before, loss after, seconds a step) of learning what the layer does with other pairs."""
    teacher, problem = (Problem(args, quantised) for _ in range(2))
    teacher.draw_pairs()
    with torch.no_grad():
        target = teacher.result(kernel)
    optimizer = torch.optim.AdamW(problem.parameters(), lr=args.lr, weight_decay=0.0)
    losses, start = [], time.perf_counter()
    for _ in range(args.steps):
        loss = F.mse_loss(problem.result(kernel), target)
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    first, last = losses[0].item(), losses[-1].item()  # which waits for the device
    return first, last, (time.perf_counter() - start) / args.steps


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    sizes = {"tokens": 512, "hidden": 128, "inner": 64, "experts": 16, "top-k": 4, "rank": 8, "steps": 40}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    parser.add_argument("--lr", type=float, default=0.01)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse(argv)
    from kernels import get_kernel

    kernel = get_kernel("phanerozoic/grouped-gemm-moe", version=1, trust_remote_code=True)
    limit = 1e-5 if args.dtype == "fp32" else 0.03  # rows are rounded between the products
    for quantised in False, True:
        name = "int8" if quantised else args.dtype
        error = compare(kernel, args, quantised)
        first, last, seconds = train(kernel, args, quantised)
        print(
            f"W in {name}: error {error:.1e}, loss {first:.3f} to {last:.3f}, {1e3 * seconds:.2f} ms a step", flush=True
        )
        if not error <= limit:
            raise SystemExit(f"W in {name}: the error is {error:.1e}, and may be {limit:.0e}")
        if not last < 0.9 * first:
            raise SystemExit(f"W in {name}: the loss went from {first:.3f} to {last:.3f}, and should fall by a tenth")


if __name__ == "__main__":
    main(sys.argv[1:])
