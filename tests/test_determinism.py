"""The same bits in each run, and the same bits fused and unfused."""

import contextlib
from typing import NamedTuple

import oracle
import problems
import pytest
import torch

REPEATS = {"cpu": 3, "cuda": 20}
SHAPES = {"cpu": (200, 72, 136, 8), "cuda": (4096, 512, 520, 32)}  # T, K, N, E


def same(one, other):
    """Result and gradients of two runs, bit for bit."""
    assert torch.equal(one[0], other[0]), "the results differ"
    for name in one[1]:
        assert torch.equal(one[1][name], other[1][name]), f"the gradients of {name} differ"


@pytest.mark.parametrize("distribution", ["uniform", "skewed", "single"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", problems.FUNCTIONS)
def test_up_to_two_experts_a_token(kernel, device, function, dtype, distribution):
    """By default, for the result and for every gradient; in "single" one expert's long sum may be split."""
    for k in (1, 2):
        problem = problems.make(function, *SHAPES[device], k, dtype, device, distribution)
        first = problems.run(kernel, problem)
        for _ in range(REPEATS[device]):
            same(problems.run(kernel, problem), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", problems.FUNCTIONS)
def test_more_experts_a_token(kernel, device, function, dtype):
    """Under torch.use_deterministic_algorithms, which must raise nothing either, whether or not memory is filled."""
    problem = problems.make(function, *SHAPES[device], 8, dtype, device)
    with problems.deterministic():
        first = problems.run(kernel, problem)
    for fill in (True, False):
        with problems.deterministic(fill):
            for _ in range(10):
                same(problems.run(kernel, problem), first)
    y, gradients = problems.run(kernel, problem)
    oracle.assert_close(y, first[0].double(), oracle.tolerance(dtype, y.dtype))
    for name, gradient in gradients.items():
        oracle.assert_close(gradient, first[1][name].double(), oracle.tolerance(dtype, gradient.dtype))


@pytest.mark.parametrize("function", problems.FUNCTIONS)
def test_the_flag_changes_nothing_up_to_two(kernel, device, function):
    problem = problems.make(function, *SHAPES[device], 2, torch.float32, device)
    want = problems.run(kernel, problem)
    with problems.deterministic():
        same(problems.run(kernel, problem), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [1, 2, 8])
def test_order_of_tokens_does_not_matter(kernel, device, k, dtype):
    """A token's bits do not depend on where in the batch it stands."""
    T, K, N, E = SHAPES[device]
    x, W, ids, weights = oracle.make(T, K, N, E, k, dtype, device)
    shuffle = torch.randperm(T, device=device)
    with problems.deterministic():
        want = kernel.moe(x, W, ids, weights)
        got = kernel.moe(x[shuffle], W, ids[shuffle], weights[shuffle])
    assert torch.equal(got, want[shuffle])


class Kind(NamedTuple):
    """A device, or the tiles of a kernel path that are forced on a GPU; few rows take those of 8 and 32 rows."""

    dtype: torch.dtype
    path: str | None = None
    rows: int = 128

    def __str__(self):
        return f"{self.path}-{self.rows}" if self.path else "cpu"


KINDS = [
    Kind(torch.float32, "fp32"),
    Kind(torch.float32, "fp32", 32),
    Kind(torch.bfloat16, "mma"),
    Kind(torch.bfloat16, "mma", 32),
    Kind(torch.bfloat16, "mma", 8),
    Kind(torch.bfloat16, "wgmma"),
]


def bits(t):
    """As integers, of which no two are equal as 0 and -0 are."""
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])


def in_any_order(function, name):
    """Whether more than two experts a token are added as they come, unless the flag is set."""
    return function.split("+")[0] in {
        "result": ("moe", "moe_mlp", "gemm_combine"),
        "x": ("moe", "moe_mlp", "gather_gemm"),
    }.get(name, ())


@pytest.mark.parametrize("k, flag", [(2, False), (8, False), (8, True)], ids=["two", "eight", "eight-deterministic"])
@pytest.mark.parametrize(
    "kind", [Kind(torch.float32), *(pytest.param(k, marks=pytest.mark.gpu) for k in KINDS)], ids=str
)
@pytest.mark.parametrize("function", problems.FUNCTIONS)
def test_calls_behind_each_other(kernel, hooks, function, kind, k, flag):
    """500 on a GPU, which run as they are launched: nobody waits, and the host reads one answer at the end.

    Each call is made without gradients too, for which an MLP takes other launches.
    """
    device, calls = ("cuda", 500) if kind.path else ("cpu", 10)
    shape = SHAPES[device] if kind.rows == 128 else (16, *SHAPES[device][1:])
    problem = problems.make(function, *shape, k, kind.dtype, device)
    with contextlib.ExitStack() as stack:
        if kind.path:
            tiles = [c.name for c in hooks.configs_here() if (c.path, c.tile_m) == (kind.path, kind.rows)]
            if not tiles:
                pytest.skip(f"this GPU has no {kind.path} tiles of {kind.rows} rows")
            stack.enter_context(hooks.forced(*tiles))
        if flag:
            stack.enter_context(problems.deterministic(fill=False))
        dy = problem.incoming(problem.call(kernel, **problem.tensors))

        def call():
            y, gradients = problems.run(kernel, problem, dy)
            results = {"result": torch.stack((y, problem.call(kernel, **problem.tensors))), **gradients}
            return {n: bits(t) for n, t in results.items() if flag or k <= 2 or not in_any_order(function, n)}

        first = call()
        same = {name: torch.ones((), dtype=torch.bool, device=device) for name in first}
        with problems.no_waiting() if device == "cuda" else contextlib.nullcontext():
            for _ in range(calls):
                for name, found in call().items():
                    same[name] &= (found == first[name]).all()
    assert all(torch.stack(list(same.values())).tolist()), same


def unfused(kernel, x, W, ids, weights):
    """Gather, grouped_gemm, weight, and a sum over the experts of a token in slot order, each in torch."""
    order, expert = oracle.expert_order(ids, len(W))
    sizes = torch.bincount(expert, minlength=len(W) + 1)[: len(W)]
    rows = kernel.grouped_gemm(x[order // ids.shape[1]], W, sizes)
    rows = rows[order.argsort()].view(*ids.shape, -1)
    weighted = torch.where(oracle.is_live(ids, len(W)), weights, 0)[..., None] * rows
    y = torch.zeros_like(weighted[:, 0])
    for slot in weighted.unbind(1):
        y = y + slot
    return y


@pytest.mark.kernels_ci
@pytest.mark.parametrize("distribution", ["uniform", "repeated", "skipped", "empty_middle"])
@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_fused_equals_unfused(kernel, device, k, distribution):
    """In float32 the fusion changes no bit."""
    for T, K, N, E in ((150, 136, 72, 9), (33, 65, 7, 9), SHAPES[device]):
        inputs = oracle.make(T, K, N, E, k, torch.float32, device, distribution)
        want = unfused(kernel, *inputs)
        if k > 2:
            with problems.deterministic():
                got = kernel.moe(*inputs)
        else:
            got = kernel.moe(*inputs)
        assert torch.equal(got, want)


@pytest.mark.parametrize("function", problems.FUNCTIONS)
def test_memory_of_the_operands_does_not_matter(kernel, function):
    """On a CPU the bits of a float32 product depend on where its operands begin: not so for what is made of them."""
    problem = problems.make(function, 33, 65, 7, 9, 2)
    want = problems.run(kernel, problem)
    for shift in range(1, 4):
        shifted = {name: problems.misaligned(t, shift) for name, t in problem.tensors.items()}
        same(problems.run(kernel, problem._replace(tensors=shifted)), want)


@pytest.mark.parametrize("k", [1, 2])
def test_fused_gradients_equal_unfused(kernel, device, k):
    """The gradients to tokens and weights through the unfused path are the fused ones."""
    x, W, ids, weights = oracle.make(150, 136, 72, 9, k, torch.float32, device)
    dy = torch.randn(150, 72, device=device)
    fused = [t.clone().requires_grad_() for t in (x, W, weights)]
    got = torch.autograd.grad(kernel.moe(fused[0], fused[1], ids, fused[2]), fused, dy)
    parts = [t.clone().requires_grad_() for t in (x, W, weights)]
    want = torch.autograd.grad(unfused(kernel, parts[0], parts[1], ids, parts[2]), parts, dy)
    for g, w in zip(got, want, strict=True):
        oracle.assert_close(g, w.double(), 1e-5)


@pytest.mark.parametrize("function", ["moe", "gemm_combine"])
def test_rows_are_stored_for_no_other_reason(kernel, ops, function):
    """Only the deterministic sum of more than two rows a token goes through memory."""
    for k, flag, stored in ((2, False, False), (2, True, False), (3, False, False), (3, True, True)):
        problem = problems.make(function, 20, 16, 24, 5, k)
        with problems.deterministic() if flag else contextlib.nullcontext(), problems.Calls(ops) as calls:
            problem.call(kernel, **problem.tensors)
        assert calls.names() == ["route", *(["gemm", "sum_rows"] if stored else ["gemm_combine"])], (k, flag)
