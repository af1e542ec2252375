"""gather_gemm and gemm_combine on what route returns: the pieces that a caller builds an expert MLP from."""

import oracle
import problems
import pytest
import torch

PIECES = [function for function in problems.FUNCTIONS if function.startswith(("gather_gemm", "gemm_combine"))]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("function", PIECES)
@pytest.mark.parametrize("shape", [(45, 64, 48, 8, 2), (200, 100, 136, 5, 3), (1, 33, 7, 3, 1)], ids=str)
def test_matches_the_oracle(kernel, setting, function, shape):
    problem = problems.make(function, *shape, setting.dtype, setting.device)
    y = problems.check(kernel, problem)
    wide = torch.float64 if setting.dtype == torch.float64 else torch.float32
    assert y.dtype == (setting.dtype if function.startswith("gather") else wide)


@pytest.mark.parametrize("function", PIECES)
@pytest.mark.parametrize("distribution", oracle.DISTRIBUTIONS)
def test_any_distribution_over_experts(kernel, place, function, distribution):
    problem = problems.make(function, 90, 40, 72, 7, 3, place.dtype, place.device, distribution)
    problems.check(kernel, problem)


@pytest.mark.parametrize("function", PIECES)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_out_dtype(kernel, device, function, out_dtype):
    for dtype in (torch.float32, torch.bfloat16):
        problem = problems.make(function, 40, 64, 72, 5, 3, dtype, device)
        assert problems.check(kernel, problem, out_dtype=out_dtype).dtype == out_dtype


def test_dead_rows_stay_out(kernel, device):
    """NaN in rows of skipped ids, and in their incoming gradient, reaches nothing; their own gradient is 0."""
    x, W, ids, weights = oracle.make(40, 32, 48, 5, 2, device=device, distribution="skipped")
    routing = kernel.route(ids, 5)
    live = int(routing.offs[-1])
    gathered = kernel.gather_gemm(x.requires_grad_(), W.requires_grad_(), routing)
    dy = torch.ones_like(gathered)
    dy[live:] = float("nan")
    gathered.backward(dy)
    assert (gathered[live:] == 0).all() and x.grad.isfinite().all() and W.grad.isfinite().all()

    h = torch.randn(80, 32, device=device)
    h[live:] = float("nan")
    weights = torch.where(oracle.is_live(ids, 5), weights, float("nan"))
    h.requires_grad_(), weights.requires_grad_()
    y = kernel.gemm_combine(h, W, routing, weights)
    y.square().sum().backward()
    assert y.isfinite().all() and h.grad.isfinite().all() and weights.grad.isfinite().all()
    assert (h.grad[live:] == 0).all() and (weights.grad[~oracle.is_live(ids, 5)] == 0).all()


def test_bias_is_added_to_live_rows_alone(kernel, device):
    x, W, ids, weights = oracle.make(30, 16, 24, 4, 2, device=device, distribution="skipped")
    bias = torch.randn(4, 24, device=device, requires_grad=True)
    routing = kernel.route(ids, 4)
    rows = kernel.gather_gemm(x, torch.zeros_like(W), routing, bias=bias)
    order, expert = oracle.expert_order(ids, 4)
    assert torch.equal(rows, torch.cat([bias, bias.new_zeros(1, 24)])[expert])
    rows.sum().backward()
    counts = torch.bincount(expert, minlength=5)[:4]
    assert torch.equal(bias.grad, counts[:, None].expand(4, 24).float())
    y = kernel.gemm_combine(torch.zeros(60, 16, device=device), W, routing, weights, bias=bias)
    assert (y[~oracle.is_live(ids, 4).any(1)] == 0).all()


def mlp(kernel, x, up, down, ids, weights, bias_up=None, bias_down=None):
    routing = kernel.route(ids, len(up))
    gate, value = kernel.gather_gemm(x, up, routing, bias=bias_up).chunk(2, -1)
    return kernel.gemm_combine(torch.nn.functional.silu(gate) * value, down, routing, weights, bias=bias_down)


def mlp_oracle(x, up, down, weights, bias_up, bias_down, ids):
    gate, value = oracle.gather_gemm(x, up, ids, bias_up).chunk(2, -1)
    return oracle.gemm_combine(torch.nn.functional.silu(gate) * value, down, ids, weights, bias_down)


@pytest.mark.parametrize("distribution", ["uniform", "skipped"])
def test_expert_mlp(kernel, device, distribution):
    """The two pieces with an activation between them; one routing serves both and the backward."""
    x, up, ids, weights = oracle.make(60, 48, 2 * 40, 6, 3, device=device, distribution=distribution)
    down = oracle.make(0, 40, 48, 6, 3, device=device, seed=1).W
    bias_up, bias_down = torch.randn(6, 80, device=device), torch.randn(6, 48, device=device)
    tensors = (x, up, down, weights, bias_up, bias_down)
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = mlp(kernel, *leaves[:3], ids, *leaves[3:])
    dy = torch.randn_like(y)
    oracle.assert_close(y, mlp_oracle(*(t.double() for t in tensors), ids), 1e-5)
    got = torch.autograd.grad(y, leaves, dy)
    for g, w in zip(got, oracle.gradients(lambda *t: mlp_oracle(*t, ids), tensors, dy), strict=True):
        oracle.assert_close(g, w, 1e-5)


def test_pieces_make_moe(kernel, device):
    """gemm_combine of gathered rows, and a weighted sum of gather_gemm's rows, are moe to the last bit."""
    x, W, ids, weights = oracle.make(50, 64, 72, 6, 2, device=device)
    routing = kernel.route(ids, 6)
    want = kernel.moe(x, W, ids, weights)
    order = routing.row_assignment.long()
    assert torch.equal(kernel.gemm_combine(x[order // 2], W, routing, weights), want)
    rows = kernel.gather_gemm(x, W, routing)[order.argsort()].view(50, 2, 72)
    assert torch.equal(rows[:, 0] * weights[:, :1] + rows[:, 1] * weights[:, 1:], want)
