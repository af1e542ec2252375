"""Train a small Mixture-of-Experts language model on the sources of the Python standard library.

    python examples/train_moe_lm.py                                  # under a minute on two CPU cores
    python examples/train_moe_lm.py --device cuda --dtype bf16       # the same model on a GPU
    python examples/train_moe_lm.py --reference                      # experts as a plain torch loop, the same curve

The model is a decoder-only transformer over bytes. In every block the feed-forward part is E SwiGLU experts, of
which each byte uses k: the package's `moe_mlp`. Needs torch, kernels (unless --reference) and matplotlib.
"""

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

# Threads that wait for each other sleep: spinning ones take the cores that the others need when a machine is busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------------------- experts


def kernel_experts(kernel, x: Tensor, w_up: Tensor, w_down: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """SwiGLU experts: x [T,H], w_up [E,2I,H], w_down [E,H,I], expert_ids and weights [T,k] -> float32 [T,H]."""
    return kernel.moe_mlp(x, w_up, w_down, expert_ids, weights, out_dtype=torch.float32)


def loop_experts(x: Tensor, w_up: Tensor, w_down: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """The same function in torch alone, one expert after the other."""
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(w_up.shape[0]):
        token, slot = torch.where(expert_ids == expert)
        gate, up = F.linear(x.index_select(0, token), w_up[expert]).chunk(2, dim=-1)
        rows = F.linear(F.silu(gate) * up, w_down[expert])
        y = y.index_add(0, token, weights[token, slot, None] * rows.float())
    return y


# ------------------------------------------------------------------------------------------------------------ model


class MoE(nn.Module):
    """A top-k router over SwiGLU experts."""

    def __init__(self, hidden: int, inner: int, num_experts: int, top_k: int, experts: Callable):
        super().__init__()
        self.top_k, self.experts = top_k, experts
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.w_up = nn.Parameter(torch.randn(num_experts, 2 * inner, hidden) * hidden**-0.5)
        self.w_down = nn.Parameter(torch.zeros(num_experts, hidden, inner))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T,H] -> output [T,H], load-balancing loss, share of the assignments that each expert got [E]."""
        num_experts = self.router.out_features
        with torch.autocast(x.device.type, enabled=False):  # rounded logits would tie, and ties flip experts
            logits = self.router(x.float())
        chosen, expert_ids = logits.topk(self.top_k)
        load = (expert_ids[..., None] == torch.arange(num_experts, device=x.device)).float().mean((0, 1))
        balance = num_experts * (load * logits.softmax(-1).mean(0)).sum()  # Switch Transformer's; 1 when even
        return self.experts(x, self.w_up, self.w_down, expert_ids, chosen.softmax(-1)), balance, load


class Attention(nn.Module):
    """Causal self-attention with rotary positions on normalised queries and keys."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor, phases: Tensor) -> Tensor:
        qk, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).split([2, 1], dim=2)
        q, k = rotate(F.layer_norm(qk, qk.shape[-1:]), phases).to(v.dtype).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v[:, :, 0].transpose(1, 2), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotary_phases(length: int, width: int) -> Tensor:
    """Real and imaginary parts [L, width/2, 2] of the phase of each feature pair at each position."""
    angle = torch.outer(torch.arange(length), 1e3 ** (-torch.arange(0, width, 2) / width))
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def rotate(x: Tensor, phases: Tensor) -> Tensor:
    """x [B,L,2,heads,width] with its feature pairs turned by the phases of their positions."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    phases = torch.view_as_complex(phases[: x.shape[1], None, None])
    return torch.view_as_real(pairs * phases).flatten(-2)


class Block(nn.Module):
    def __init__(self, attention: Attention, moe: MoE, hidden: int):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(hidden), attention
        self.moe_norm, self.moe = nn.LayerNorm(hidden), moe

    def forward(self, x: Tensor, phases: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), phases)
        y, balance, load = self.moe(self.moe_norm(x).flatten(0, 1))
        return x + y.view_as(x), balance, load


class LanguageModel(nn.Module):
    """Next-byte logits. A position is embedded from its last four bytes, so that the blocks start from 4-grams.

    The last matrix of each block and of the model is 0 at first: blocks are the identity, all bytes equally likely.
    """

    ngram = 4

    def __init__(self, args: argparse.Namespace, experts: Callable):
        super().__init__()
        self.embedding = nn.Embedding(self.ngram * 256, args.hidden)
        self.blocks = nn.ModuleList(
            Block(
                Attention(args.hidden, args.heads),
                MoE(args.hidden, args.inner, args.experts, args.top_k, experts),
                args.hidden,
            )
            for _ in range(args.layers)
        )
        self.norm = nn.LayerNorm(args.hidden)
        self.head = nn.Linear(args.hidden, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=self.ngram**-0.5)
        nn.init.zeros_(self.head.weight)
        self.register_buffer("phases", rotary_phases(args.context, args.hidden // args.heads))

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """text int64 [B,L] -> logits [B,L,256], mean load-balancing loss, expert load [layers,E]."""
        recent = F.pad(text, (self.ngram - 1, 0)).unfold(1, self.ngram, 1)
        x = self.embedding(recent + 256 * torch.arange(self.ngram, device=text.device)).sum(2)
        balances, loads = [], []
        for block in self.blocks:
            x, balance, load = block(x, self.phases)
            balances.append(balance)
            loads.append(load)
        return self.head(self.norm(x)), torch.stack(balances).mean(), torch.stack(loads)


# ------------------------------------------------------------------------------------------------------------- text

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


def standard_library() -> tuple[Tensor, Tensor]:
    """The standard library's Python files in the order of their names, as bytes: (training text, held-out text)."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    files = [(root / name).read_bytes() for name in names if not SKIPPED.intersection(Path(name).parts)]
    training, held_out = [file for i, file in enumerate(files) if i % 20], files[::20]
    return tuple(torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in (training, held_out))


