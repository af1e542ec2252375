"""docs/compatibility.md against what the two functions do.

Each row is a behaviour, tried here with torch's function and with the package's: it is there ("yes"), it is not ("no":
a wrong or undefined result), or the call is refused. The tests that a row names show the behaviour at length; a row
without an attempt leaves it to them, because it is of the package alone or needs a GPU.
"""

import ast
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import oracle
import problems
import pytest
import torch
from conftest import load_kernel, mesh_of_one
from forms import ENDS, FORMS, check, loop, offsets, operands
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "compatibility.md"
TORCH = "2.13"  # whose column the table has
NARROW = (torch.bfloat16, torch.float16)


class Row(NamedTuple):
    behaviour: str
    attempt: Callable | None  # of the function; raises AssertionError where a result is wrong
    tests: tuple[str, ...]
    gpu: bool = False


ROWS = []


def row(behaviour, *tests):
    """The function below is the attempt."""
    return lambda attempt: ROWS.append(Row(behaviour, attempt, tests)) or attempt


def row_of_tests(behaviour, *tests, gpu=False):
    ROWS.append(Row(behaviour, None, tests, gpu))


def rows_by_matrices(**options):
    """Leaves of the first form, and its offsets, which leave no row behind them."""
    return operands("2d x 3d", **options), offsets("2d x 3d", ENDS[0])


def refuses(mm, a, b, offs, errors):
    try:
        mm(a, b, offs=offs)
    except errors:
        return
    raise AssertionError("nothing was raised")


# What it computes


@row("the four forms, forward and both gradients", "test_grouped_mm.py::test_every_form_and_layout")
def _(mm):
    for form in FORMS:
        check(mm, form, ENDS[0], operands(form))


@row("float32, bfloat16 and float16", "test_grouped_mm.py::test_every_form_and_layout")
def _(mm):
    for dtype in (torch.float32, *NARROW):
        check(mm, "2d x 3d", ENDS[0], operands("2d x 3d", dtype=dtype))


@row("float64, on a CPU", "test_grouped_mm.py::test_derivatives_of_any_order")
def _(mm):
    check(mm, "2d x 3d", ENDS[0], operands("2d x 3d", dtype=torch.float64))


@row("float32 results of bfloat16 and float16", "test_grouped_mm.py::test_wide_results")
def _(mm):
    for dtype in NARROW:
        check(mm, "2d x 3d", ENDS[0], operands("2d x 3d", dtype=dtype), out_dtype=torch.float32)


@row("a bias, with its gradient", "test_grouped_mm.py::test_bias")
def _(mm):
    check(mm, "2d x 3d", ENDS[0], [*operands("2d x 3d"), torch.randn(4, 32, requires_grad=True)])


@row("offs of int64", "test_grouped_mm.py::test_offsets_of_any_integer_dtype_and_stride")
def _(mm):
    a, b = operands("2d x 3d")
    mm(a, b, offs=offsets("2d x 3d", ENDS[0], dtype=torch.int64))


@row("operands in which no dimension is contiguous", "test_edges.py::test_layout_of_rows")
def _(mm):
    a, b = (t.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_() for t in operands("2d x 3d"))
    check(mm, "2d x 3d", ENDS[0], [a, b])


@row("contiguous results, whatever their size", "test_grouped_mm.py::test_sizes")
def _(mm):
    for form in FORMS:
        check(mm, form, [1, 1, 5, 9], operands(form, dtype=torch.bfloat16, S=9, M=7, N=33, K=5))


@row("more than 1024 groups", "test_grouped_mm.py::test_more_groups_than_torch_takes")
def _(mm):
    ends = [min(e, 64) for e in range(1500)]
    check(mm, "2d x 3d", ends, operands("2d x 3d", S=64, G=1500, N=8, K=8))


@row("empty groups, first, between others and last", "test_grouped_mm.py::test_every_form_and_layout")
def _(mm):
    for form, ends in itertools.product(("2d x 3d", "2d x 2d", "3d x 2d"), ([0, 9, 9, 128], [9, 9, 128, 128])):
        check(mm, form, ends, operands(form))


