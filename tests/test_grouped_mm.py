"""grouped_mm: every form, layout and dtype, its gradients and theirs, against a float64 loop over the groups."""

import itertools

import oracle
import pytest
import torch

FORMS = ("2d x 3d", "3d x 3d", "2d x 2d", "3d x 2d")
ENDS = ([32, 64, 96, 128], [0, 50, 50, 101], [128, 128, 128, 128], [0, 0, 0, 0], [1, 8, 77, 128])


def loop(a, b, ends):
    """The definition; what lies behind the last group is 0."""
    starts = [0, *ends[:-1]] if ends else []
    if a.dim() == 3 and b.dim() == 3:
        return torch.stack([x @ y for x, y in zip(a, b, strict=True)])
    if b.dim() == 3:
        parts = [a[s:e] @ w for s, e, w in zip(starts, ends, b, strict=True)]
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


def laid_out(shape, by_columns, strided, dtype, device):
    """A random operand by rows or columns, dense or out of a wider one."""
    *groups, rows, columns = shape
    inner = (columns, rows) if by_columns else (rows, columns)
    wide = torch.randn(*groups, inner[0], inner[1] * (2 if strided else 1), device=device, dtype=torch.float32).to(
        dtype
    )
    t = wide[..., : inner[1]]
    return t.mT if by_columns else t