def windows(text: Tensor, starts: Tensor, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The bytes from each start on and the byte after each of them: two int64 [len(starts), context]."""
    span = text[starts[:, None] + torch.arange(args.context + 1)].to(args.device).long()
    return span[:, :-1], span[:, 1:]


def unigram_bits(text: Tensor) -> float:
    """Entropy of the byte frequencies in bits: the least that a predictor without context can lose on the text."""
    p = torch.bincount(text.long()).double() / len(text)
    return -torch.special.xlogy(p, p).sum().item() / math.log(2)


# -------------------------------------------------------------------------------------------------------- optimizer


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are matrices with singular values near 1 (Jordan et al., 2024).

    torch's own takes single matrices; here a parameter may also be a stack of them, one an expert.
    """

    def __init__(self, matrices: list[Tensor], lr: float, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(average, group["momentum"]))
                p.sub_(update, alpha=group["lr"] * max(1, p.shape[-2] / p.shape[-1]) ** 0.5)


def orthogonal(x: Tensor) -> Tensor:
    """Roughly the nearest matrices with orthonormal rows or columns, by five quintic Newton-Schulz steps."""
    if x.shape[-2] > x.shape[-1]:
        return orthogonal(x.mT).mT
    stack = x.reshape(-1, *x.shape[-2:])
    stack = stack / (stack.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = stack @ stack.mT
        polynomial = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
        stack = torch.baddbmm(stack, polynomial, stack, beta=3.4445)
    return stack.view(x.shape)


def rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: a short linear rise, then a linear fall to 0."""
    return min((step + 1) / max(1, steps // 20), 1 - step / steps)


# --------------------------------------------------------------------------------------------- training and judging


def precision(args: argparse.Namespace) -> torch.autocast:
    """Products in the chosen dtype. The parameters stay float32; the package's functions follow autocast."""
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.dtype == "bf16")


def bits_per_byte(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten()) / math.log(2)


def train(model: LanguageModel, training: Tensor, held_out: Tensor, args: argparse.Namespace) -> dict:
    """Trains the model and returns both loss curves, as [step, bits per byte] pairs, and the tokens a second."""
    matrices = [p for name, p in model.blocks.named_parameters() if p.dim() > 1 and "router" not in name]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [Muon(matrices, args.lr), torch.optim.AdamW(others, args.lr / 3, betas=(0.9, 0.95), fused=True)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, partial(rate, steps=args.steps)) for o in optimizers]
    generator = torch.Generator().manual_seed(args.seed)
    every = max(1, args.steps // 10)
    losses, curve, seconds, begin = [], [], 0.0, time.perf_counter()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(training) - args.context, (args.batch,), generator=generator)
        source, target = windows(training, starts, args)
        with precision(args):
            logits, balance, _ = model(source)
        loss = bits_per_byte(logits, target)
        (loss + args.balance * balance).backward()
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append(loss.detach())
        if step % every == 0 or step == args.steps:
            loss.item()  # the device has caught up, so the clock counts its work
            seconds += time.perf_counter() - begin
            curve.append([step, evaluate(model, held_out, args, 64)[0]])
            progress(step, args.steps, curve[-1][1], step * args.batch * args.context / seconds)
            begin = time.perf_counter()
        else:
            progress(step, args.steps)
    return {
        "train": [[i, loss] for i, loss in enumerate(torch.stack(losses).tolist(), 1)],
        "held_out": curve,
        "tokens_per_second": args.steps * args.batch * args.context / seconds,
    }


@torch.no_grad()
def evaluate(model: LanguageModel, text: Tensor, args: argparse.Namespace, count: int) -> tuple[float, Tensor]:
    """Bits per byte and expert load [layers,E] over `count` windows spread evenly through the text."""
    starts = torch.linspace(0, len(text) - args.context - 1, count, dtype=torch.float64).long()
    loss, load = 0.0, 0.0
    for part in starts.split(args.batch):
        source, target = windows(text, part, args)
        with precision(args):
            logits, _, part_load = model(source)
        loss += bits_per_byte(logits, target) * len(part) / count
        load += part_load * len(part) / count
    return loss.item(), load.cpu()