@row("no rows at all, whose weight gradient is 0", "test_grouped_mm.py::test_nothing_to_do")
def _(mm):
    check(mm, "2d x 3d", ENDS[-1], operands("2d x 3d", S=0))


@row("zeros behind the last offset, in results and gradients", "test_grouped_mm.py::test_nothing_behind_the_end_counts")
def _(mm):
    check(mm, "2d x 3d", ENDS[1], operands("2d x 3d"))


@row("`out.sum().backward()`", "test_grouped_mm.py::test_expanded_gradients")
def _(mm):
    leaves = operands("2d x 3d")
    check(mm, "2d x 3d", ENDS[0], leaves, torch.ones(()).expand(128, 32))


@row("gradients stored by columns where the operand is", "test_grouped_mm.py::test_equals_torchs")
def _(mm):
    for form, columns in itertools.product(FORMS, itertools.product([False, True], repeat=2)):
        leaves = operands(form, columns)
        _, gradients = check(mm, form, ENDS[0], leaves)
        assert all(g.stride() == t.stride() for g, t in zip(gradients, leaves, strict=True))


# Derivatives


@row("second derivatives", "test_grouped_mm.py::test_derivatives_of_any_order")
def _(mm):
    (a, b), offs = rows_by_matrices()

    def second(product, a, b):
        (da,) = torch.autograd.grad(product(a, b).square().sum(), a, create_graph=True)
        return torch.autograd.grad(da.square().sum(), b)[0]

    wide = [t.detach().double().requires_grad_() for t in (a, b)]
    want = second(lambda a, b: oracle.grouped_gemm(a, b.mT, offs.diff(prepend=offs.new_zeros(1))), *wide)
    oracle.assert_close(second(lambda a, b: mm(a, b, offs=offs), a, b), want, 1e-5)


@row("`torch.func.grad`", "test_grouped_mm.py::test_transforms")
def _(mm):
    (a, b), offs = rows_by_matrices()

    def total(a):
        return mm(a, b.detach(), offs=offs).square().sum()

    (want,) = torch.autograd.grad(total(a), a)
    torch.testing.assert_close(torch.func.grad(total)(a.detach()), want)


@row("`torch.func.vmap`", "test_grouped_mm.py::test_transforms", "test_grouped_mm.py::test_batched_offsets")
def _(mm):
    (a, b), offs = rows_by_matrices()
    with torch.no_grad():
        got = torch.func.vmap(lambda a: mm(a, b, offs=offs))(torch.stack([a, 2 * a]))
        torch.testing.assert_close(got[:, :101], torch.stack([mm(t, b, offs=offs) for t in (a, 2 * a)])[:, :101])


@row("forward-mode derivatives", "test_grouped_mm.py::test_derivatives_of_any_order")
def _(mm):
    (a, b), offs = rows_by_matrices()
    with torch.no_grad(), forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(mm(forward_ad.make_dual(a, a), b, offs=offs)).tangent
        torch.testing.assert_close(tangent, mm(a, b, offs=offs))


@row("batched gradients (`is_grads_batched`)", "test_cases.py::test_batched_gradients_are_refused")
def _(mm):
    (a, b), offs = rows_by_matrices()
    y = mm(a, b, offs=offs)
    torch.autograd.grad(y, a, torch.stack([y, y]).detach(), is_grads_batched=True)


def vectorized_jacobian(mm, strategy):
    (a, b), offs = (t.detach() for t in operands("2d x 3d", S=8)), offsets("2d x 3d", [2, 2, 5, 8])
    got = torch.autograd.functional.jacobian(lambda a: mm(a, b, offs=offs), a, vectorize=True, strategy=strategy)
    torch.testing.assert_close(got, torch.autograd.functional.jacobian(lambda a: loop(a, b, [2, 2, 5, 8]), a))


@row("`torch.autograd.functional.jacobian(vectorize=True)`", "test_cases.py::test_batched_gradients_are_refused")
def _(mm):
    vectorized_jacobian(mm, "reverse-mode")


@row("the same in forward mode", "test_cases.py::test_batched_gradients_are_refused")
def _(mm):
    vectorized_jacobian(mm, "forward-mode")


