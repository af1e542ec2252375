"""weight_grad: the gradient of an expert matrix as a call of its own, and added to one that is there."""

import itertools

import oracle
import pytest
import torch


class Case:
    def __init__(self, place, distribution="skipped", T=70, K=72, N=136, E=5, k=3):
        self.inputs = oracle.make(T, K, N, E, k, place.dtype, place.device, distribution)
        self.dy = oracle.make(T, N, 1, 1, 1, place.dtype, place.device, seed=1).x
        self.E, self.k = E, k
        self.order, self.expert = oracle.expert_order(self.inputs.ids, E)
        self.token = self.order // k

    def want(self, weighted, by_columns=False):
        x, weights = self.inputs.x[self.token], self.inputs.weights.flatten()[self.order]
        weights = weights if weighted else torch.ones_like(weights)
        return oracle.weight_gradient(x, self.dy[self.token], weights, self.expert, self.E, by_columns)


def assert_close(got, want, slack, dtype, before=0.0):
    oracle.assert_close(got, want + before, oracle.tolerance(dtype, got.dtype), slack=slack)


@pytest.mark.kernels_ci
def test_every_form(kernel, setting):
    """By token or by row, weighted or not; the dead rows hold NaN."""
    case = Case(setting)
    routing = kernel.route(case.inputs.ids, case.E)
    live = int(routing.offs[-1])
    for gather_x, gather_dy, weighted in itertools.product([False, True], repeat=3):
        x, dy = (t if gather else t[case.token] for t, gather in ((case.inputs.x, gather_x), (case.dy, gather_dy)))
        x, dy = x.clone(), dy.clone()
        if not gather_x:
            x[live:] = float("nan")
        if not gather_dy:
            dy[live:] = float("nan")
        got = kernel.weight_grad(
            x, dy, routing, case.inputs.weights if weighted else None, gather_x=gather_x, gather_dy=gather_dy
        )
        assert got.dtype == setting.dtype
        assert_close(got, *case.want(weighted), setting.dtype)


@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("wide", [False, True], ids=["own dtype", "wide"])
def test_adds_to_what_is_there(kernel, setting, wide, by_columns):
    """As gradient accumulation does; an expert without rows keeps its values to the bit."""
    case = Case(setting, "empty_middle")
    dtype = torch.promote_types(setting.dtype, torch.float32) if wide else setting.dtype
    before = oracle.make(case.E * 136, 72, 1, 1, 1, dtype, setting.device, seed=2).x.view(case.E, 136, 72)
    out = before.transpose(1, 2).contiguous().transpose(1, 2) if by_columns else before.clone()
    routing = kernel.route(case.inputs.ids, case.E)
    got = kernel.weight_grad(case.inputs.x, case.dy, routing, case.inputs.weights, out=out, accumulate=True)
    assert got is out
    want, slack = case.want(True, by_columns)
    assert_close(out, want, slack, setting.dtype, before.double())
    empty = torch.bincount(case.expert, minlength=case.E + 1)[: case.E] == 0
    assert empty.any() and torch.equal(out[empty], before[empty])
    kernel.weight_grad(case.inputs.x, case.dy, routing, case.inputs.weights, out=out)
    assert_close(out, want, slack, setting.dtype)
    assert (out[empty] == 0).all()


def test_is_the_gradient_of_moe(kernel, setting):
    case = Case(setting, "skewed", T=200)
    W = case.inputs.W.clone().requires_grad_()
    y = kernel.moe(case.inputs.x, W, case.inputs.ids, case.inputs.weights)
    y.backward(case.dy.to(y.dtype))
    routing = kernel.route(case.inputs.ids, case.E)
    assert torch.equal(kernel.weight_grad(case.inputs.x, case.dy, routing, case.inputs.weights), W.grad)


def test_takes_no_part_in_a_graph(kernel, place):
    case = Case(place)
    x = case.inputs.x.requires_grad_()
    assert not kernel.weight_grad(x, case.dy, kernel.route(case.inputs.ids, case.E)).requires_grad


@pytest.mark.parametrize("T, k", [(0, 2), (3, 0)])
def test_nothing_routed(kernel, place, T, k):
    ids = torch.zeros(T, k, dtype=torch.int64, device=place.device)
    x, dy = (torch.ones(T, n, dtype=place.dtype, device=place.device) for n in (8, 16))
    out = torch.full((4, 16, 8), float("nan"), dtype=place.dtype, device=place.device)
    assert (kernel.weight_grad(x, dy, kernel.route(ids, 4), out=out) == 0).all()


