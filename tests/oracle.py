"""Random inputs, float64 oracles and the comparison with them.

Nothing here uses the package. The oracles loop over experts in float64, on the inputs' device, and are differentiable.

T tokens, k experts a token, S = T*k assignments, E experts, K in-features, N out-features; of an MLP H features in and
out and I between. An id outside [0, E) is skipped: its row is 0 and takes no part in any gradient.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

DISTRIBUTIONS = (
    "uniform",  # k different experts a token, each as likely
    "skewed",  # a few experts get most tokens
    "single",  # one expert gets everything
    "empty_first",
    "empty_middle",
    "empty_last",
    "repeated",  # a token may have the same expert twice
    "skipped",  # a quarter of the ids lie outside [0, E), all those of the first token do
    "all_skipped",
)
OUTSIDE = (-1, -(2**40), 2**32, 2**62)  # besides E itself; 2**32 would be expert 0 if it were cut to 32 bits


class Inputs(NamedTuple):
    x: torch.Tensor  # [T, K]
    W: torch.Tensor  # [E, N, K], scaled so that products are about 1
    ids: torch.Tensor  # [T, k] int64
    weights: torch.Tensor  # [T, k] float32, float64 for float64 x, in [0.1, 1)


def make(T, K, N, E, k, dtype=torch.float32, device="cpu", distribution="uniform", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device, dtype=wide)

    x, W = normal(T, K).to(dtype), (normal(E, N, K) / max(K, 1) ** 0.5).to(dtype)
    ids = make_ids(T, E, k, distribution, generator)
    weights = 0.1 + 0.9 * torch.rand(T, k, generator=generator, device=device, dtype=wide)
    return Inputs(x, W, ids, weights)


def make_ids(T, E, k, distribution, generator):
    device = generator.device
    third = E // 3
    chosen = {
        "single": range(E // 2, E // 2 + 1),
        "empty_first": range(third, E),
        "empty_middle": (*range(third), *range(E - third, E)) if third else range(E),
        "empty_last": range(E - third),
    }.get(distribution, range(E))
    chosen = torch.tensor(chosen, device=device)
    if distribution == "repeated" or k > len(chosen):
        picked = torch.randint(len(chosen), (T, k), generator=generator, device=device)
    else:
        score = torch.rand(T, len(chosen), generator=generator, device=device).clamp(min=1e-9).log()
        if distribution == "skewed":  # the largest log(u) / p are a draw without repeats, likely in proportion to p
            score *= torch.arange(1, len(chosen) + 1, device=device) ** 1.5
        picked = score.topk(k, -1).indices
    ids = chosen[picked]
    if distribution in ("skipped", "all_skipped"):
        outside = torch.tensor((E, *OUTSIDE), device=device)
        outside = outside[torch.randint(len(outside), (T, k), generator=generator, device=device)]
        dead = torch.rand(T, k, generator=generator, device=device) < 0.25
        dead[:1] = True
        ids = torch.where(dead | (distribution == "all_skipped"), outside, ids)
    return ids


def is_live(ids, E):
    return (ids >= 0) & (ids < E)


def expert_order(ids, E):
    """The assignment at each row, and each row's expert (E for the dead, which come last)."""
    expert = torch.where(is_live(ids, E), ids.long(), E).flatten()
    order = expert.argsort(stable=True)
    return order, expert[order]


def row_experts(sizes, S):
    """Each row's expert for rows grouped by `sizes`; len(sizes) for rows past the last group."""
    sizes = sizes.long().cpu()
    rest = torch.tensor([S - int(sizes.sum())])
    return torch.repeat_interleave(torch.arange(len(sizes) + 1), torch.cat([sizes, rest]))


def by_expert(expert, E):
    """The rows in the order of their experts, and how many each expert has; those outside [0, E) come last."""
    order, expert = expert_order(expert, E)
    return order, torch.bincount(expert, minlength=E + 1).tolist()


def through_experts(a, W, expert, bias=None):
    """z[r] = W[e] a[r] + bias[e] with e = expert[r]; 0 where e lies outside [0, E)."""
    a, W = a.double(), W.double()
    biases = W.new_zeros(W.shape[:2]) if bias is None else bias.double()
    order, counts = by_expert(expert, len(W))
    *groups, dead = a[order].split(counts)
    parts = [rows @ w.T + b for rows, w, b in zip(groups, W.unbind(), biases.unbind(), strict=True) if len(rows)]
    return torch.cat([*parts, a.new_zeros(len(dead), W.shape[1])])[order.argsort()]


def combine(z, weights, ids, E):
    """y[t] = sum over j of weights[t, j] * z[t*k + j], rows in assignment order."""
    weights = torch.where(is_live(ids, E), weights.double(), 0.0)
    return (weights[..., None] * z.view(*ids.shape, z.shape[-1])).sum(1)


def moe(x, W, ids, weights):
    z = through_experts(x.repeat_interleave(ids.shape[1], 0), W, ids.flatten())
    return combine(z, weights, ids, len(W))


