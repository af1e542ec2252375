"""`grouped_mm`: torch's function of that name on the package's products, without torch's limits.

Each form is one op, and the gradients of each are two of the forms again, so that they can be differentiated in turn.
"""

import torch
from torch._C._functorch import TransformType, get_interpreter_stack

from ._ops import ops
from .autograd import asked, is_transformed, refuse_batch, unit_matrices, unit_rows
from .functional import INTEGERS, OPERANDS, check_tensor, too_large
from .reference import accumulator_dtype


def grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A product for each of G groups, as ``torch.nn.functional.grouped_mm``.

    ========= ========= ====================== =========
    mat_a     mat_b     offs splits            result
    ========= ========= ====================== =========
    [S, K]    [G, K, N] the rows of mat_a      [S, N]
    [G, M, K] [G, K, N] nothing; None          [G, M, N]
    [M, S]    [S, N]    the summed dimension   [G, M, N]
    [G, M, K] [K, S]    the columns of mat_b   [M, S]
    ========= ========= ====================== =========

    Args:
        mat_a, mat_b: float32, bfloat16 or float16, both the same (on the CPU float64 too), of any strides and
            alignment. Autocast leaves them as they are.
        offs: [G] of int8, int16, int32, int64 or uint8, where each group ends; rising. The last may be less than S:
            what lies behind it is exactly 0 in the result and in the gradients.
        bias: [G, N] in the operands' dtype, added to each row of its group where mat_b is 3-D; None otherwise.
        out_dtype: the operands' unless given; float32 too for narrower ones.

    Returns:
        The products, contiguous; sums are taken in float32 (float64 for float64) and rounded once. Differentiable any
        number of times in mat_a, mat_b and bias, also forward and under torch.func's transforms but functionalize. Each
        gradient has its argument's dtype, and where that is dense by columns so is its gradient. A group without rows
        gets a gradient of exactly 0. The same bits in each run.

    Raises:
        RuntimeError: for ranks, sizes, dtypes or devices that do not agree or are not supported, naming the argument.
        ValueError: for a layout that is not strided, and on the CPU for offs that descend or pass S. A GPU's offs are
            not read back: there wrong ones give wrong numbers, without an access outside the tensors.
        TypeError: for an argument that is no tensor, and for a DTensor.
        NotImplementedError: under functionalize, under a transform that is compiled, and in the backward for a batch
            of gradients.

    Example:
        >>> a, b = torch.randn(7, 16), torch.randn(3, 16, 8)
        >>> grouped_mm(a, b, offs=torch.tensor([4, 4, 7], dtype=torch.int32)).shape
        torch.Size([7, 8])
    """
    _check(mat_a, mat_b, offs, bias, out_dtype)
    return _product(mat_a, mat_b, bias, _ends(offs), mat_a.dtype if out_dtype is None else out_dtype)


def _ends(offs):
    """offs as the ops read them."""
    if offs is None:
        return None
    if offs.dtype is torch.int64:  # saturated, so that a wrong end cannot wrap to a plausible one
        offs = offs.clamp(-1, torch.iinfo(torch.int32).max)
    return offs.to(torch.int32).contiguous()


def _product(a, b, bias, offs, out_dtype):
    if not is_transformed(a, b, bias):
        return _Product.apply(a, b, bias, offs, out_dtype)
    if torch.compiler.is_compiling():  # which asks no Function for its rules: gradients would be 0
        raise NotImplementedError(
            "grouped_mm must not be given inside a transform of torch.func, nor with a forward-mode tangent, that is "
            "compiled: compile what is transformed, or let the compiler break its graph there"
        )
    # functionalize has no rule for a Function, and torch's refusal does not say whose.
    if any(level.key() == TransformType.Functionalize for level in get_interpreter_stack() or ()):
        raise NotImplementedError("grouped_mm must not be given inside torch.func.functionalize")
    return _TransformedProduct.apply(a, b, bias, offs, out_dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias, offs, out_dtype):
        ctx.save_for_backward(a if asked(ctx, 1) else None, b if asked(ctx, 0) else None, offs)
        _note(ctx, a, b)
        return _multiply(a, b, bias, offs, out_dtype)

    @staticmethod
    def backward(ctx, d):
        a, b, offs = ctx.saved_tensors
        need_a, need_b, need_bias = ctx.needs_input_grad[:3]
        _refuse_batch(d)
        da = db = d_bias = None
        d = d.to(ctx.dtype)
        if need_a:
            da = _mT(_again(b, _mT(d), offs)) if ctx.a_by_columns else _again(d, _mT(b), offs)
        if need_b:
            db = _mT(_again(_mT(d), a, offs)) if ctx.b_by_columns else _again(_mT(a), d, offs)
        if need_bias:
            d_bias = _sums_of_groups(d, offs).to(ctx.dtype)
        return da, db, d_bias, None, None


class _TransformedProduct(_Product):
    """The same for torch.func's transforms and forward-mode derivatives.

    Apart, for setup_context costs a call more time than all the checks, and torch's compiler takes no Function with
    a jvp.
    """

    @staticmethod
    def forward(a, b, bias, offs, out_dtype):
        return _multiply(a, b, bias, offs, out_dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        a, b, _, offs, ctx.out_dtype = inputs
        ctx.save_for_backward(a, b, offs)
        ctx.save_for_forward(a, b, offs)
        _note(ctx, a, b)

    @staticmethod
    def jvp(ctx, ta, tb, t_bias, *_):
        a, b, offs = ctx.saved_tensors
        _refuse_batch(ta, tb, t_bias)
        ta = torch.zeros_like(a) if ta is None else ta
        out = _product(ta, b, t_bias, offs, ctx.out_dtype)
        return out if tb is None else out + _product(a, tb, None, offs, ctx.out_dtype)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        def of_sample(i):
            return [t if dim is None else t.select(dim, i) for t, dim in zip(arguments, in_dims)]

        return torch.stack([_product(*of_sample(i)) for i in range(info.batch_size)]), 0


def _refuse_batch(*tensors):
    refuse_batch("grouped_mm", "torch.func has jacrev, jacfwd and vmap for it", *tensors)


def _note(ctx, a, b):
    ctx.dtype = a.dtype
    ctx.a_by_columns, ctx.b_by_columns = _by_columns(a), _by_columns(b)


def _multiply(a, b, bias, offs, out_dtype):
    if a.dim() == 3 and b.dim() == 2:
        # By columns of b: the same by rows of the transposed product, which is written transposed.
        out = a.new_empty((a.shape[1], b.shape[1]), dtype=out_dtype)
        _by_rows(b.t(), a.transpose(1, 2), None, offs, out.t())
        return out
    if b.dim() == 2:
        out = a.new_empty((offs.shape[0], a.shape[0], b.shape[1]), dtype=out_dtype)
        ops.weight_grad(unit_rows(b), unit_rows(a.t()), offs, None, 1, False, False, None, False, out)
        return out
    if a.dim() == 2:
        out = a.new_empty((a.shape[0], b.shape[2]), dtype=out_dtype)
        _by_rows(a, b, bias, offs, out)
        return out
    groups, rows, columns = a.shape
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device=a.device) * rows
    out = a.new_empty((groups, rows, b.shape[2]), dtype=out_dtype)
    _by_rows(a.reshape(groups * rows, columns), b, bias, ends, out.view(groups * rows, b.shape[2]))
    return out


def _by_rows(a, b, bias, ends, out):
    """Rows of a [S, K], each by its group's matrix in b [G, K, N], to `out` [S, N], which may lie transposed."""
    if b.shape[0] == 0:  # there is no matrix to read, and all rows lie behind the last group
        out.zero_()
        return
    bias = None if bias is None else bias.contiguous()
    w = unit_matrices(b.transpose(1, 2))
    ops.gemm(unit_rows(a), w, ends, None, 1, False, False, bias, None, None, None, out)


