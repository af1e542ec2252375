"""moe: the result and all gradients against the oracle, on every device, dtype and configuration."""

from functools import partial

import oracle
import problems
import pytest
import torch
from conftest import load_part

SHAPES = [  # T, K, N, E, k
    (33, 64, 48, 8, 2),
    (1, 128, 128, 4, 1),
    (257, 96, 136, 4, 1),
    (300, 256, 272, 8, 4),
    (70, 200, 130, 16, 8),
    (150, 129, 67, 3, 3),
    (19, 40, 24, 64, 33),
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_oracle(kernel, setting, shape):
    problem = problems.make("moe", *shape, setting.dtype, setting.device)
    y = problems.check(kernel, problem)
    assert y.dtype == (torch.float64 if setting.dtype == torch.float64 else torch.float32)
    assert y.is_contiguous()


@pytest.mark.parametrize("distribution", oracle.DISTRIBUTIONS)
def test_any_distribution_over_experts(kernel, setting, distribution):
    problem = problems.make("moe", 180, 72, 80, 7, 3, setting.dtype, setting.device, distribution)
    problems.check(kernel, problem)


def test_many_rows_and_long_sums(kernel, device):
    """K, N and the rows of an expert far beyond one tile."""
    for dtype in (torch.float32, torch.bfloat16):
        problem = problems.make("moe", 700, 2048, 264, 3, 2, dtype, device, "skewed")
        problems.check(kernel, problem)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_out_dtype(kernel, device, dtype, out_dtype):
    """Any result dtype: summed over experts in float32 and rounded once, as `tolerance` demands."""
    for k in (1, 5):
        problem = problems.make("moe", 60, 72, 80, 7, k, dtype, device)
        y = problems.check(kernel, problem, out_dtype=out_dtype)
        assert y.dtype == out_dtype


def test_narrow_result_is_the_rounded_float32_result(kernel, device):
    problem = problems.make("moe", 60, 72, 80, 7, 2, torch.bfloat16, device)
    wide = problem.call(kernel, **problem.tensors)
    assert torch.equal(problem.call(kernel, **problem.tensors, out_dtype=torch.bfloat16), wide.bfloat16())


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e3, 1e30])
def test_any_scale(kernel, device, scale):
    """An error is judged by the largest value, so a small input hides nothing and a large one overflows nothing."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = oracle.make(50, 136, 72, 6, 3, dtype, device)
        inputs = inputs._replace(x=(inputs.x.float() * scale).to(dtype))
        problem = problems.build("moe", inputs)
        want = problem.want(*problem.tensors.values())
        y = problem.call(kernel, **problem.tensors)
        oracle.assert_close(y, want, oracle.tolerance(dtype, y.dtype), problem.groups["y"])


def test_float32_is_not_tf32(kernel, device):
    """TF32 and bf16 would lose the low bits of these operands; a global setting must not matter."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        problem = problems.make("moe", 64, 256, 128, 4, 2, torch.float32, device)
        y, gradients = problems.run(kernel, problem)
    finally:
        torch.set_float32_matmul_precision(before)
    oracle.assert_close(y, problem.want(*problem.tensors.values()), 2e-6)
    for name, want in problem.gradients(problem.incoming(y)).items():
        oracle.assert_close(gradients[name], want.value, 2e-6)


@pytest.mark.parametrize("weights_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_routing_weights_of_any_floating_dtype(kernel, device, dtype, weights_dtype):
    """Used as float32, whatever the operands are; the gradient comes back in the weights' own dtype."""
    inputs = oracle.make(40, 64, 72, 5, 3, dtype, device)
    weights = inputs.weights.to(weights_dtype).float()
    exact = problems.build("moe", inputs._replace(weights=weights))
    given = problems.build("moe", inputs._replace(weights=weights.to(weights_dtype)))
    y, gradients = problems.run(kernel, given)
    same, expected = problems.run(kernel, exact)
    assert torch.equal(y, same) or inputs.ids.shape[1] > 2
    oracle.assert_close(y, same.double(), 1e-6)
    assert gradients["weights"].dtype == weights_dtype
    limit = 1e-6 + (torch.finfo(weights_dtype).eps / 2 if weights_dtype.itemsize == 2 else 0)
    oracle.assert_close(gradients["weights"], expected["weights"].double(), limit)


def test_without_gradients(kernel, device):
    problem = problems.make("moe", 20, 32, 24, 4, 2, device=device)
    want = problem.call(kernel, **problem.tensors)
    assert not want.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = problem.call(kernel, **problem.leaves())
        assert not y.requires_grad and torch.equal(y, want)


def test_saves_no_activation(kernel, device):
    """Backward keeps x, W, the weights and the routing; nothing else of T or S rows."""
    problem = problems.make("moe", 96, 64, 80, 4, 2, torch.bfloat16, device)
    leaves, saved = problem.leaves(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        problem.call(kernel, **leaves)
    allowed = {leaf.data_ptr() for leaf in leaves.values()}
    S, E = 96 * 2, 4
    assert sum(t.numel() for t in saved if t.data_ptr() not in allowed) <= 2 * S + E


@pytest.mark.gpu
def test_allocates_no_rows(kernel):
    """The forward allocates its result and O(S + E) words, far less than S rows."""
    T, K, N, E, k = 8192, 1024, 1024, 16, 4
    half = torch.bfloat16
    for dtype, out_dtype in ((torch.float32, torch.float32), (half, torch.float32), (half, half)):
        x, W, ids, weights = oracle.make(T, K, N, E, k, dtype, "cuda")
        peak = problems.peak_memory(partial(kernel.moe, x, W, ids, weights, out_dtype=out_dtype))
        results = T * N * (4 if out_dtype == torch.float32 else 6)
        assert peak <= results + 128 * (T * k + E) + 2**20, (dtype, peak - results)


def test_float32_stays_exact_while_another_thread_leaves():
    """The setting is the process's: the last call that needs it gives it back, not the first that ends."""
    reference, matmul = load_part("reference"), torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        first, second = reference._ieee_float32(), reference._ieee_float32()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert matmul.fp32_precision == "ieee"
        second.__exit__(None, None, None)
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = before