def grouped_gemm(a, W, sizes):
    return through_experts(a, W, row_experts(sizes, len(a)).to(a.device))


class Form(NamedTuple):
    """The activation of an MLP."""

    kind: str = "silu"
    gated: bool = True
    interleaved: bool = False
    limit: float | None = None
    alpha: float | None = None

    def __str__(self):
        gate = "interleaved" if self.interleaved else "gated" if self.gated else "ungated"
        limits = [f"{name}={value}" for name, value in (("limit", self.limit), ("alpha", self.alpha)) if value]
        return "-".join((self.kind, gate, *limits))

    def halves(self, z):
        """Gate and up, of columns that take turns or stand one half before the other."""
        half = z.shape[-1] // 2
        return (z[..., ::2], z[..., 1::2]) if self.interleaved else (z[..., :half], z[..., half:])

    def joined(self, gate, up):
        return torch.stack((gate, up), -1).flatten(-2) if self.interleaved else torch.cat((gate, up), -1)

    def __call__(self, z):
        gate, up = self.halves(z) if self.gated else (z, None)
        clamped = self.kind == "clamped_swiglu"
        limit = self.limit or (7.0 if clamped else None)
        alpha = self.alpha or (1.702 if clamped else 1.0)
        if limit is not None:
            # At the limit itself the slope is 1, which clamp's is only before torch 2.14.
            gate = torch.where(gate > limit, limit, gate)
            up = torch.where(up.abs() > limit, limit * up.sign(), up)
        value = {
            "silu": lambda: F.silu(alpha * gate) / alpha,
            "clamped_swiglu": lambda: gate * torch.sigmoid(alpha * gate),
            "gelu": lambda: gate * torch.erfc(-gate * 0.5**0.5) / 2,  # where it is near 0, F.gelu is off by more
            "gelu_tanh": lambda: F.gelu(gate, approximate="tanh"),
            "relu": lambda: F.relu(gate),
            "relu2": lambda: F.relu(gate).square(),
        }[self.kind]()
        return value if up is None else value * (up + 1 if clamped else up)