def _again(a, b, offs):
    return _product(a, b, None, offs, a.dtype)


def _by_columns(operand):
    """Whether an operand is dense by columns. Its gradient is then too, computed transposed: torch's own rule."""
    return _mT(operand).is_contiguous() and not operand.is_contiguous()


def _mT(matrices):
    # The attribute of that name would be read before the Function by the compiler, which then takes the view for a
    # tensor that was not saved by save_for_backward: compiled autograd loses it, and changes in place go unnoticed.
    return matrices.transpose(-2, -1)


def _sums_of_groups(d, offs):
    """The rows of each group added up, [G, N]."""
    wide = accumulator_dtype(d.dtype)
    if d.dim() == 3:
        return d.sum(1, dtype=wide)
    ones = d.new_ones(1, 8).expand(d.shape[0], 8)  # eight columns keep the rows aligned
    return _product(ones.t(), d, None, offs, wide)[:, 0]


def _check(a, b, offs, bias, out_dtype):
    _check_operands(a, b)
    _check_offs(offs, a, b)
    if bias is not None:
        _check_bias(bias, a, b)
    allowed = dict.fromkeys((a.dtype, accumulator_dtype(a.dtype)))
    if out_dtype is not None and out_dtype not in allowed:
        _refuse("out_dtype", f"be {' or '.join(map(str, allowed))} here", f"it is {out_dtype!r}")


