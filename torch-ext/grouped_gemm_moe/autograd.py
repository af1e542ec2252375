"""The four products and their gradients as one autograd.Function over the ops.

A product reads its rows by token (gather) or in row order, and sums its results by token (combine) or keeps them in row
order. The gradient to its rows is the product with w transposed and gather and combine exchanged, so both directions
are `_product`.
"""

import torch

from ._ops import ops
from .reference import DOT_COLUMNS, accumulator_dtype
from .routing import Routing


def unit_rows(t: torch.Tensor) -> torch.Tensor:
    """t with adjacent elements in each row, which is how the ops read rows; row strides are free."""
    return t if t.shape[-1] <= 1 or t.stride(-1) == 1 else t.contiguous()


def _product(a, w, routing, gather, combine, out_dtype, *, row_weight=None, bias=None, dot_with=None, dot=None):
    """row_weight * (a @ w.T + bias): [S, N] rows, or with combine [T, N]. No out_dtype: nothing but the row dots."""
    row_assignment, offs, top_k, num_tokens = routing
    num_rows, columns = num_tokens * top_k, w.shape[1]
    read = a, w, offs, row_assignment, top_k, gather
    terms = bias, row_weight, dot_with, dot
    if out_dtype is None:
        ops.gemm(*read, combine, *terms, None)
        return None
    if not combine:
        rows = a.new_empty((num_rows, columns), dtype=out_dtype)
        ops.gemm(*read, False, *terms, rows)
        return rows
    sum_dtype = accumulator_dtype(a.dtype)
    if top_k > 2 and torch.are_deterministic_algorithms_enabled():
        # Two additions to zero commute; more of them need the rows, and a sum in slot order.
        rows = a.new_empty((num_rows, columns), dtype=sum_dtype)
        ops.gemm(*read, True, *terms, rows)
        out = a.new_empty((num_tokens, columns), dtype=out_dtype)
        ops.sum_rows(rows, top_k, out)
        return out
    out = a.new_empty((num_tokens, columns), dtype=sum_dtype)
    ops.gemm_combine(*read, *terms, out)
    # No .to() that returns out itself: torch 2.11's compiler takes that for a second result and loses the gradient.
    return out if out.dtype is out_dtype else out.to(out_dtype)


def _row_gradients(dy, x, w, row_weight, bias, routing, gather, combine, need_x, need_row_weight):
    """Gradients to x and, from the same launch, to row_weight: <dy, w x> = <w.T dy, x>."""
    row_assignment, offs, top_k, num_tokens = routing
    back = dy, w.transpose(1, 2), routing, combine, gather, x.dtype if need_x else None
    if not need_row_weight:
        return _product(*back, row_weight=row_weight), None
    num_rows, sum_dtype = num_tokens * top_k, accumulator_dtype(x.dtype)
    dot = x.new_zeros((-(-x.shape[1] // DOT_COLUMNS), num_rows), dtype=sum_dtype)
    dx = _product(*back, row_weight=row_weight, dot_with=x, dot=dot)
    d_row_weight = dot.sum(0)
    if bias is not None:
        of_bias = x.new_empty((num_rows, 1), dtype=sum_dtype)
        ops.gemm(dy, bias[:, None], offs, row_assignment, top_k, combine, True, None, None, None, None, of_bias)
        d_row_weight += of_bias[:, 0]
    return dx, d_row_weight


def _weight_gradient(dy, x, row_weight, routing, gather, combine, out):
    row_assignment, offs, top_k, _ = routing
    ops.weight_grad(x, dy, offs, row_assignment, top_k, gather, combine, row_weight, False, out)
    return out


def _like_weight(w):
    """An uninitialised gradient of w, stored by columns where w is."""
    num_experts, n, k = w.shape
    by_columns = w.stride(1) == 1 and w.stride(2) != 1
    return w.new_empty((num_experts, k, n)).transpose(1, 2) if by_columns else w.new_empty(w.shape)


def _bias_gradient(dy, bias, row_weight, routing, combine):
    """The weight gradient of rows of ones; eight columns of them keep the rows aligned."""
    ones = dy.new_ones((1, 8)).expand(routing.num_tokens * routing.top_k, 8)
    out = dy.new_empty((*bias.shape, 8), dtype=accumulator_dtype(dy.dtype))
    return _weight_gradient(dy, ones, row_weight, routing, False, combine, out)[..., 0].to(bias.dtype)


class GroupedProduct(torch.autograd.Function):
    """row_weight * (x @ w.T + bias) by expert, for each of the four ways to read and write the rows."""

    # forward takes ctx itself: a separate setup_context makes torch bind the signature again in each call.
    @staticmethod
    def forward(ctx, x, w, row_weight, bias, row_assignment, offs, top_k, num_tokens, gather, combine, out_dtype):
        ctx.save_for_backward(x, w, row_weight, bias, row_assignment, offs)
        ctx.form = top_k, num_tokens, gather, combine
        routing = Routing(row_assignment, offs, top_k, num_tokens)
        return _product(x, w, routing, gather, combine, out_dtype, row_weight=row_weight, bias=bias)

    @staticmethod
    def backward(ctx, dy):
        gradients = _Gradients.apply(dy, *ctx.saved_tensors, *ctx.form, ctx.needs_input_grad[:4])
        return *gradients, *[None] * 7


class _Gradients(torch.autograd.Function):
    """The gradients of GroupedProduct, as a Function so that differentiating them raises instead of giving zeros."""

    @staticmethod
    def forward(ctx, dy, x, w, row_weight, bias, row_assignment, offs, top_k, num_tokens, gather, combine, needed):
        routing = Routing(row_assignment, offs, top_k, num_tokens)
        need_x, need_w, need_row_weight, need_bias = needed
        dx = dw = d_row_weight = d_bias = None
        dy = unit_rows(dy.to(x.dtype))
        if need_x or need_row_weight:
            dx, d_row_weight = _row_gradients(
                dy, x, w, row_weight, bias, routing, gather, combine, need_x, need_row_weight
            )
        if need_w:
            dw = _weight_gradient(dy, x, row_weight, routing, gather, combine, _like_weight(w))
        if need_bias:
            d_bias = _bias_gradient(dy, bias, row_weight, routing, combine)
        return dx, dw, d_row_weight, d_bias

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("grouped_gemm_moe has no second derivatives: its gradients cannot be differentiated again")
