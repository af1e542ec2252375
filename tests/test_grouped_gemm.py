"""grouped_gemm: rows that are grouped already."""

import oracle
import problems
import pytest
import torch

SIZES = [
    (20, 0, 50, 30),  # an empty group between
    (0, 3, 100),  # first
    (64, 64, 0, 0),  # last
    (0, 0, 0),
    (100,),
    (1, 1, 1, 1, 1),
    (127, 128, 129, 1, 0, 255),  # around the height of a tile
]


def make(sizes, spare, K, N, dtype, device, seed=0):
    """Rows for `sizes`, `spare` more that belong to no group, and group sizes in int64."""
    sizes = torch.tensor(sizes, device=device)
    a, W, *_ = oracle.make(int(sizes.sum()) + spare, K, N, len(sizes), 1, dtype, device, seed=seed)
    return a, W, sizes


def problem_of(a, W, sizes):
    rows = oracle.row_experts(sizes, len(a)).to(a.device)
    return problems.Problem(
        {"a": a, "W": W},
        lambda kernel, a, W: kernel.grouped_gemm(a, W, sizes),
        lambda a, W: oracle.grouped_gemm(a, W, sizes),
        {"y": rows, "a": rows},
        a.dtype,
    )


@pytest.mark.kernels_ci
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_the_oracle(kernel, setting, sizes):
    problem = problem_of(*make(sizes, 0, 72, 136, setting.dtype, setting.device))
    assert problems.check(kernel, problem).dtype == setting.dtype


def test_rows_past_the_last_group_are_zero(kernel, setting):
    """In the result and in the gradient, whatever stands in those rows and in their incoming gradient."""
    a, W, sizes = make((30, 0, 45), 50, 64, 72, setting.dtype, setting.device)
    a[75:] = float("nan")
    problem = problem_of(a, W, sizes)
    y = problem.call(kernel, **problem.leaves())
    dy = problem.incoming(y)
    dy[75:] = float("nan")
    y = problems.check(kernel, problem, dy)
    assert (y[75:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_group_sizes_of_any_integer_dtype(kernel, device, dtype):
    """Their sum does not fit the narrow dtypes: it is taken in int64."""
    a, W, sizes = make((100, 120, 0, 110), 6, 40, 24, torch.float32, device)
    want = oracle.grouped_gemm(a, W, sizes)
    oracle.assert_close(kernel.grouped_gemm(a, W, sizes.to(dtype)), want, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes",
    [
        (-5, 20, 30),
        (20, -1, 30),
        (200, 1, 1),
        (10, 10, 200),
        (2**40, 1, 1),
        (-(2**40), 50, 50),
        (2**31 - 1,) * 3,
        (2**62,) * 3,
    ],
    ids=str,
)
def test_wrong_group_sizes_fault_nothing(kernel, sizes):
    """Values on a GPU are not read, so wrong ones may give wrong numbers: but only inside the result, and finite."""
    a, W, _ = make((20, 20, 20), 4, 64, 72, torch.bfloat16, "cuda")
    y = kernel.grouped_gemm(a.requires_grad_(), W.requires_grad_(), torch.tensor(sizes, device="cuda"))
    y.sum().backward()
    assert y.shape == (64, 72)
    for t in (y, a.grad, W.grad):
        assert t.isfinite().all()


def test_agrees_with_torch(kernel, device):
    """torch's own grouped product of the same bfloat16 operands, rounded to bfloat16 as well."""
    a, W, sizes = make((64, 0, 160, 32), 0, 128, 256, torch.bfloat16, device)
    offs = sizes.cumsum(0, dtype=torch.int32)
    want = torch._grouped_mm(a, W.transpose(1, 2), offs).double()
    got = kernel.grouped_gemm(a, W, sizes).double()
    assert (got - want).norm() <= 1e-4 * want.norm()