def _check_operands(a, b):
    for name, operand in (("mat_a", a), ("mat_b", b)):
        check_tensor(name, operand)
        if operand.dim() not in (2, 3):
            _refuse(name, "have 2 or 3 dimensions", f"its shape is {list(operand.shape)}")
    supported = OPERANDS if a.device.type == "cuda" else (*OPERANDS, torch.float64)
    if a.dtype not in supported:
        _refuse("mat_a", f"be one of {', '.join(map(str, supported))} on {a.device.type}", f"it is {a.dtype}")
    _check_alike("mat_b", b, a)
    if a.shape[-1] != b.shape[-2]:
        _refuse("mat_b", f"have {a.shape[-1]} rows as mat_a has columns", f"its shape is {list(b.shape)}")
    for name, operand in (("mat_a", a), ("mat_b", b)):
        if any(too_large(size) for size in operand.shape):
            _refuse(name, "have sizes below 2**31", f"its shape is {list(operand.shape)}")
    if a.dim() == b.dim() == 3:
        if a.shape[0] != b.shape[0]:
            _refuse("mat_b", f"have {a.shape[0]} groups as mat_a has", f"its shape is {list(b.shape)}")
        if too_large(a.shape[0] * a.shape[1]):
            _refuse("mat_a", "have fewer than 2**31 rows in all", f"its shape is {list(a.shape)}")


def _check_alike(name, tensor, a):
    if tensor.dtype is not a.dtype or tensor.device != a.device:
        _refuse(name, f"be {a.dtype} on {a.device} as mat_a is", f"it is {tensor.dtype} on {tensor.device}")


def _check_offs(offs, a, b):
    if a.dim() == b.dim() == 3:
        if offs is not None:
            _refuse("offs", "be None where both operands are 3-D", "it is given")
        return
    if offs is None:
        _refuse("offs", "be given where an operand is 2-D", "it is None")
    check_tensor("offs", offs)
    if offs.dim() != 1 or offs.dtype not in INTEGERS:
        _refuse("offs", "be 1-D and of integers", f"it is {offs.dtype} {list(offs.shape)}")
    if offs.device != a.device:
        _refuse("offs", f"be on {a.device} as mat_a is", f"it is on {offs.device}")
    groups = b.shape[0] if b.dim() == 3 else a.shape[0] if a.dim() == 3 else offs.shape[0]
    if offs.shape[0] != groups:
        _refuse("offs", f"have {groups} ends, one for each group", f"its shape is {list(offs.shape)}")


def _check_bias(bias, a, b):
    check_tensor("bias", bias)
    if b.dim() == 2:
        _refuse("bias", "be None where mat_b is 2-D", f"its shape is {list(bias.shape)}")
    if bias.shape != (b.shape[0], b.shape[2]):
        _refuse("bias", f"have the shape {[b.shape[0], b.shape[2]]}", f"its shape is {list(bias.shape)}")
    _check_alike("bias", bias, a)


def _refuse(name, wanted, found):
    raise RuntimeError(f"{name} must {wanted}, but {found}")  # torch's kind of error
