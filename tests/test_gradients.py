"""Gradients beyond their values, which every core test checks: gradcheck, subsets, incoming layouts, second order."""

import itertools

import oracle
import problems
import pytest
import torch

FUNCTIONS = problems.FUNCTIONS


@pytest.mark.kernels_ci
@pytest.mark.parametrize("distribution", ["uniform", "repeated", "skipped", "all_skipped", "empty_middle"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradcheck(kernel, function, distribution):
    problem = problems.make(function, 5, 4, 3, 4, 3, torch.float64, "cpu", distribution)
    names, leaves = zip(*problem.leaves().items(), strict=True)
    assert torch.autograd.gradcheck(
        lambda *tensors: problem.call(kernel, **dict(zip(names, tensors, strict=True))), leaves, fast_mode=False
    )


@pytest.mark.parametrize("function", problems.LINEAR)
def test_finite_differences(kernel, device, function):
    """These functions are linear in each tensor, so a central difference of any width is exact but for rounding."""
    problem = problems.make(function, 60, 72, 40, 5, 2, torch.float32, device, "skipped")
    y, gradients = problems.run(kernel, problem)
    dy = problem.incoming(y).double()
    generator = torch.Generator(device).manual_seed(2)
    for name, tensor in problem.tensors.items():
        slopes, products = [], []
        for _ in range(8):
            step = torch.randn(tensor.shape, generator=generator, device=device)
            ahead, behind = (
                problem.call(kernel, **problem.tensors | {name: tensor + sign * step}).double() for sign in (1, -1)
            )
            slopes.append(((ahead - behind) * dy).sum() / 2)
            products.append((gradients[name].double() * step).sum())
        oracle.assert_close(torch.stack(products)[:, None], torch.stack(slopes)[:, None], 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_subset_of_gradients(kernel, device, function, dtype):
    """What is asked for does not depend on what else is asked for, and the rest is None."""
    problem = problems.make(function, 30, 40, 24, 4, 2, dtype, device, "skipped")
    y, full = problems.run(kernel, problem)
    dy = problem.incoming(y)
    for size in range(len(problem.tensors)):
        for names in itertools.combinations(problem.tensors, size):
            leaves = problem.leaves(names)
            out = problem.call(kernel, **leaves)
            assert out.requires_grad == bool(names)
            if names:
                out.backward(dy)
            for name, leaf in leaves.items():
                if name in names:
                    assert torch.equal(leaf.grad, full[name]), (names, name)
                else:
                    assert leaf.grad is None, (names, name)


@pytest.mark.parametrize(
    "function, only, expected",
    [
        ("moe", ("x",), ["gemm_combine"]),
        ("moe", ("weights",), ["gemm"]),
        ("moe", ("W",), ["weight_grad"]),
        ("moe", ("x", "weights"), ["gemm_combine"]),
        ("moe", ("x", "W", "weights"), ["gemm_combine", "weight_grad"]),
        ("gather_gemm", ("x",), ["gemm_combine"]),
        ("gather_gemm", ("W",), ["weight_grad"]),
        ("gemm_combine", ("h",), ["gemm"]),
        ("gemm_combine", ("W",), ["weight_grad"]),
        ("gemm_combine", ("weights",), ["gemm"]),
        ("gemm_combine", ("h", "W", "weights"), ["gemm", "weight_grad"]),
        ("gather_gemm+activation", ("x",), ["gemm_combine"]),
        ("gather_gemm+activation", ("W",), ["weight_grad"]),
        ("moe_mlp", ("x",), ["gemm_activation_grad", "gemm_combine"]),
        ("moe_mlp", ("w_up",), ["gemm_activation_grad", "weight_grad"]),
        ("moe_mlp", ("w_down",), ["gemm_activation_grad", "weight_grad"]),
        ("moe_mlp", ("weights",), ["gemm_activation_grad"]),
        ("moe_mlp+bias_up", ("bias_up",), ["gemm_activation_grad", "weight_grad"]),
        ("moe_mlp+bias_down", ("bias_down",), ["weight_grad"]),
        ("moe_mlp+bias_down", ("weights",), ["gemm", "gemm_activation_grad"]),
        (
            "moe_mlp",
            ("x", "w_up", "w_down", "weights"),
            ["gemm_activation_grad", "gemm_combine", "weight_grad", "weight_grad"],
        ),
        ("grouped_gemm", ("a",), ["gemm"]),
        ("grouped_gemm", ("W",), ["weight_grad"]),
        ("grouped_mm", ("a",), ["gemm"]),
        ("grouped_mm", ("W",), ["weight_grad"]),
    ],
    ids=str,
)
def test_backward_does_only_what_is_asked(kernel, ops, function, only, expected):
    """One product for the rows' and the routing weights' gradients together and one for each W."""
    problem = problems.make(function, 20, 16, 24, 4, 2)
    y = problem.call(kernel, **problem.leaves(only))
    with problems.Calls(ops) as calls:
        y.backward(problem.incoming(y))
    assert sorted(calls.names()) == expected


@pytest.mark.parametrize("function", ["moe", "gemm_combine"])
def test_routing_weights_alone_store_no_product(kernel, ops, function):
    problem = problems.make(function, 20, 16, 24, 4, 2)
    y = problem.call(kernel, **problem.leaves(("weights",)))
    with problems.Calls(ops) as calls:
        y.sum().backward()
    ((_, arguments),) = calls.calls
    assert arguments["out"] is None


@pytest.mark.parametrize("function", problems.LINEAR)
def test_rows_are_kept_for_the_weights_alone(kernel, function):
    """Where neither W nor routing weights, which are dotted with the rows, are to have a gradient, the rows may go."""
    problem = problems.make(function, 20, 16, 24, 4, 2)
    rows, saved = next(iter(problem.tensors)), []

    def keep(t):
        saved.append(t.data_ptr())
        return t

    for asked, kept in ((rows, False), ("W", True)):
        leaves = problem.leaves((asked,))
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            problem.call(kernel, **leaves)
        assert saved and (leaves[rows].data_ptr() in saved) == kept


@pytest.mark.gpu
@pytest.mark.parametrize(
    "function, only",
    [
        ("moe", "x"),
        ("moe", "weights"),
        ("grouped_gemm", "a"),
        ("grouped_mm", "a"),
        ("gather_gemm", "x"),
        ("gemm_combine", "h"),
        ("gemm_combine", "weights"),
    ],
)
def test_frozen_weights_cost_no_memory(kernel, function, only):
    problem = problems.make(function, 64, 1024, 1024, 64, 2, torch.bfloat16, "cuda")
    y = problem.call(kernel, **problem.leaves((only,)))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < problem.tensors["W"].nbytes / 50


INCOMING = {
    "transposed": lambda dy: dy.T.contiguous().T,
    "sliced": lambda dy: torch.cat([dy, dy], 1)[:, : dy.shape[1]],
    "every other column": lambda dy: dy.repeat_interleave(2, 1)[:, ::2],
    "misaligned": problems.misaligned,
    "one number": lambda dy: dy[:1, :1].expand_as(dy),
    "one row": lambda dy: dy[:1].expand_as(dy),
    "one column": lambda dy: dy[:, :1].expand_as(dy),
    "zero": lambda dy: torch.zeros_like(dy),
}


@pytest.mark.parametrize("layout", INCOMING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_incoming_gradient_of_any_layout(kernel, device, function, dtype, layout):
    """The contiguous answer: sum() and mean() send stride 0, chunk() sends slices.

    To the same bits too, but for a misaligned gradient, which may be read by another kernel.
    """
    problem = problems.make(function, 30, 40, 24, 4, 2, dtype, device)
    y = problem.call(kernel, **problem.tensors)
    dy = INCOMING[layout](problem.incoming(y))
    assert dy.shape == y.shape
    _, got = problems.run(kernel, problem, dy)
    problem.check_gradients(got, dy)
    if layout != "misaligned":
        _, want = problems.run(kernel, problem, dy.clone(memory_format=torch.contiguous_format))
        for name in got:
            assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("function", FUNCTIONS)
def test_sum_and_mean(kernel, device, function):
    problem = problems.make(function, 30, 40, 24, 4, 2, torch.float32, device)
    y, want = problems.run(kernel, problem, torch.ones_like(problem.call(kernel, **problem.tensors)))
    for reduce, factor in ((torch.sum, 1), (torch.mean, y.numel())):
        leaves = problem.leaves()
        reduce(problem.call(kernel, **leaves)).backward()
        for name, leaf in leaves.items():
            oracle.assert_close(leaf.grad * factor, want[name].double(), 1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_wide_incoming_gradient_is_rounded_once(kernel, device, function):
    """A float32 gradient of a float32 result of bfloat16 operands: the same as its bfloat16 rounding."""
    problem = problems.make(function, 30, 40, 24, 4, 2, torch.bfloat16, device)
    options = problems.with_out_dtype(function, torch.bfloat16, torch.float32)
    y = problem.call(kernel, **problem.tensors, **options)
    dy = torch.randn(y.shape, device=device).to(y.dtype)
    _, got = problems.run(kernel, problem, dy, **options)
    _, want = problems.run(kernel, problem, dy.bfloat16().to(y.dtype), **options)
    for name in got:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if f != "grouped_mm"])  # whose rule is torch's
def test_weight_gradient_has_the_layout_of_the_weight(kernel, device, function):
    """A dense transposed view gets a gradient with its strides, any other weight a contiguous one."""
    problem = problems.make(function, 30, 40, 24, 4, 2, torch.float32, device)
    _, want = problems.run(kernel, problem)
    for name, W in problem.tensors.items():
        if W.dim() != 3:
            continue
        _, rows, columns = W.shape
        layouts = {
            "contiguous": (W, W.stride()),
            "transposed": (W.transpose(1, 2).contiguous().transpose(1, 2), (rows * columns, 1, rows)),
            "sliced": (torch.cat([W, W], 2)[:, :, :columns], W.stride()),
        }
        for layout, (weight, strides) in layouts.items():
            _, got = problems.run(kernel, problem._replace(tensors=problem.tensors | {name: weight}))
            assert got[name].stride() == strides, (name, layout)
            oracle.assert_close(got[name], want[name].double(), 1e-6)


def test_weight_gradient_is_there_when_nothing_is_routed(kernel, device):
    for T, distribution in ((0, "uniform"), (6, "all_skipped")):
        for function in FUNCTIONS:
            problem = problems.make(function, T, 16, 24, 4, 2, torch.float32, device, distribution)
            _, found = problems.run(kernel, problem)
            for name, gradient in found.items():
                assert gradient.shape == problem.tensors[name].shape and (gradient == 0).all(), (function, name)


def test_zero_routing_weight_of_a_live_slot_has_a_gradient(kernel, device):
    """Skipped slots get exactly 0, also when their weight is junk; a live slot with weight 0 gets its slope."""
    x, W, ids, weights = oracle.make(30, 32, 16, 4, 3, device=device)
    ids[:, 2] = 4
    weights[:, 1] = 0
    weights[:, 2] = float("nan")
    weights.requires_grad_()
    y = kernel.moe(x, W, ids, weights)
    y.sum().backward()
    assert y.isfinite().all()
    assert (weights.grad[:, 2] == 0).all() and (weights.grad[:, :2] != 0).all()


def test_gradients_accumulate_over_uses(kernel, device):
    """One weight used by two calls, one input used twice, and a second backward through a kept graph."""
    x, W, ids, weights = oracle.make(30, 24, 24, 4, 2, device=device)
    x, W, weights = (t.requires_grad_() for t in (x, W, weights))
    y = kernel.moe(kernel.moe(x, W, ids, weights), W, ids.flip(0), weights)
    dy = torch.randn_like(y)
    first = torch.autograd.grad(y, (x, W, weights), dy, retain_graph=True)
    again = torch.autograd.grad(y, (x, W, weights), dy)

    def twice(x, W, weights):
        return oracle.moe(oracle.moe(x, W, ids, weights), W, ids.flip(0), weights)

    for a, b, want in zip(first, again, oracle.gradients(twice, (x, W, weights), dy), strict=True):
        assert torch.equal(a, b)
        oracle.assert_close(a, want, 1e-5)


@pytest.mark.parametrize("name", ["x", "W", "weights"])
def test_changed_input_is_noticed(kernel, device, name):
    """An operand that is changed in place between forward and backward is an error, not a wrong gradient."""
    problem = problems.make("moe", 10, 16, 24, 4, 2, torch.float32, device)
    leaves = problem.leaves()
    y = problem.call(kernel, **leaves)
    with torch.no_grad():
        leaves[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_double_backward_is_right_or_raises(kernel, device, function):
    """Every path by which a first gradient depends on a tensor or on dy, each alone: never silently wrong."""
    problem = problems.make(function, 6, 8, 5, 3, 2, torch.float32, device)
    names = list(problem.tensors)

    def second(call, tensors, dy, first, then):
        """d/d(then) of the squared gradient to `first`; None where it does not depend on it."""
        given = tensors | {"dy": dy}
        given = {n: t.detach().requires_grad_(n in (first, then)) for n, t in given.items()}
        y = call(**{n: given[n] for n in names})
        (gradient,) = torch.autograd.grad(y, given[first], given["dy"].to(y.dtype), create_graph=True)
        if not gradient.requires_grad:
            return None
        return torch.autograd.grad(gradient.square().sum(), given[then], allow_unused=True)[0]

    dy = problem.incoming(problem.call(kernel, **problem.tensors))
    exact = {n: t.double() for n, t in problem.tensors.items()}
    for first, then in itertools.product(names, [*names, "dy"]):
        want = second(lambda **t: problem.want(*t.values()), exact, dy.double(), first, then)
        try:
            got = second(lambda **t: problem.call(kernel, **t), problem.tensors, dy, first, then)
        except RuntimeError as error:
            assert "second derivative" in str(error), error
            continue
        if want is None or not want.any():
            assert got is None or not got.any(), (first, then)
        else:
            assert got is not None, f"the gradient to {first} lost its dependence on {then}"
            oracle.assert_close(got, want, 1e-4)
