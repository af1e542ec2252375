"""Properties that hold for any sizes, drawn by hypothesis."""

import oracle
import problems
import pytest
import torch

pytest.importorskip("hypothesis")  # the hub may run the tests without it

from fuzz import budget, device_and_dtype, devices, functions, layouts, placed, sizes  # noqa: E402
from hypothesis import example, given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


def drawn(function, dtype, T, K, N, E, k, distribution, seed):
    """One problem by hand, as an example."""
    sizes = {"T": T, "K": K, "N": N, "E": E, "k": k, "distribution": distribution, "seed": seed}
    return example(function, ("cpu", dtype), sizes)


# The largest value, often the only one, is small beside its terms: a sum of them is no more exact for that.
@budget
@given(functions, device_and_dtype, sizes)
@drawn("gemm_combine+bias", torch.float32, 77, 77, 1, 1, 4, "uniform", 56963)  # the gradient of bias
@drawn("moe", torch.float16, 1, 3, 1, 1, 6, "single", 15)  # that of the weights
@drawn("moe", torch.float32, 1, 1, 1, 3, 3, "repeated", 206)  # the result
def test_any_problem(kernel, function, place, sizes):
    device, dtype = place
    problems.check(kernel, problems.make(function, **sizes, dtype=dtype, device=device), cancels=True)


@budget
@given(st.data(), functions, device_and_dtype, sizes)
def test_any_strides(kernel, data, function, place, sizes):
    device, dtype = place
    problem = problems.make(function, **sizes, dtype=dtype, device=device)
    views = {name: placed(t, data.draw(layouts(t.dim()))) for name, t in problem.tensors.items()}
    dy = problem.incoming(problem.call(kernel, **problem.tensors))
    problems.check(kernel, problem._replace(tensors=views), placed(dy, data.draw(layouts(2))), cancels=True)


@budget
@given(devices, sizes, st.integers(-20, 20))
def test_power_of_two_scales_exactly(kernel, device, sizes, exponent):
    x, W, ids, weights = oracle.make(**sizes, device=device)
    with problems.deterministic():
        want = kernel.moe(x, W, ids, weights) * 2.0**exponent
        assert torch.equal(kernel.moe(x, W, ids, weights * 2.0**exponent), want)
        assert torch.equal(kernel.moe(x * 2.0**exponent, W, ids, weights), want)
        assert torch.equal(kernel.moe(x, W * 2.0**exponent, ids, weights), want)


@budget
@given(devices, sizes)
def test_names_of_experts_do_not_matter(kernel, device, sizes):
    """Experts in another order, with ids to match, give the same bits."""
    x, W, ids, weights = oracle.make(**sizes, device=device)
    E = len(W)
    new = torch.randperm(E, device=device)  # the new id of each expert
    renamed = torch.where(oracle.is_live(ids, E), new[ids.clamp(0, E - 1)], ids)
    with problems.deterministic():
        assert torch.equal(kernel.moe(x, W[new.argsort()], renamed, weights), kernel.moe(x, W, ids, weights))


@budget
@given(devices, sizes, st.integers(0, 20))
def test_shards_of_experts_add_up(kernel, device, sizes, cut):
    """Two ranks, each with some of the experts and ids outside them for the rest, sum to the whole layer."""
    x, W, ids, weights = oracle.make(**sizes, device=device)
    E = len(W)
    cut = 1 + cut % E
    parts = kernel.moe(x, W[:cut], torch.where(ids < cut, ids, cut), weights).double()
    if cut < E:
        parts = parts + kernel.moe(x, W[cut:], torch.where(oracle.is_live(ids, E), ids - cut, -1), weights)
    want = oracle.moe(x, W, ids, weights)
    floor = oracle.cancellation(oracle.moe(x.abs(), W.abs(), ids, weights), want, x.dtype, parts.dtype)
    oracle.assert_close(parts, want, 1e-5, floor=floor)


@budget
@given(devices, sizes)
def test_routing_is_a_permutation(kernel, device, sizes):
    _, W, ids, _ = oracle.make(**sizes, device=device)
    routing = kernel.route(ids, len(W))
    order, expert = oracle.expert_order(ids, len(W))
    assert torch.equal(routing.row_assignment, order.int())
    assert torch.equal(routing.row_assignment.sort().values, torch.arange(ids.numel(), device=device).int())
    assert int(routing.offs[-1]) == int((expert < len(W)).sum())