FORMS = (
    *(Form(kind, gated) for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2") for gated in (True, False)),
    *(Form(kind, True, True) for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2")),
    *(Form("clamped_swiglu", True, interleaved) for interleaved in (True, False)),
    Form("clamped_swiglu", True, True, limit=0.7, alpha=0.5),
    Form("silu", alpha=1.702),
    Form("silu", gated=False, alpha=0.25),
    Form("gelu", limit=0.5),
)


def gather_gemm(x, W, ids, bias=None, form=None):
    order, expert = expert_order(ids, len(W))
    z = through_experts(x[order // max(ids.shape[1], 1)], W, expert, bias)
    return z if form is None else form(z)  # which is 0 at 0, where rows are skipped


def gemm_combine(h, W, ids, weights, bias=None):
    order, expert = expert_order(ids, len(W))
    z = through_experts(h, W, expert, bias)
    return combine(z[order.argsort()], weights, ids, len(W))


def moe_mlp(x, w_up, w_down, ids, weights, bias_up=None, bias_down=None, form=None):
    return gemm_combine(gather_gemm(x, w_up, ids, bias_up, form or Form()), w_down, ids, weights, bias_down)


def gradients(function, tensors, dy):
    """Gradients of sum(function(*tensors) * dy) to each of `tensors`, in float64."""
    leaves = [t.detach().double().requires_grad_() for t in tensors]
    y = function(*leaves)
    if not y.requires_grad:  # nothing was routed
        return [torch.zeros_like(leaf) for leaf in leaves]
    return torch.autograd.grad(y, leaves, dy.double(), allow_unused=True, materialize_grads=True)


def weight_gradient(x, dy, weights, expert, E, by_columns):
    """sum over the rows r of each expert of weights[r] * outer(dy[r], x[r]), [E, N, K]: the value and its slack.

    The rows of dy, with `by_columns` those of x, are scaled and rounded to their dtype before they are multiplied. The
    slack is what the values that may be rounded either way make of it.
    """
    if by_columns:
        value, slack = weight_gradient(dy, x, weights, expert, E, False)
        return value.transpose(1, 2), slack.transpose(1, 2)
    order, counts = by_expert(expert, E)
    x, (dy, units) = x.double(), scaled(dy, weights)
    parts = [t[order].split(counts)[:E] for t in (dy, x, units, x.abs())]
    value, slack = ([left.T @ right for left, right in zip(*parts[i : i + 2], strict=True)] for i in (0, 2))
    return torch.stack(value), torch.stack(slack)


TIE = 2**-7  # of a unit in the last place: csrc/mma/multiply.cuh says why


def scaled(rows, weights):
    """Each row times its weight, rounded to the rows' dtype if that is narrow, and the slack of each value.

    Within TIE of the middle between two values it may be rounded either way, which is one unit in its last place: a
    product that is off by so little is as good as exact.
    """
    exact = rows.double() * weights.double()[:, None]
    if rows.dtype.itemsize > 2:
        return exact, torch.zeros_like(exact)
    unit = last_place(exact, rows.dtype)
    tied = ((exact / unit).abs().frac() - 0.5).abs() <= TIE
    return exact.float().to(rows.dtype).double(), torch.where(tied, unit, 0.0)


def last_place(values, dtype):
    """One unit in the last place of each value in dtype, subnormal ones included."""
    info = torch.finfo(dtype)
    with torch.cuda.device_of(values):  # torch 2.11's frexp and ldexp go astray on a GPU that is not the current one
        exponent = values.abs().clamp(min=info.smallest_normal).frexp().exponent
        return torch.ldexp(torch.full_like(values, info.eps), exponent - 1)


def accumulator(dtype):
    """The dtype that sums of products of `dtype` are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tolerance(operand, result):
    """The error that honest arithmetic makes, relative to the largest value.

    Products are exact and sums are float32 (float64 for float64): 1e-5 holds to K = 2048 and beyond. Rounding once to
    a narrower result adds half a unit in its last place.
    """
    arithmetic = 1e-13 if operand == torch.float64 else 1e-5
    return arithmetic + (torch.finfo(result).eps / 2 if result.itemsize == 2 else 0)


ROUNDINGS = 8  # up to 4 are seen where nearly all terms cancel, on the CPU


def cancellation(terms, want, operand, result):
    """The error that honest arithmetic makes in each value however small it is; `terms` has the sums of |terms|.

    A sum's error is in proportion to its terms, not to its value: a product or an addition rounds by at most half a
    unit in the last place of a partial sum, eps / 2 * terms. ROUNDINGS of them count; longer sums have more, but most
    of those cancel. In float32 that is 5e-7 * terms, below what `tolerance` gives unless 19/20 of the terms cancel.
    Rounding to a narrower result adds half a unit in its last place, which for subnormal values is no small part.
    """
    error = ROUNDINGS * torch.finfo(accumulator(operand)).eps / 2 * terms
    return error + last_place(want, result) / 2 if result.itemsize == 2 else error


BLOCK = 64  # columns that are compared among themselves


def block_maxima(values, group, count):
    """Largest value in each (group of rows, block of columns): [count, ceil(columns / BLOCK)]."""
    columns = values.shape[1]
    padded = torch.nn.functional.pad(values, (0, -columns % BLOCK))
    rows = padded.view(len(values), -1, BLOCK).amax(-1)
    index = group[:, None].expand_as(rows)
    return rows.new_zeros(count, rows.shape[1]).scatter_reduce_(0, index, rows, "amax")


def assert_close(got, want, rel, groups=None, slack=None, floor=None):
    """The largest error is at most `rel` of the largest value: over all, and in each block.

    `slack` is error for free; what is left of a value's error may in any case be its `floor`, as of `cancellation`.

    A block is 64 columns of one group of rows. `groups` gives each row's group; a [E, N, K] tensor has a group an
    expert. A block of fewer than 16 elements is held against the largest value of all, for its own may be near 0. A
    block that should be all 0 must be exactly that.
    """
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if not want.numel():
        return
    if want.dim() == 3:
        groups = torch.arange(len(want), device=want.device).repeat_interleave(want.shape[1])
    got, want = (t.detach().double().reshape(-1, want.shape[-1]) for t in (got, want))
    assert got.isfinite().all(), f"{int((~got.isfinite()).sum())} of {got.numel()} values are not finite"
    if groups is None:
        groups = torch.zeros(len(want), dtype=torch.int64, device=want.device)
    groups, sizes = groups.unique(return_inverse=True, return_counts=True)[1:]
    error = (got - want).abs()
    if slack is not None:
        error = (error - slack.reshape(error.shape)).clamp(min=0)
    if floor is not None:
        error = torch.where(error <= floor.reshape(error.shape), 0.0, error)
    error = block_maxima(error, groups, len(sizes))
    scale = block_maxima(want.abs(), groups, len(sizes))
    width = torch.arange(scale.shape[1], device=want.device) * -BLOCK + want.shape[1]
    small = sizes[:, None] * width.clamp(max=BLOCK) < 16
    scale = torch.where(small & (scale > 0), scale.max(), scale)
    excess = error - rel * scale
    if (excess > 0).any():
        group, block = divmod(int(excess.argmax()), excess.shape[1])
        worst = float(error[group, block]), float(scale[group, block])
        bad = int((excess > 0).sum())
        raise AssertionError(
            f"error {worst[0]:.3g} where the largest value is {worst[1]:.3g}: {worst[0] / max(worst[1], 1e-300):.3g}, "
            f"allowed {rel:.3g}; worst in row group {group}, columns from {block * BLOCK}; {bad} of {excess.numel()} "
            "blocks are wrong"
        )