@torch.no_grad()
def sample(model: LanguageModel, prompt: str, length: int, args: argparse.Namespace) -> str:
    """The prompt and `length` bytes after it, drawn at temperature 0.9."""
    generator = torch.Generator().manual_seed(args.seed)
    text = list(prompt.encode())
    for _ in range(length):
        window = torch.tensor([text[-args.context :]], device=args.device)
        with precision(args):
            logits = model(window)[0][0, -1]
        text.append(torch.multinomial((logits.float().cpu() / 0.9).softmax(-1), 1, generator=generator).item())
    return bytes(text).decode(errors="replace")


# ----------------------------------------------------------------------------------------------------------- report


def progress(step: int, steps: int, held_out: float | None = None, speed: float = 0.0) -> None:
    """A bar, rewritten in place on a terminal; a log gets a line for each held-out measurement."""
    terminal = sys.stdout.isatty()
    if held_out is None and not terminal:
        return
    bar = "█" * (30 * step // steps)
    line = f"{bar:░<30} {step:>5}/{steps}"
    if held_out is not None:
        line += f"   held-out {held_out:.3f} bits/byte   {speed:>9,.0f} tokens/s"
    end = "\n" if step == steps or not terminal else ""
    print(f"\r{line}" if terminal else line, end=end, flush=True)


def plot(report: dict, path: Path) -> None:
    """The loss over the steps, and the share of the held-out bytes that each expert of each layer got."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    left.plot(*zip(*report["train"]), color="#56b4e9", linewidth=0.8, label="training batch")
    left.plot(*zip(*report["held_out"]), color="black", marker="o", markersize=4, label="held-out files")
    left.axhline(report["unigram_bits"], color="#d55e00", linestyle="--", label="unigram entropy, held-out files")
    left.set(title="Loss", xlabel="step", ylabel="bits per byte", ylim=(0, None), xlim=(0, None))
    left.grid(alpha=0.3)
    left.legend()

    load = 100 * torch.tensor(report["expert_load"])
    even = 100 / load.shape[1]
    image = right.imshow(load.numpy(), cmap="cividis", vmin=0, vmax=max(2 * even, load.max().item()), aspect="auto")
    right.set(title=f"Expert load, % of a layer's assignments (even: {even:.3g})", xlabel="expert", ylabel="layer")
    right.yaxis.get_major_locator().set_params(integer=True)
    right.xaxis.get_major_locator().set_params(integer=True)
    if load.numel() <= 128:
        for layer, expert in torch.cartesian_prod(*map(torch.arange, load.shape)).tolist():
            share = load[layer, expert].item()
            color = "black" if image.norm(share) > 0.4 else "white"
            right.text(expert, layer, f"{share:.0f}", ha="center", va="center", color=color)
    figure.colorbar(image, ax=right)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the products")
    parser.add_argument("--reference", action="store_true", help="experts as a plain torch loop")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--inner", type=int, default=128, help="inner width of an expert")
    parser.add_argument("--context", type=int, default=128, help="bytes a window")
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--lr", type=float, default=0.03, help="peak learning rate of Muon; AdamW's is a third of it")
    parser.add_argument("--balance", type=float, default=0.1, help="weight of the load-balancing loss")
    parser.add_argument("--sample", type=int, default=300, help="bytes of text to generate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path, default=Path("moe_lm.png"), help="where the plot goes")
    parser.add_argument("--json", type=Path, help="also write the curves and figures to this file")
    args = parser.parse_args(argv)
    if args.hidden % (2 * args.heads):
        parser.error("--hidden must be a multiple of twice --heads")
    if not 1 <= args.top_k <= args.experts:
        parser.error("--top-k must be from 1 to --experts")
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.reference:
        experts = loop_experts
    else:
        from kernels import get_kernel

        kernel = get_kernel("phanerozoic/grouped-gemm-moe", version=1, trust_remote_code=True)
        experts = partial(kernel_experts, kernel)
    training, held_out = standard_library()
    torch.manual_seed(args.seed)
    model = LanguageModel(args, experts).to(args.device)
    size = sum(p.numel() for p in model.parameters())
    print(
        f"{size / 1e6:.1f} M parameters; {args.layers} layers of {args.experts} experts, {args.top_k} a byte; "
        f"{args.device}, {args.dtype}, experts by {'a torch loop' if args.reference else 'the kernel package'}\n"
        f"{len(training) / 1e6:.1f} MB of Python to train on, {len(held_out) / 1e6:.1f} MB held out"
    )

    report = train(model, training, held_out, args)
    report["unigram_bits"] = unigram_bits(held_out)
    report["held_out_bits"], load = evaluate(model, held_out, args, 256)
    report["expert_load"] = load.tolist()
    report["sample"] = sample(model, "def ", args.sample, args)

    print(f"\nheld-out loss    {report['held_out_bits']:.3f} bits/byte, over four times the bytes of the figures above")
    print(f"unigram entropy  {report['unigram_bits']:.3f} bits/byte")
    print(f"speed            {report['tokens_per_second']:,.0f} tokens/s")
    for layer, shares in enumerate(report["expert_load"]):
        label = "expert load, %" if layer == 0 else ""
        print(f"{label:<16} layer {layer}:", *(f"{100 * share:4.1f}" for share in shares))
    print(f"\n{report['sample']}\n")
    plot(report, args.png)
    print(f"plot: {args.png}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
