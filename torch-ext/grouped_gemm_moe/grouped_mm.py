"""`grouped_mm`: torch's function of that name on the package's products, without torch's limits.

Each form is one op, and the gradients of each are two of the forms again, so that they can be differentiated in turn.
"""

import torch

from ._ops import ops
from .autograd import unit_matrices, unit_rows
from .reference import accumulator_dtype

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    *,
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
        mat_a, mat_b: float32, bfloat16 or float16 (on the CPU float64 too), of any strides and alignment.
        offs: [G] of any integer dtype, where each group ends; rising. The last may be less than S: what lies behind it
            is exactly 0 in the result and in the gradients.
        bias: [G, N], added to each row of its group where mat_b is 3-D; None otherwise.
        out_dtype: the operands' unless given; float32 too for narrower ones.

    Returns:
        The products, contiguous; sums are taken in float32 (float64 for float64) and rounded once. Differentiable any
        number of times in mat_a, mat_b and bias; the gradient of a dense operand that is stored by columns is too.

    Raises:
        RuntimeError: for ranks, sizes, dtypes or devices that do not agree or are not supported, naming the argument.
        ValueError: on the CPU for offs that descend or pass S; a GPU's are not read back.

    Example:
        >>> a, b = torch.randn(7, 16), torch.randn(3, 16, 8)
        >>> grouped_mm(a, b, offs=torch.tensor([4, 4, 7], dtype=torch.int32)).shape
        torch.Size([7, 8])
    """
    _check(mat_a, mat_b, offs, bias, out_dtype)
    if offs is not None and offs.dtype is not torch.int32:
        wide = offs.dtype is torch.int64  # saturated, so that a wrong end cannot wrap to a plausible one
        offs = (offs.clamp(-1, torch.iinfo(torch.int32).max) if wide else offs).to(torch.int32)
    offs = None if offs is None else offs.contiguous()
    return _Product.apply(mat_a, mat_b, bias, offs, mat_a.dtype if out_dtype is None else out_dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias, offs, out_dtype):
        ctx.save_for_backward(a, b, offs)
        ctx.bias_dtype = None if bias is None else bias.dtype
        if a.dim() == 3 and b.dim() == 2:
            # By columns of b: the same by rows of the transposed product.
            return _by_rows(b.t(), a.transpose(1, 2), None, offs, out_dtype).t().contiguous()
        if b.dim() == 2:
            out = a.new_empty((offs.shape[0], a.shape[0], b.shape[1]), dtype=out_dtype)
            ops.weight_grad(unit_rows(b), unit_rows(a.t()), offs, None, 1, False, False, None, False, out)
            return out
        if a.dim() == 2:
            return _by_rows(a, b, bias, offs, out_dtype)
        groups, rows, _ = a.shape
        ends = torch.arange(1, groups + 1, dtype=torch.int32, device=a.device) * rows
        return _by_rows(a.reshape(groups * rows, -1), b, bias, ends, out_dtype).view(groups, rows, b.shape[2])

    @staticmethod
    def backward(ctx, d):
        a, b, offs = ctx.saved_tensors
        need_a, need_b, need_bias = ctx.needs_input_grad[:3]
        da = db = d_bias = None
        d = d.to(a.dtype)
        if need_a:
            da = _like(a, lambda: _again(d, b.mT, offs), lambda: _again(b, d.mT, offs))
        if need_b:
            db = _like(b, lambda: _again(a.mT, d, offs), lambda: _again(d.mT, a, offs))
        if need_bias:
            wide = accumulator_dtype(a.dtype)
            ones = d.new_ones(1, 8 if d.dim() == 2 else 1)  # eight columns keep the rows aligned
            if d.dim() == 2:
                sums = _Product.apply(ones.expand(d.shape[0], 8).t(), d, None, offs, wide)[:, 0]
            else:
                sums = d.sum(1, dtype=wide)
            d_bias = sums.to(ctx.bias_dtype)
        return da, db, d_bias, None, None


def _again(a, b, offs):
    return _Product.apply(a, b, None, offs, a.dtype)


def _like(operand, gradient, transposed):
    """The gradient of an operand in its layout: computed as it is, or transposed where the operand is stored so."""
    by_columns = operand.mT.is_contiguous() and not operand.is_contiguous()
    return transposed().mT if by_columns else gradient()


def _by_rows(a, b, bias, ends, out_dtype):
    """[S, N] rows of a [S, K], each by its group's matrix in b [G, K, N]."""
    out = a.new_empty((a.shape[0], b.shape[2]), dtype=out_dtype)
    bias = None if bias is None else bias.contiguous()
    w = unit_matrices(b.transpose(1, 2))
    ops.gemm(unit_rows(a), w, ends, None, 1, False, False, bias, None, None, None, out)
    return out