def test_wrong_calls_are_refused(kernel, device):
    def ones(*shape):
        return torch.ones(shape, device=device)

    x, dy = ones(4, 8), ones(4, 16)
    routing = kernel.route(torch.zeros(4, 2, dtype=torch.int64, device=device), 3)
    for message, arguments in (
        ("x must have the shape", {"x": x[1:]}),
        ("x must have the shape", {"gather_x": False}),
        ("dy must be torch.float32", {"dy": dy.half()}),
        ("x must have one of the dtypes", {"x": x.long(), "dy": dy.long()}),
        ("topk_weights must have the shape", {"topk_weights": ones(4, 3)}),
        ("out must have the shape", {"out": ones(3, 8, 16)}),
        ("out must be torch.float32", {"out": ones(3, 16, 8).half()}),
        ("out must be contiguous", {"out": ones(3, 32, 16)[:, ::2, ::2]}),
        ("out must not have dimensions that overlap", {"out": ones(1, 16, 8).expand(3, 16, 8)}),
        ("out must not have dimensions that overlap", {"out": ones(16, 8 * 3).as_strided((3, 16, 8), (8, 8, 1))}),
        ("out must be given", {"accumulate": True}),
        ("routing.offs must have", {"routing": routing._replace(offs=routing.offs[0])}),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.weight_grad(**{"x": x, "dy": dy, "routing": routing} | arguments)
    for wrong in (tuple(routing), routing._replace(offs=None), routing._replace(offs=[1, 2, 3])):
        with pytest.raises(TypeError, match="routing"):
            kernel.weight_grad(x, dy, wrong)
    for flag, wrong in (("gather_x", "yes"), ("gather_dy", None), ("accumulate", 1)):
        with pytest.raises(TypeError, match=f"{flag} must be a bool"):
            kernel.weight_grad(x, dy, routing, **{flag: wrong})


@pytest.mark.parametrize("accumulate", [False, True])
def test_out_between_other_data(kernel, setting, accumulate):
    """Experts apart from each other, rows apart, and columns first: each element has its own place, and no other is
    written."""
    device, dtype = setting.device, setting.dtype
    x, dy = torch.randn(5, 8, device=device).to(dtype), torch.randn(5, 16, device=device).to(dtype)
    routing = kernel.route(torch.tensor([[0], [2], [0], [1], [2]], device=device), 3)
    wide = torch.empty(3, 16, 8, device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    want = kernel.weight_grad(x, dy, routing, out=wide) + 7 * accumulate
    for shape, view in (
        ((3, 20, 24), lambda t: t[:, 2:18, 8:16]),
        ((3, 16, 24), lambda t: t[:, 8:, 8:].transpose(1, 2)[:, :16]),
        ((3, 8, 16), lambda t: t.transpose(1, 2)),
        ((16, 3, 8), lambda t: t.transpose(0, 1)),
    ):
        base = torch.full(shape, 7.0, device=device, dtype=dtype)
        out = view(base)
        kernel.weight_grad(x, dy, routing, out=out, accumulate=accumulate)
        oracle.assert_close(out, want, oracle.tolerance(dtype, dtype))
        out.fill_(7)
        assert (base == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_of_one_change_no_bit(kernel, device, dtype):
    """Over many stages, again and again: no operand is overwritten while it is multiplied."""
    x, dy = torch.randn(1500, 136, device=device).to(dtype), torch.randn(1500, 264, device=device).to(dtype)
    ids = torch.arange(1500, device=device)[:, None] % 7 % 3
    routing, ones = kernel.route(ids, 3), torch.ones(1500, 1, device=device)
    want = kernel.weight_grad(x, dy, routing, ones)
    for _ in range(20 if device == "cuda" else 1):
        assert torch.equal(kernel.weight_grad(x, dy, routing), want)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(kernel, device, dynamic):
    def both(x, dy, ids, out):
        routing = kernel.route(ids, 3)
        return kernel.weight_grad(x, dy, routing), kernel.weight_grad(x, dy, routing, out=out, accumulate=True)

    compiled = torch.compile(both, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for T in (5, 9):
        x, dy = torch.randn(T, 8, device=device), torch.randn(T, 16, device=device)
        ids = torch.arange(T, device=device)[:, None] % 3
        out = torch.zeros(3, 16, 8, device=device)
        got, added = compiled(x, dy, ids, out)
        want = kernel.weight_grad(x, dy, kernel.route(ids, 3))
        assert torch.equal(got, want) and torch.equal(added, want) and torch.equal(out, want)


def test_under_autocast(kernel, device):
    x, dy = torch.randn(5, 8, device=device), torch.randn(5, 16, device=device)
    routing = kernel.route(torch.tensor([[0], [2], [0], [1], [2]], device=device), 3)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = kernel.weight_grad(x, dy.bfloat16(), routing)
    assert torch.equal(got, kernel.weight_grad(x.bfloat16(), dy.bfloat16(), routing))