@row("`torch.func.jacrev`, for either", "test_grouped_mm.py::test_transforms")
def _(mm):
    (a, b), offs = (t.detach() for t in operands("2d x 3d", S=8)), offsets("2d x 3d", [2, 2, 5, 8])
    got = torch.func.jacrev(lambda a: mm(a, b, offs=offs))(a)
    torch.testing.assert_close(got, torch.autograd.functional.jacobian(lambda a: loop(a, b, [2, 2, 5, 8]), a))


@row("`torch.func.functionalize`", "test_grouped_mm.py::test_functionalize_is_refused")
def _(mm):
    (a, b), offs = rows_by_matrices()
    with torch.no_grad():
        torch.testing.assert_close(torch.func.functionalize(lambda a: mm(a, b, offs=offs))(a), mm(a, b, offs=offs))


# Compilers


def layer_of(mm):
    class Layer(torch.nn.Module):
        def forward(self, a, b, offs):
            return mm(a, b, offs=offs)

    return Layer()


def compiled_like_eager(mm, dtype):
    torch._dynamo.reset()
    leaves, offs = rows_by_matrices(dtype=dtype)
    d = torch.randn(128, 32).to(dtype)
    results = []
    for function in (mm, torch.compile(mm, backend="aot_eager", fullgraph=True)):
        y = function(*leaves, offs=offs)
        results.append([y, *torch.autograd.grad(y, leaves, d)])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@row(
    "`torch.compile(fullgraph=True)` in bfloat16",
    "test_grouped_mm.py::test_compiled",
    "test_cases.py::test_compiled_by_inductor",
)
def _(mm):
    compiled_like_eager(mm, torch.bfloat16)


@row("`torch.compile(fullgraph=True)` in float32", "test_grouped_mm.py::test_compiled")
def _(mm):
    compiled_like_eager(mm, torch.float32)


@row("two graphs for any number of rows, in bfloat16", "test_cases.py::test_one_graph_for_all_token_counts")
def _(mm):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mm, backend=counter, fullgraph=True)
    for S in (64, 72, 128, 96):
        a, b = operands("2d x 3d", dtype=torch.bfloat16, S=S)
        compiled(a, b, offs=torch.tensor([8, 8, 40, S], dtype=torch.int32)).square().sum().backward()
    assert counter.frame_count <= 2