def _check(a, b, offs, bias, out_dtype):
    def refuse(name, wanted, found):
        raise RuntimeError(f"{name} must {wanted}, but {found}")

    for name, tensor in (("mat_a", a), ("mat_b", b)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, but it is of type {type(tensor).__name__}")
        if tensor.dim() not in (2, 3):
            refuse(name, "have 2 or 3 dimensions", f"its shape is {list(tensor.shape)}")
    supported = _DTYPES if a.device.type != "cuda" else _DTYPES[:3]
    if a.dtype not in supported:
        refuse("mat_a", f"be one of {', '.join(map(str, supported))} on {a.device.type}", f"it is {a.dtype}")
    if b.dtype is not a.dtype:
        refuse("mat_b", f"be {a.dtype} as mat_a is", f"it is {b.dtype}")
    if b.device != a.device:
        refuse("mat_b", f"be on {a.device} as mat_a is", f"it is on {b.device}")
    if a.shape[-1] != b.shape[-2]:
        refuse("mat_b", f"have {a.shape[-1]} rows as mat_a has columns", f"its shape is {list(b.shape)}")
    both = a.dim() == b.dim() == 3
    if both and a.shape[0] != b.shape[0]:
        refuse("mat_b", f"have {a.shape[0]} groups as mat_a has", f"its shape is {list(b.shape)}")
    if both and offs is not None:
        refuse("offs", "be None where both operands are 3-D", "it is given")
    if not both:
        if not isinstance(offs, torch.Tensor):
            refuse("offs", "be a tensor where an operand is 2-D", f"it is {offs}")
        if offs.dim() != 1 or offs.dtype not in _INTEGERS:
            refuse("offs", "be 1-D and of integers", f"it is {offs.dtype} {list(offs.shape)}")
        if offs.device != a.device:
            refuse("offs", f"be on {a.device} as mat_a is", f"it is on {offs.device}")
        groups = b.shape[0] if b.dim() == 3 else a.shape[0] if a.dim() == 3 else offs.shape[0]
        if offs.shape[0] != groups:
            refuse("offs", f"have {groups} ends, one for each group", f"its shape is {list(offs.shape)}")
    if bias is not None:
        if not isinstance(bias, torch.Tensor):
            raise TypeError(f"bias must be a tensor or None, but it is of type {type(bias).__name__}")
        if b.dim() == 2:
            refuse("bias", "be None where mat_b is 2-D", f"its shape is {list(bias.shape)}")
        if bias.shape != (b.shape[0], b.shape[2]):
            refuse("bias", f"have the shape {[b.shape[0], b.shape[2]]}", f"its shape is {list(bias.shape)}")
        if bias.dtype is not a.dtype or bias.device != a.device:
            refuse("bias", f"be {a.dtype} on {a.device} as mat_a is", f"it is {bias.dtype} on {bias.device}")
    if out_dtype not in (None, a.dtype, accumulator_dtype(a.dtype)):
        allowed = " or ".join(map(str, dict.fromkeys((a.dtype, accumulator_dtype(a.dtype)))))
        refuse("out_dtype", f"be {allowed} here", f"it is {out_dtype!r}")
