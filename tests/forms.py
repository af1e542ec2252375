"""The four forms of grouped_mm: operands of any layout, offsets, and the definition as a loop over the groups."""

import oracle
import torch

FORMS = ("2d x 3d", "3d x 3d", "2d x 2d", "3d x 2d")
RAGGED = [form for form in FORMS if form != "3d x 3d"]  # those that offs splits
ENDS = (  # of four groups of up to 128 rows, or whatever the form splits
    [32, 64, 96, 128],
    [0, 50, 50, 101],  # the first and one in the middle are empty, and rows are left
    [1, 8, 77, 77],  # and the last
    [128, 128, 128, 128],
    [0, 0, 0, 0],
)


def loop(a, b, ends, bias=None):
    """The definition; what lies behind the last group is 0."""
    starts = [0, *ends][: len(ends)] if ends else []
    if a.dim() == b.dim() == 3:
        out = torch.stack([x @ y for x, y in zip(a, b, strict=True)])
        return out if bias is None else out + bias[:, None]
    if b.dim() == 3:
        biases = b.new_zeros(len(b), b.shape[2]) if bias is None else bias
        parts = [a[s:e] @ w + v for s, e, w, v in zip(starts, ends, b, biases, strict=True)]
        return torch.cat([*parts, a.new_zeros(len(a) - ends[-1], b.shape[2])])
    if a.dim() == 2:
        return torch.stack([a[:, s:e] @ b[s:e] for s, e in zip(starts, ends, strict=True)])
    parts = [w @ b[:, s:e] for s, e, w in zip(starts, ends, a, strict=True)]
    return torch.cat([*parts, b.new_zeros(a.shape[1], b.shape[1] - ends[-1])], 1)


def shapes(form, S=128, G=4, M=16, N=32, K=64):
    return {
        "2d x 3d": ((S, K), (G, K, N)),
        "3d x 3d": ((G, M, K), (G, K, N)),
        "2d x 2d": ((M, S), (S, N)),
        "3d x 2d": ((G, M, K), (K, S)),
    }[form]


def laid_out(shape, by_columns=False, strided=False, dtype=torch.float32, device="cpu"):
    """A random operand by rows or columns, dense or as every other matrix and the first half of longer rows."""
    *groups, rows, columns = shape
    inner = (columns, rows) if by_columns else (rows, columns)
    step = 2 if strided else 1
    wide = torch.randn([step * g for g in groups] + [inner[0], step * inner[1]], device=device).to(dtype)
    t = wide[::step, :, : inner[1]] if groups else wide[:, : inner[1]]
    return t.mT if by_columns else t


def operands(form, columns=(False, False), strided=False, dtype=torch.float32, device="cpu", **sizes):
    made = (laid_out(s, c, strided, dtype, device) for s, c in zip(shapes(form, **sizes), columns, strict=True))
    return [t.requires_grad_() for t in made]


def offsets(form, ends, device="cpu", dtype=torch.int32):
    return None if form == "3d x 3d" else torch.tensor(ends, device=device).to(dtype)


def incoming(y, dtype):
    """A random gradient that is exact in the operands' dtype, which the backward casts it to."""
    return torch.randn(y.shape, device=y.device).to(dtype).to(y.dtype)


def check(call, form, ends, leaves, d=None, **options):
    """Result and gradients of call, in value, dtype and strides; leaves are the operands and perhaps a bias."""
    a, b, *bias = leaves
    given = {"bias": bias[0]} if bias else {}
    y = call(a, b, offs=offsets(form, ends, a.device), **given, **options)
    assert y.is_contiguous() and y.dtype == options.get("out_dtype", a.dtype)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = loop(*wide[:2], ends, *wide[2:])
    oracle.assert_close(y, want, oracle.tolerance(a.dtype, y.dtype))
    d = incoming(y, a.dtype) if d is None else d
    got = torch.autograd.grad(y, leaves, d)
    for g, w, t in zip(got, torch.autograd.grad(want, wide, d.double()), leaves, strict=True):
        assert g.dtype == t.dtype
        oracle.assert_close(g, w, oracle.tolerance(a.dtype, t.dtype))
    return y, got