@row(
    "compiled autograd, in bfloat16",
    "test_grouped_mm.py::test_compiled_autograd",
    "test_cases.py::test_compiled_autograd",
)
def _(mm):
    torch._dynamo.reset()
    leaves, offs = rows_by_matrices(dtype=torch.bfloat16)
    want = torch.autograd.grad(mm(*leaves, offs=offs).square().sum(), leaves)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda a, b: mm(a, b, offs=offs).square().sum().backward(), backend="aot_eager")(*leaves)
    for leaf, gradient in zip(leaves, want, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


@row(
    "torch.func's transforms inside of `torch.compile(fullgraph=True)`",
    "test_grouped_mm.py::test_vmap_in_a_graph_is_refused",
    "test_cases.py::test_compiled_transforms_are_right_or_refused",
)
def _(mm):
    torch._dynamo.reset()
    (a, b), offs = rows_by_matrices(dtype=torch.bfloat16)
    with torch.no_grad():
        batched = torch.compile(torch.func.vmap(lambda a: mm(a, b, offs=offs)), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(batched(torch.stack([a, a]))[1], mm(a, b, offs=offs))


@row("`torch.export` of bfloat16", "test_cases.py::test_export")
def _(mm):
    leaves, offs = rows_by_matrices(dtype=torch.bfloat16)
    with torch.no_grad():
        program = torch.export.export(layer_of(mm), (*leaves, offs))
        torch.testing.assert_close(program.module()(*leaves, offs), mm(*leaves, offs=offs))


@row("`torch.export` of any number of rows, without a bound", "test_cases.py::test_export")
def _(mm):
    leaves, offs = rows_by_matrices(dtype=torch.bfloat16)
    with torch.no_grad():
        program = torch.export.export(
            layer_of(mm), (*leaves, offs), dynamic_shapes=({0: torch.export.Dim("S")}, None, None), strict=True
        )
        other = operands("2d x 3d", dtype=torch.bfloat16, S=64)
        offs = torch.tensor([8, 8, 40, 64], dtype=torch.int32)
        torch.testing.assert_close(program.module()(*other, offs), mm(*other, offs=offs))


def traced_like_eager(call):
    leaves, offs = rows_by_matrices(dtype=torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(torch.fx.symbolic_trace(call)(*leaves, offs), call(*leaves, offs))


@row("`torch.fx.symbolic_trace` of a call by its module's name for it", "test_cases.py::test_symbolic_trace")
def _(mm):
    module = torch.nn.functional if mm is torch.nn.functional.grouped_mm else load_kernel()
    traced_like_eager(lambda a, b, offs: module.grouped_mm(a, b, offs=offs))


@row("the same of a call by another name", "test_cases.py::test_symbolic_trace_by_another_name")
def _(mm):
    traced_like_eager(lambda a, b, offs: mm(a, b, offs=offs))


@row("meta tensors of float32", "test_grouped_mm.py::test_meta_tensors_tell_shape_strides_and_dtype")
def _(mm):
    leaves, offs = rows_by_matrices()
    y = mm(*(t.to("meta") for t in leaves), offs=offs.to("meta"))
    assert (y.shape, y.stride(), y.dtype) == ((128, 32), (32, 1), torch.float32)


# Training and inference


@row("activation checkpointing, of both kinds", "test_cases.py::test_activation_checkpointing")
def _(mm):
    leaves, offs = rows_by_matrices()
    want = torch.autograd.grad(mm(*leaves, offs=offs).square().sum(), leaves)
    for use_reentrant in (False, True):
        for leaf in leaves:
            leaf.grad = None
        y = checkpoint(lambda a, b: mm(a, b, offs=offs), *leaves, use_reentrant=use_reentrant)
        y.square().sum().backward()
        for leaf, gradient in zip(leaves, want, strict=True):
            torch.testing.assert_close(leaf.grad, gradient)


@row("saved-tensor hooks", "test_cases.py::test_saved_tensors_may_be_moved")
def _(mm):
    with torch.autograd.graph.save_on_cpu():
        check(mm, "2d x 3d", ENDS[0], operands("2d x 3d"))


@row("autocast leaves the operands as they are", "test_cases.py::test_autocast_leaves_grouped_mm_alone")
def _(mm):
    leaves, offs = rows_by_matrices()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mm(*leaves, offs=offs).dtype == torch.float32


@row("inference mode", "test_cases.py::test_inference_mode")
def _(mm):
    leaves, offs = rows_by_matrices()
    with torch.inference_mode():
        assert mm(*leaves, offs=offs).is_inference()


@row(
    "the same bits each time",
    "test_determinism.py::test_up_to_two_experts_a_token",
    "test_determinism.py::test_more_experts_a_token",
)
def _(mm):
    leaves = operands("2d x 3d")
    first = mm(*leaves, offs=offsets("2d x 3d", ENDS[0]))
    assert all(torch.equal(mm(*leaves, offs=offsets("2d x 3d", ENDS[0])), first) for _ in range(20))


@row("DTensors, of bfloat16", "test_grouped_mm.py::test_other_tensors_are_refused")
def _(mm):
    from torch.distributed.tensor import DTensor

    with mesh_of_one() as mesh:
        mm(*(DTensor.from_local(t, mesh) for t in operands("3d x 3d", dtype=torch.bfloat16)))


# Errors


@row(
    "a RuntimeError for shapes, ranks and dtypes that do not agree",
    "test_grouped_mm.py::test_what_torch_refuses_too",
    "test_grouped_mm.py::test_wrong_arguments_are_refused",
)
def _(mm):
    (a, b), offs = rows_by_matrices()
    for wrong in ((a[:, 1:], b, offs), (a, b[1:], offs), (a, b, None), (a, b.bfloat16(), offs)):
        refuses(mm, *wrong, RuntimeError)


@row("an error for offs that descend or pass the end, on a CPU", "test_grouped_mm.py::test_wrong_offsets_on_the_cpu")
def _(mm):
    for ends in ([9, 5, 20, 40], [9, 9, 9, 129]):
        refuses(mm, *operands("2d x 3d"), offsets("2d x 3d", ends), (RuntimeError, ValueError))


# What its tests alone show

row_of_tests("`torch.library.opcheck` of each operator", "test_ops.py::test_opcheck")
row_of_tests("any policy of selective checkpointing", "test_cases.py::test_selective_checkpointing")
row_of_tests("several threads at once", "test_cases.py::test_threads")
row_of_tests(
    "local shards of DTensors, FSDP2",
    "test_cases.py::test_local_shards_of_a_distributed_weight",
    "test_cases.py::test_fully_sharded_layer",
)
row_of_tests("a fork after the import", "test_package.py::test_a_fork_after_the_import_computes")
row_of_tests("loaded by several threads at once", "test_package.py::test_threads_may_load_it_at_once")
row_of_tests("two builds in one process", "test_package.py::test_two_builds_in_one_process")
row_of_tests(
    "a `Routing` copied, pickled, saved, and loaded after `torch.serialization.add_safe_globals([Routing])`",
    "test_routing.py::test_copied_pickled_and_saved",
)
row_of_tests(
    "no product, and no memory, for gradients that nothing asks for",
    "test_gradients.py::test_backward_does_only_what_is_asked",
    "test_gradients.py::test_rows_are_kept_for_the_weights_alone",
)

# On a GPU

row_of_tests("no memory for them on a GPU", "test_gradients.py::test_frozen_weights_cost_no_memory", gpu=True)
row_of_tests("nothing is read back by the host", "test_cases.py::test_host_never_waits", gpu=True)
row_of_tests(
    "CUDA graphs, replayed with other offsets",
    "test_grouped_mm.py::test_graph_replays_with_other_groups",
    "test_cases.py::test_graph_of_another_shape_than_the_warm_up",
    "test_cases.py::test_reduce_overhead",
    gpu=True,
)
row_of_tests(
    "side streams",
    "test_cases.py::test_current_stream",
    "test_cases.py::test_memory_is_handed_on_in_the_order_of_streams",
    gpu=True,
)
row_of_tests(
    "a GPU that is not the current one, and two of them in threads",
    "test_cases.py::test_device_of_the_tensors",
    "test_cases.py::test_data_parallel",
    gpu=True,
)
row_of_tests(
    "an error on a GPU that was not built for", "test_cuda_build.py::test_a_gpu_that_it_was_not_built_for", gpu=True
)


def outcome(attempt, mm, refusals=Exception):
    try:
        with problems.deterministic():  # so that what is left unwritten is NaN
            attempt(mm)
    except AssertionError:
        return "no"
    except refusals:
        return "refused"
    return "yes"


def written():
    """The rows of the table: behaviour, the cell of torch's function and that of the package's, tests."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    return {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in lines if "---" not in line)}


def test_the_table_is_complete():
    assert len({of.behaviour for of in ROWS}) == len(ROWS)
    assert list(written()) == [of.behaviour for of in ROWS]


@pytest.mark.parametrize("of", ROWS, ids=lambda of: of.behaviour)
def test_row(kernel, of):
    torchs, ours, tests = written()[of.behaviour]
    assert tests == ", ".join(f"`{test}`" for test in of.tests)
    if of.attempt is None:
        assert (torchs, ours) == ("", "yes")
        return
    assert ours == outcome(of.attempt, kernel.grouped_mm, (RuntimeError, TypeError, ValueError))
    if torch.__version__.startswith(f"{TORCH}."):
        assert torchs == outcome(of.attempt, torch.nn.functional.grouped_mm)


@pytest.mark.parametrize("test", sorted({test for of in ROWS for test in of.tests}))
def test_named_tests_exist(test):
    """Those of rows that need a GPU are marked so, and no others."""
    file, name = test.split("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    marked = any("mark.gpu" in ast.unparse(mark) for mark in found.decorator_list)
    assert [of.behaviour for of in ROWS if test in of.tests and of.gpu != marked] == []