def run(kernel, form, ends, dtype, device, columns=(False, False), strided=False, **options):
    a, b = (laid_out(s, c, strided, dtype, device) for s, c in zip(shapes(form), columns, strict=True))
    a, b = a.requires_grad_(), b.requires_grad_()
    offs = None if form == "3d x 3d" else torch.tensor(ends, dtype=torch.int32, device=device)
    y = kernel.grouped_mm(a, b, offs=offs, **options)
    wide = [t.detach().double().requires_grad_() for t in (a, b)]
    want = loop(*wide, ends if offs is not None else None)
    oracle.assert_close(y, want, oracle.tolerance(dtype, y.dtype))
    assert y.is_contiguous()
    d = torch.randn(y.shape, device=device).to(dtype)
    got = torch.autograd.grad(y, (a, b), d.to(y.dtype))
    for name, g, w, t in zip("ab", got, torch.autograd.grad(want, wide, d.double()), (a, b), strict=True):
        assert g.dtype == dtype, name
        oracle.assert_close(g, w, oracle.tolerance(dtype, dtype))
        if t.is_contiguous() or t.mT.is_contiguous():
            assert g.stride() == t.stride() or t.numel() == 0, name


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("columns", list(itertools.product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_and_layout(kernel, setting, form, columns, strided):
    for ends in ENDS if form != "3d x 3d" else ENDS[:1]:
        run(kernel, form, ends, setting.dtype, setting.device, columns, strided)


@pytest.mark.parametrize("form", FORMS)
def test_wide_results(kernel, device, form):
    for dtype in (torch.bfloat16, torch.float16):
        run(kernel, form, ENDS[1], dtype, device, out_dtype=torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_of_any_order(kernel, form):
    a, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes(form, 10, 3, 2, 3, 4))
    offs = None if form == "3d x 3d" else torch.tensor([2, 2, 9])

    def product(a, b):
        return kernel.grouped_mm(a, b, offs=offs)

    assert torch.autograd.gradcheck(product, (a, b)) and torch.autograd.gradgradcheck(product, (a, b))


@pytest.mark.parametrize("form", FORMS[:2])
def test_bias(kernel, place, form):
    a, b = (torch.randn(s, device=place.device).to(place.dtype).requires_grad_() for s in shapes(form))
    bias = torch.randn(4, 32, device=place.device).to(place.dtype).requires_grad_()
    ends = ENDS[1]
    offs = None if form == "3d x 3d" else torch.tensor(ends, device=place.device)
    y = kernel.grouped_mm(a, b, offs=offs, bias=bias)
    wide = [t.detach().double().requires_grad_() for t in (a, b, bias)]
    want = loop(*wide[:2], ends)
    if offs is None:
        want = want + wide[2][:, None]
    else:
        rows = torch.zeros_like(want)
        for s, e, v in zip([0, *ends], ends, wide[2]):
            rows = rows + torch.nn.functional.pad(v.expand(e - s, -1), (0, 0, s, len(want) - e))
        want = want + rows
    oracle.assert_close(y, want, oracle.tolerance(place.dtype, place.dtype))
    d = torch.randn(y.shape, device=place.device).to(place.dtype)
    for got, right in zip(torch.autograd.grad(y, (a, b, bias), d), torch.autograd.grad(want, wide, d.double())):
        oracle.assert_close(got, right, oracle.tolerance(place.dtype, place.dtype))


@pytest.mark.parametrize("form", FORMS)
def test_expanded_gradients(kernel, device, form):
    a, b = (torch.randn(s, device=device, requires_grad=True) for s in shapes(form))
    offs = None if form == "3d x 3d" else torch.tensor(ENDS[1], device=device)
    kernel.grouped_mm(a, b, offs=offs).sum().backward()
    wide = [t.detach().double().requires_grad_() for t in (a, b)]
    loop(*wide, ENDS[1]).sum().backward()
    for t, w in zip((a, b), wide, strict=True):
        oracle.assert_close(t.grad, w.grad, 1e-5)


def test_more_groups_than_torch_takes(kernel, device):
    sizes = torch.arange(1500, device=device) % 3
    a, b = torch.randn(int(sizes.sum()), 8, device=device), torch.randn(1500, 8, 16, device=device)
    offs = sizes.cumsum(0)
    want = torch.einsum("sk,skn->sn", a.double(), b.double()[torch.repeat_interleave(sizes)])
    for dtype in (torch.int32, torch.int64):
        oracle.assert_close(kernel.grouped_mm(a, b, offs=offs.to(dtype)), want, 1e-5)


def test_in_place_of_torchs(kernel, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", kernel.grouped_mm)
    a, b = torch.randn(128, 64).bfloat16(), torch.randn(4, 64, 32).bfloat16()
    offs = torch.tensor(ENDS[0], dtype=torch.int32)
    got = torch.nn.functional.grouped_mm(a, b, offs=offs, out_dtype=torch.bfloat16)
    oracle.assert_close(got, torch._grouped_mm(a, b, offs).double(), 1e-2)


@pytest.mark.parametrize("form", FORMS)
def test_compiled(kernel, device, form):
    a, b = (torch.randn(s, device=device, requires_grad=True) for s in shapes(form))
    offs = None if form == "3d x 3d" else torch.tensor(ENDS[1], dtype=torch.int32, device=device)
    compiled = torch.compile(lambda a, b: kernel.grouped_mm(a, b, offs=offs), backend="aot_eager", fullgraph=True)
    want = kernel.grouped_mm(a, b, offs=offs)
    y = compiled(a, b)
    assert torch.equal(y, want) and y.stride() == want.stride()
    d = torch.randn_like(y)
    for got, right in zip(torch.autograd.grad(y, (a, b), d), torch.autograd.grad(want, (a, b), d), strict=True):
        assert torch.equal(got, right)


def test_wrong_arguments(kernel, device):
    def ones(*shape, **options):
        return torch.ones(shape, device=device, **options)

    right = {"mat_a": ones(8, 4), "mat_b": ones(2, 4, 3), "offs": torch.tensor([3, 8], device=device)}
    kernel.grouped_mm(**right)
    for given, fragments in (
        ({"mat_a": ones(4)}, ("mat_a", "2 or 3 dimensions", "[4]")),
        ({"mat_b": ones(2, 4, 3, dtype=torch.bfloat16)}, ("mat_b", "torch.float32", "torch.bfloat16")),
        ({"mat_a": ones(8, 4).int()}, ("mat_a", "torch.float32", "torch.int32")),
        ({"mat_b": ones(2, 5, 3)}, ("mat_b", "4 rows", "[2, 5, 3]")),
        ({"mat_a": ones(3, 8, 4), "offs": None}, ("mat_b", "3 groups", "[2, 4, 3]")),
        ({"mat_a": ones(2, 8, 4)}, ("offs", "None", "given")),
        ({"offs": None}, ("offs", "2-D", "None")),
        ({"offs": ones(2)}, ("offs", "integers", "torch.float32 [2]")),
        ({"offs": torch.tensor([[3, 8]], device=device)}, ("offs", "1-D", "[1, 2]")),
        ({"offs": torch.tensor([8], device=device)}, ("offs", "2 ends", "[1]")),
        ({"offs": torch.tensor([3, 8], device="meta")}, ("offs", device, "meta")),
        ({"bias": ones(3, 2)}, ("bias", "[2, 3]", "[3, 2]")),
        ({"bias": ones(2, 3).double()}, ("bias", "torch.float32", "torch.float64")),
        ({"out_dtype": torch.bfloat16}, ("out_dtype", "torch.float32", "torch.bfloat16")),
    ):
        with pytest.raises(RuntimeError) as caught:
            kernel.grouped_mm(**right | given)
        assert all(fragment in str(caught.value) for fragment in fragments), caught.value
