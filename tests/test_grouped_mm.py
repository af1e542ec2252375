"""grouped_mm: every form, layout and dtype, its gradients and theirs, against a float64 loop over the groups.

The tests of every function, which loop over problems.FUNCTIONS, have its form for rows and matrices too.
"""

import itertools

import oracle
import problems
import pytest
import torch
from forms import ENDS, FORMS, RAGGED, check, incoming, laid_out, loop, offsets, operands

# Values


@pytest.fixture
def in_place_of_torchs(kernel, monkeypatch):
    """grouped_mm under torch's names, as a user would assign it."""
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", kernel.grouped_mm)
    monkeypatch.setattr(torch, "_grouped_mm", kernel.grouped_mm)


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("columns", list(itertools.product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_and_layout(in_place_of_torchs, setting, form, columns, strided):
    """The matrix of torch's own tests, with its call."""
    for ends in ENDS if form != "3d x 3d" else ENDS[:1]:
        leaves = operands(form, columns, strided, setting.dtype, setting.device)
        check(torch.nn.functional.grouped_mm, form, ends, leaves, out_dtype=setting.dtype)


@pytest.mark.parametrize("form", FORMS)
def test_called_as_the_operator(in_place_of_torchs, place, form):
    """torch._grouped_mm takes all of its arguments by position."""
    a, b = operands(form, dtype=place.dtype, device=place.device)
    y = torch._grouped_mm(a, b, offsets(form, ENDS[1], place.device), None, place.dtype)
    oracle.assert_close(y, loop(a.double(), b.double(), ENDS[1]), oracle.tolerance(place.dtype, place.dtype))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_equals_torchs(kernel, form, dtype):
    """torch's function on a CPU: the same values, dtypes and strides of gradients in each layout that it takes."""
    for columns, strided in itertools.product(itertools.product([False, True], repeat=2), [False, True]):
        leaves = operands(form, columns, strided, dtype)
        offs = offsets(form, ENDS[0])
        want = torch.nn.functional.grouped_mm(*leaves, offs=offs)
        d = incoming(want, dtype)
        y = kernel.grouped_mm(*leaves, offs=offs)
        rounding = 2 * oracle.tolerance(dtype, dtype)  # two results, each rounded
        pairs = [(y, want), *zip(*(torch.autograd.grad(out, leaves, d) for out in (y, want)), strict=True)]
        for got, right in pairs:
            assert (got.dtype, got.stride()) == (right.dtype, right.stride()), (columns, strided)
            oracle.assert_close(got, right.double(), rounding)


@pytest.mark.parametrize(
    "sizes", [{"S": 1}, {"M": 1}, {"N": 1}, {"K": 1}, {"S": 129, "M": 7, "N": 33, "K": 65}], ids=str
)
@pytest.mark.parametrize("form", FORMS)
def test_sizes(kernel, setting, form, sizes):
    """Single rows and columns, and none that is a multiple of 16 bytes, at any alignment."""
    S = sizes.get("S", 128)
    leaves = operands(form, dtype=setting.dtype, device=setting.device, **sizes)
    ends = [0, S // 3, S // 3, S - S // 4]
    check(kernel.grouped_mm, form, ends, leaves)
    shifted = [problems.misaligned(t.detach()).requires_grad_() for t in leaves]
    check(kernel.grouped_mm, form, ends, shifted)


@pytest.mark.parametrize("none", ["S", "M", "N", "K", "G"])
@pytest.mark.parametrize("form", FORMS)
def test_nothing_to_do(kernel, place, form, none):
    """A size of 0, be it of what is summed or of the result, or no group."""
    sizes = {"S": 12, "G": 3, "M": 16, "N": 32, "K": 64} | {none: 0}
    leaves = operands(form, dtype=place.dtype, device=place.device, **sizes)
    ends = [min(5, sizes["S"])] * sizes["G"]
    with problems.deterministic():  # what is not written is NaN
        y = kernel.grouped_mm(*leaves, offs=offsets(form, ends, place.device))
        gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
    result = {"2d x 3d": "SN", "3d x 3d": "GMN", "2d x 2d": "GMN", "3d x 2d": "MS"}[form]
    assert y.shape == tuple(sizes[letter] for letter in result)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    if none == "G":  # the loop needs a group
        assert not y.any() and not any(g.any() for g in gradients)
        return
    want = loop(*wide, ends)
    for got, right in zip(
        (y, *gradients), (want, *torch.autograd.grad(want, wide, torch.ones_like(want))), strict=True
    ):
        oracle.assert_close(got, right, oracle.tolerance(place.dtype, place.dtype))


@pytest.mark.parametrize("form", FORMS)
def test_wide_results(kernel, device, form):
    for dtype in (torch.bfloat16, torch.float16):
        leaves = operands(form, dtype=dtype, device=device)
        check(kernel.grouped_mm, form, ENDS[1], leaves, out_dtype=torch.float32)


@pytest.mark.parametrize("form", FORMS[:2])
def test_bias(kernel, setting, form):
    for ends in ENDS:
        a, b = operands(form, dtype=setting.dtype, device=setting.device)
        bias = laid_out((4, 32), True, True, setting.dtype, setting.device).requires_grad_()
        check(kernel.grouped_mm, form, ends, [a, b, bias])


@pytest.mark.parametrize("form", RAGGED)
def test_nothing_behind_the_end_counts(kernel, setting, form):
    """NaN there, in operands and in the incoming gradient; results and gradients are exactly 0 there."""
    end = ENDS[1][-1]
    leaves = operands(form, dtype=setting.dtype, device=setting.device)

    def behind(a, b, y):
        """What lies behind the end of an operand and, unless it is by group, of the result."""
        views = {"2d x 3d": (a, y), "2d x 2d": (a.mT, b), "3d x 2d": (b.mT, y.mT)}[form]
        return [view[end:] for view in views]

    with torch.no_grad():
        for rest in behind(*leaves, torch.empty(128, 128))[: 2 if form == "2d x 2d" else 1]:
            rest.fill_(float("nan"))
    with problems.deterministic():  # what is not written is NaN
        y = kernel.grouped_mm(*leaves, offs=offsets(form, ENDS[1], setting.device))
        d = torch.randn_like(y)
        if form != "2d x 2d":
            behind(*leaves, d)[1].fill_(float("nan"))
        gradients = torch.autograd.grad(y, leaves, d)
    assert y.isfinite().all() and all(g.isfinite().all() for g in gradients)
    assert all((rest == 0).all() for rest in behind(*gradients, y))


@pytest.mark.parametrize("form", FORMS)
def test_expanded_gradients(kernel, place, form):
    """Of sum() and the like, stride 0 in each dimension or in some."""
    leaves = operands(form, dtype=place.dtype, device=place.device)
    y = kernel.grouped_mm(*leaves, offs=offsets(form, ENDS[1], place.device)).detach()
    for d in (y.new_ones(()).expand_as(y), y[..., :1].expand_as(y), y[..., :1, :].expand_as(y)):
        check(kernel.grouped_mm, form, ENDS[1], leaves, d)


@pytest.mark.parametrize("form", FORMS)
def test_more_groups_than_torch_takes(kernel, place, form):
    sizes = torch.arange(1500) % 3
    ends = sizes.cumsum(0).tolist()
    leaves = operands(form, dtype=place.dtype, device=place.device, S=int(sizes.sum()) + 7, G=1500, M=5, N=8, K=8)
    check(kernel.grouped_mm, form, ends, leaves)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_offsets_of_any_integer_dtype_and_stride(kernel, ops, device, dtype):
    """The operators get them as they want them, int32 and contiguous."""
    a, b = operands("2d x 3d", device=device)
    ends = [0, 50, 50, 101]
    want = loop(a.double(), b.double(), ends)
    offs = offsets("2d x 3d", ends, device, dtype)
    for given in (offs, offs.repeat_interleave(2)[::2]):
        with problems.Calls(ops) as calls:
            oracle.assert_close(kernel.grouped_mm(a, b, offs=given), want, 1e-5)
        ((_, read),) = calls.calls
        assert read["offs"].dtype == torch.int32 and read["offs"].is_contiguous()


@pytest.mark.parametrize("ends", [[10, 5, 20, 40], [-1, 5, 10, 40], [10, 20, 30, 129], [2**32, 2**32, 2**32, 2**32]])
@pytest.mark.parametrize("form", RAGGED)
def test_wrong_offsets_on_the_cpu(kernel, form, ends):
    """They descend, are negative or pass the 128 rows, also when cut to 32 bits."""
    with pytest.raises(ValueError, match="offs.* 128 rows"):
        kernel.grouped_mm(*operands(form), offs=torch.tensor(ends))


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_matrices_are_read_in_place(kernel, ops, device, columns):
    """Those of the groups, by rows or by columns, are copied neither forward nor for the gradient of the rows."""
    a, b = operands("2d x 3d", (False, columns), device=device)
    with problems.Calls(ops) as calls:
        kernel.grouped_mm(a, b.detach(), offs=offsets("2d x 3d", ENDS[0], device)).sum().backward()
    assert [given["w"].data_ptr() for _, given in calls.calls] == 2 * [b.data_ptr()]


# Derivatives


def differentiable(kernel, form, with_bias):
    """A product in float64 as a function of its differentiable arguments, and these."""
    leaves = operands(form, dtype=torch.float64, S=10, G=3, M=2, N=3, K=4)
    if with_bias:
        leaves.append(torch.randn(3, 3, dtype=torch.float64, requires_grad=True))
    offs = offsets(form, [2, 2, 9])
    return lambda a, b, bias=None: kernel.grouped_mm(a, b, offs=offs, bias=bias), leaves


CASES = [*((form, False) for form in FORMS), *((form, True) for form in FORMS[:2])]
each_case = pytest.mark.parametrize("form, with_bias", CASES, ids=lambda v: v if isinstance(v, str) else "bias" * v)


@each_case
def test_derivatives_of_any_order(kernel, form, with_bias):
    """Backward and forward, and each of the two of the backward."""
    product, leaves = differentiable(kernel, form, with_bias)
    assert torch.autograd.gradcheck(product, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(product, leaves, check_fwd_over_rev=True)


@each_case
def test_transforms(kernel, form, with_bias):
    """torch.func's: each the same as without it."""
    product, leaves = differentiable(kernel, form, with_bias)
    leaves = [t.detach() for t in leaves]
    count = tuple(range(len(leaves)))

    def total(*leaves):
        return product(*leaves).square().sum()

    asked = [t.clone().requires_grad_() for t in leaves]
    want = torch.autograd.grad(total(*asked), asked)
    torch.testing.assert_close(torch.func.grad(total, count)(*leaves), want)

    tangents = tuple(torch.randn_like(t) for t in leaves)
    _, slope = torch.func.jvp(total, tuple(leaves), tangents)
    torch.testing.assert_close(slope, sum((g * t).sum() for g, t in zip(want, tangents, strict=True)))

    pairs = [torch.stack([t, 2 * t], -1) for t in leaves]
    batched = torch.func.vmap(product, -1)(*pairs)
    torch.testing.assert_close(batched, torch.stack([product(*leaves), product(*(2 * t for t in leaves))]))
    one = torch.func.vmap(product, (-1, *[None] * (len(leaves) - 1)))(pairs[0], *leaves[1:])
    torch.testing.assert_close(one[1], product(2 * leaves[0], *leaves[1:]))

    hessian = torch.func.hessian(total)(*leaves)
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(lambda a: total(a, *leaves[1:]), leaves[0]))


def test_batched_offsets(kernel):
    a, b = operands("2d x 3d")
    offs = torch.tensor([ENDS[0], ENDS[1]])
    got = torch.func.vmap(lambda offs: kernel.grouped_mm(a, b, offs=offs))(offs)
    assert torch.equal(got, torch.stack([kernel.grouped_mm(a, b, offs=o) for o in offs]))


def test_functionalize_is_refused(kernel):
    """By name, also around and inside of the other transforms: torch has no rule there for a Function's gradient."""
    (a, b), offs = operands("2d x 3d"), offsets("2d x 3d", ENDS[0])

    def total(a):
        return kernel.grouped_mm(a, b.detach(), offs=offs).sum()

    functionalize, grad, vmap = torch.func.functionalize, torch.func.grad, torch.func.vmap
    for call in (functionalize(total), functionalize(grad(total)), grad(functionalize(total))):
        with pytest.raises(NotImplementedError, match="grouped_mm must not .*functionalize"):
            call(a.detach())
    with pytest.raises(NotImplementedError, match="grouped_mm must not .*functionalize"):
        functionalize(vmap(total))(a.detach()[None])


# Compilers; test_cases.py has more of the form for rows and matrices


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("form", FORMS)
def test_compiled(kernel, device, dynamo, form, backend):
    """In one graph, forward and backward: the bits and strides of eager, in each dtype."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        leaves = operands(form, (False, True), dtype=dtype, device=device)
        offs = offsets(form, ENDS[1], device)
        compiled = torch.compile(lambda a, b, offs=offs: kernel.grouped_mm(a, b, offs), backend=backend, fullgraph=True)
        want, y = kernel.grouped_mm(*leaves, offs), compiled(*leaves)
        d = torch.randn_like(y)
        pairs = [(y, want), *zip(*(torch.autograd.grad(out, leaves, d) for out in (y, want)), strict=True)]
        for got, right in pairs:
            assert torch.equal(got, right) and got.stride() == right.stride()


@pytest.mark.parametrize("columns", [(False, False), (True, True)], ids=["rows", "columns"])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_autograd(kernel, device, dynamo, form, columns):
    """A step with its backward as a graph, and what the products save for it."""
    leaves = operands(form, columns, device=device)
    offs = offsets(form, ENDS[1], device)
    want = torch.autograd.grad(kernel.grouped_mm(*leaves, offs).square().sum(), leaves)
    with dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda a, b: kernel.grouped_mm(a, b, offs).square().sum().backward(), backend="aot_eager")(
            *leaves
        )
    for leaf, gradient in zip(leaves, want, strict=True):
        assert torch.equal(leaf.grad, gradient) and leaf.grad.stride() == gradient.stride()


@pytest.mark.parametrize("form", FORMS)
def test_changed_operands_are_noticed_in_a_graph(kernel, device, dynamo, form):
    """One that is changed in place before the backward is an error, unless the graph has kept a copy of it."""
    offs = offsets(form, ENDS[1], device)
    for changed in (0, 1):
        leaves = operands(form, device=device)
        want = torch.autograd.grad(kernel.grouped_mm(*leaves, offs).sum(), leaves)
        y = torch.compile(kernel.grouped_mm, backend="aot_eager")(*leaves, offs)
        with torch.no_grad():
            leaves[changed].mul_(2)
        try:
            y.sum().backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            continue
        assert all(torch.equal(leaf.grad, gradient) for leaf, gradient in zip(leaves, want, strict=True))


def test_many_matrices(kernel):
    """Fewer than 2**31 rows of the result: those of the matrices do not count."""
    a, b = torch.empty(5, 2**13, device="meta"), torch.empty(2**19, 2**13, 1, device="meta")
    assert kernel.grouped_mm(a, b, torch.empty(2**19, dtype=torch.int32, device="meta")).shape == (5, 1)


def test_vmap_in_a_graph_is_refused(kernel, dynamo):
    """The compiler takes no Function's rule for it; where it may break its graph, it is right."""
    a, b = operands("2d x 3d")
    offs = offsets("2d x 3d", ENDS[0])
    batched = torch.func.vmap(lambda a: kernel.grouped_mm(a, b, offs=offs))
    samples = torch.stack([a, 2 * a]).detach()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(batched, backend="aot_eager", fullgraph=True)(samples)
    assert torch.equal(torch.compile(batched, backend="aot_eager")(samples), batched(samples))


@pytest.mark.parametrize("form", FORMS)
def test_meta_tensors_tell_shape_strides_and_dtype(kernel, form):
    for dtype, columns in itertools.product((torch.float32, torch.bfloat16), ((False, False), (True, True))):
        leaves = operands(form, columns, dtype=dtype, S=33, M=3, N=7, K=5)
        offs = offsets(form, [3, 3, 9, 30])
        meta = [t.detach().to("meta").requires_grad_() for t in leaves]
        pairs = []
        for given, ends in ((leaves, offs), (meta, None if offs is None else offs.to("meta"))):
            y = kernel.grouped_mm(*given, offs=ends)
            pairs.append([y, *torch.autograd.grad(y, given, torch.ones_like(y))])
        for real, fake in zip(*pairs, strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


# GPU; test_cases.py has more of the form for rows and matrices


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_graph_replays_with_other_groups(kernel, form, dtype):
    """Forward and backward: the host waits for nothing, and each replay has the offsets and operands of its moment."""
    leaves = operands(form, dtype=dtype, device="cuda")
    offs = offsets(form, ENDS[0], "cuda", torch.int64)

    def step():
        y = kernel.grouped_mm(*leaves, offs=offs, out_dtype=torch.float32)
        return y, *torch.autograd.grad(y, leaves, torch.ones((), device="cuda").expand_as(y))

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), problems.no_waiting():
        captured = step()
    for ends in ENDS:
        with torch.no_grad():
            for leaf in leaves:
                leaf.normal_()
        if offs is not None:
            offs.copy_(torch.tensor(ends))
        graph.replay()
        assert all(map(torch.equal, captured, step())), ends


# Wrong arguments


RIGHT = {"mat_a": (8, 4), "mat_b": (2, 4, 3), "bias": (2, 3)}


def right(device):
    """Arguments of a right call."""
    a, b = torch.ones(8, 4, device=device), torch.ones(2, 4, 3, device=device)
    return {
        "mat_a": a,
        "mat_b": b,
        "offs": torch.tensor([3, 8], device=device),
        "bias": torch.ones(2, 3, device=device),
    }


def wrong_calls(device):
    """(what is given in place of the right arguments, what the message says)."""

    def ones(*shape, **options):
        return torch.ones(shape, device=device, **options)

    one = {"offs": torch.tensor([3], device=device), "bias": None}
    yield {"mat_a": ones(4)}, ("mat_a", "2 or 3 dimensions", "[4]")
    yield {"mat_b": ones(1, 2, 4, 3)}, ("mat_b", "2 or 3 dimensions", "[1, 2, 4, 3]")
    yield {"mat_b": ones(2, 4, 3, dtype=torch.bfloat16)}, ("mat_b", "torch.float32", "torch.bfloat16")
    for dtype in (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn):
        yield {"mat_a": ones(8, 4).to(dtype)}, ("mat_a", "torch.float32", str(dtype))
    yield {"mat_b": ones(2, 4, 3).to("meta")}, ("mat_b", device, "meta")
    yield {"mat_b": ones(2, 5, 3)}, ("mat_b", "4 rows", "[2, 5, 3]")
    yield {"mat_a": ones(3, 8, 4), "offs": None}, ("mat_b", "3 groups", "[2, 4, 3]")
    yield {"mat_a": ones(2, 8, 4)}, ("offs", "None", "given")
    yield {"offs": None}, ("offs", "2-D", "None")
    for dtype in (torch.float32, torch.bool, torch.uint32):
        yield {"offs": ones(2).to(dtype)}, ("offs", "integers", f"{dtype} [2]")
    yield {"offs": torch.tensor([[3, 8]], device=device)}, ("offs", "1-D", "[1, 2]")
    yield one, ("offs", "2 ends", "[1]")
    yield one | {"mat_a": ones(2, 3, 4), "mat_b": ones(4, 8)}, ("offs", "2 ends", "[1]")
    yield {"offs": torch.tensor([3, 8], device="meta")}, ("offs", device, "meta")
    yield {"bias": ones(3, 2)}, ("bias", "[2, 3]", "[3, 2]")
    yield {"bias": ones(3)}, ("bias", "[2, 3]", "[3]")
    yield {"bias": ones(2, 3).double()}, ("bias", "torch.float32", "torch.float64")
    yield {"bias": ones(2, 3).to("meta")}, ("bias", device, "meta")
    yield {"mat_b": ones(4, 8), "mat_a": ones(2, 3, 4)}, ("bias", "None where mat_b is 2-D", "[2, 3]")
    for dtype in (torch.bfloat16, torch.float64, "float32"):
        yield {"out_dtype": dtype}, ("out_dtype", "torch.float32", str(dtype))
    many = ones(1, 4).expand(2**31, 4)
    yield {"mat_a": many}, ("mat_a", "2**31", str([2**31, 4]))
    yield {"mat_a": ones(3, 4), "mat_b": many.T, "bias": None}, ("mat_b", "2**31", str([4, 2**31]))
    rows, matrices = ones(1, 1, 4).expand(2**16, 2**15, 4), ones(1, 4, 3).expand(2**16, 4, 3)
    both = {"mat_a": rows, "mat_b": matrices, "offs": None, "bias": None}
    yield both, ("mat_a", "2**31", str([2**16, 2**15, 4]))


def refused(kernel, ops, error, given, fragments):
    with problems.Calls(ops) as calls, pytest.raises(error) as caught:
        kernel.grouped_mm(**given)
    message = str(caught.value)
    assert calls.names() == [], "an operator ran before the call was refused"
    assert "\n" not in message and len(message) < 300, message
    assert all(fragment in message for fragment in fragments), (fragments, message)


def test_wrong_arguments_are_refused(kernel, ops, device):
    """By torch's kind of error, before anything runs."""
    kernel.grouped_mm(**right(device))
    for given, fragments in wrong_calls(device):
        refused(kernel, ops, RuntimeError, right(device) | given, fragments)


def test_what_torch_refuses_too(kernel):
    """Ranks, sizes and offsets that do not agree: the same kind of error from both."""
    arguments = right("cpu") | {"bias": None, "offs": torch.tensor([3, 8], dtype=torch.int32)}
    ones = torch.ones
    for wrong in (
        {"mat_a": ones(4)},
        {"mat_b": ones(2, 5, 3)},
        {"mat_a": ones(3, 8, 4), "offs": None},
        {"mat_a": ones(2, 8, 4)},
        {"offs": None},
        {"offs": torch.tensor([[3, 8]], dtype=torch.int32)},
        {"offs": torch.tensor([8], dtype=torch.int32)},
        {"offs": ones(2)},
        {"mat_a": ones(8, 4).int(), "mat_b": ones(2, 4, 3).int()},
        {"mat_b": ones(2, 4, 3).bfloat16()},
    ):
        for function in (torch.nn.functional.grouped_mm, kernel.grouped_mm):
            with pytest.raises(RuntimeError):
                function(**arguments | wrong)


@pytest.mark.parametrize("name", ["mat_a", "mat_b", "offs", "bias"])
def test_other_tensors_are_refused(kernel, ops, device, mesh, name):
    """A list, a sparse or nested tensor, one made of tensors, and a DTensor, which is told what to do."""
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.two_tensor import TwoTensor

    value = right("cpu")[name]
    for wrong, error, fragments in (
        (value.tolist(), TypeError, ("tensor", "list")),
        (value.to_sparse(), ValueError, ("strided", "sparse")),
        (torch.nested.nested_tensor([value, value]), ValueError, ("strided", "nested")),
        (TwoTensor(value, value.clone()), TypeError, ("plain tensor", "TwoTensor")),
        (DTensor.from_local(value, mesh), TypeError, ("DTensor", ".to_local()")),
    ):
        refused(kernel, ops, error, right("cpu") | {name: wrong}, (name, *fragments))
