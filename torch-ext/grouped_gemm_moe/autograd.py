"""The products, the expert MLP of two of them, and their gradients, as autograd.Functions over the ops.

A product reads its rows by token (gather) or in row order, and sums its results by token (combine) or keeps them in row
order. The gradient to its rows is the product with w transposed and gather and combine exchanged, so both directions
are `grouped_product`.
"""

import torch
from torch.autograd import forward_ad

from . import activation
from ._ops import ops
from .reference import DOT_COLUMNS, accumulator_dtype
from .routing import Routing


def unit_rows(t: torch.Tensor) -> torch.Tensor:
    """t with adjacent elements in each row, which is how the ops read rows; row strides are free."""
    return t if t.shape[-1] <= 1 or t.stride(-1) == 1 else t.contiguous()


def unit_matrices(w):
    """w with adjacent elements along one of its last two dimensions; either one is read in place."""
    return w if any(w.shape[d] <= 1 or w.stride(d) == 1 for d in (-1, -2)) else w.contiguous()


def is_transformed(*tensors):
    """Whether torch.func's transforms are at work, or a forward-mode derivative is taken through one of the tensors,
    some of which may be None."""
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:
        return False
    if torch.compiler.is_compiling():  # its tensors show no tangents, and a GPU's ops would lose those of the real ones
        return True
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def refuse_transforms(tensors):
    """The Functions below have no rules for transforms, and torch's own refusal does not say what it is about."""
    if is_transformed(*tensors.values()):
        raise NotImplementedError(
            f"{', '.join(tensors)} must not be given inside a transform of torch.func (grad, vmap, jvp and the like), "
            "nor with a forward-mode tangent: of grouped_gemm_moe's functions only grouped_mm supports that"
        )


def refuse_batch(function, hint, *tensors):
    """Refuses gradients or tangents, perhaps None, that torch.autograd has batched: no Function sees the samples, and
    torch's own refusal names an op."""
    if torch.compiler.is_compiling():
        return
    if any(t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors):
        raise NotImplementedError(
            f"{function} must not be given a batch of gradients or tangents (is_grads_batched=True, vectorize=True): "
            f"{hint}"
        )


def _refuse_transformed(dy):
    refuse_transforms({"the incoming gradient": dy})
    refuse_batch("moe, moe_mlp, grouped_gemm, gather_gemm and gemm_combine", "pass one at a time", dy)


def grouped_product(
    a, w, routing, gather, combine, out_dtype, *, row_weight=None, bias=None, dot_with=None, dot=None, rows_dtype=None
):
    """row_weight * (a @ w.T + bias): [S, N] rows, or with combine [T, N]. No out_dtype: nothing but the row dots.

    rows_dtype: a token's rows are stored in it and added in slot order; None: where torch's algorithms are to be
    deterministic, in that of sums.
    """
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
    rows_dtype = _added_in_order(rows_dtype, sum_dtype, top_k)
    if rows_dtype is not None:
        rows = a.new_empty((num_rows, columns), dtype=rows_dtype)
        ops.gemm(*read, True, *terms, rows)
        out = a.new_empty((num_tokens, columns), dtype=out_dtype)
        ops.sum_rows(rows, top_k, out)
        return out
    out = a.new_empty((num_tokens, columns), dtype=sum_dtype)
    ops.gemm_combine(*read, *terms, out)
    # No .to() that returns out itself: torch 2.11's compiler takes that for a second result and loses the gradient.
    return out if out.dtype is out_dtype else out.to(out_dtype)


def _added_in_order(rows_dtype, sum_dtype, top_k):
    """The dtype of rows that are stored and added in slot order; None: they are added at once."""
    if rows_dtype is None and torch.are_deterministic_algorithms_enabled():
        rows_dtype = sum_dtype
    return None if rows_dtype is None or top_k <= 2 else rows_dtype  # two additions to zero commute


def _row_gradients(dy, x, w, row_weight, bias, routing, gather, combine, need_x, need_row_weight):
    """Gradients to x and, from the same launch, to row_weight: <dy, w x> = <w.T dy, x>."""
    top_k, num_tokens = routing[2:]
    back = dy, w.transpose(1, 2), routing, combine, gather, w.dtype if need_x else None
    if not need_row_weight:
        return grouped_product(*back, row_weight=row_weight), None
    dot = _row_dots(x, x.shape[1], num_tokens * top_k)
    dx = grouped_product(*back, row_weight=row_weight, dot_with=x, dot=dot)
    return dx, _row_weight_gradient(dot, dy, bias, routing, combine)


def _row_dots(like, columns, num_rows):
    return like.new_zeros((-(-columns // DOT_COLUMNS), num_rows), dtype=accumulator_dtype(like.dtype))


def _row_weight_gradient(dot, dy, bias, routing, combine):
    """The gradient to row_weight from the partial row dots, and from the bias that was weighted too: <dy, bias>."""
    row_assignment, offs, top_k, _ = routing
    d_row_weight = dot.sum(0)
    if bias is not None:
        of_bias = dot.new_empty((dot.shape[1], 1))
        ops.gemm(dy, bias[:, None], offs, row_assignment, top_k, combine, True, None, None, None, None, of_bias)
        d_row_weight += of_bias[:, 0]
    return d_row_weight


def _weight_gradient(dy, x, row_weight, routing, gather, combine, out, accumulate=False):
    row_assignment, offs, top_k, _ = routing
    ops.weight_grad(x, dy, offs, row_assignment, top_k, gather, combine, row_weight, accumulate, out)
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


def asked(ctx, *inputs):
    """Whether the gradient of one of the inputs, by number, may be asked for; the compiler finds that out by itself."""
    return torch.compiler.is_compiling() or any(ctx.needs_input_grad[i] for i in inputs)


class GroupedProduct(torch.autograd.Function):
    """row_weight * (x @ w.T + bias) by expert, for each of the four ways to read and write the rows."""

    # forward takes ctx itself: a separate setup_context makes torch bind the signature again in each call.
    @staticmethod
    def forward(ctx, x, w, row_weight, bias, row_assignment, offs, top_k, num_tokens, gather, combine, out_dtype):
        kept = x if asked(ctx, 1, 2) else None  # a product is linear: the gradient to x does without x
        ctx.save_for_backward(kept, w, row_weight, bias, row_assignment, offs)
        ctx.form = top_k, num_tokens, gather, combine
        routing = Routing(row_assignment, offs, top_k, num_tokens)
        return grouped_product(x, w, routing, gather, combine, out_dtype, row_weight=row_weight, bias=bias)

    @staticmethod
    def backward(ctx, dy):
        _refuse_transformed(dy)
        gradients = _Gradients.apply(dy, *ctx.saved_tensors, *ctx.form, ctx.needs_input_grad[:4])
        return *gradients, *[None] * 7


class _Gradients(torch.autograd.Function):
    """The gradients of GroupedProduct, as a Function so that differentiating them raises instead of giving zeros."""

    @staticmethod
    def forward(ctx, dy, x, w, row_weight, bias, row_assignment, offs, top_k, num_tokens, gather, combine, needed):
        routing = Routing(row_assignment, offs, top_k, num_tokens)
        need_x, need_w, need_row_weight, need_bias = needed
        dx = dw = d_row_weight = d_bias = None
        dy = unit_rows(dy.to(w.dtype))
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
        _refuse_second_derivatives()


def _refuse_second_derivatives():
    raise RuntimeError("grouped_gemm_moe has no second derivatives: its gradients cannot be differentiated again")


def activated(x, w, bias, routing, form, out_dtype, store):
    """activation(x @ w.T + bias) of gathered rows and, to `store` for the backward, what it is the activation of."""
    row_assignment, offs, top_k, num_tokens = routing
    num_rows, columns = num_tokens * top_k, w.shape[1]
    pre = x.new_empty((num_rows, columns)) if store else None
    out = x.new_empty((num_rows, activation.width(form, columns)), dtype=out_dtype)
    ops.gemm_activation(x, w, offs, row_assignment, top_k, True, bias, *form, pre, out)
    return pre, out


class ActivatedProduct(torch.autograd.Function):
    """activation(x @ w.T + bias) by expert of gathered rows, with a gradient that is taken apart from the product."""

    @staticmethod
    def forward(ctx, x, w, bias, row_assignment, offs, top_k, num_tokens, form, out_dtype):
        pre, out = activated(x, w, bias, Routing(row_assignment, offs, top_k, num_tokens), form, out_dtype, True)
        ctx.save_for_backward(pre, x, w, bias, row_assignment, offs)
        ctx.form, ctx.sizes = form, (top_k, num_tokens)
        return out

    @staticmethod
    def backward(ctx, d):
        _refuse_transformed(d)
        pre, x, w, bias, row_assignment, offs = ctx.saved_tensors
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        wide = accumulator_dtype(x.dtype)
        _, d_pre = activation.gradient(pre.to(wide), d.to(x.dtype).to(wide), ctx.form)
        dx, dw, _, d_bias = _Gradients.apply(
            d_pre, x, w, None, bias, row_assignment, offs, *ctx.sizes, True, False, (need_x, need_w, False, need_bias)
        )
        return dx, dw, d_bias, *[None] * 6


def expert_mlp(x, w_up, w_down, row_weight, bias_up, bias_down, expert_ids, form, out_dtype, combine):
    """What `ExpertMLP` returns, where nothing is kept for a backward."""
    (num_tokens, top_k), columns = expert_ids.shape, w_down.shape[1]
    num_rows, sum_dtype = num_tokens * top_k, accumulator_dtype(x.dtype)
    rows_dtype = _added_in_order(_rows_dtype(combine, x.dtype, out_dtype), sum_dtype, top_k)
    h = x.new_empty((num_rows, w_down.shape[2]))
    rows = None if rows_dtype is None else x.new_empty((num_rows, columns), dtype=rows_dtype)
    out = x.new_empty((num_tokens, columns), dtype=out_dtype)
    sums = x.new_empty(out.shape, dtype=sum_dtype) if rows is None and out_dtype is not sum_dtype else None
    read = x, w_up, w_down, expert_ids.contiguous(), row_weight, bias_up, bias_down
    ops.mlp(*read, *form, h, rows, sums, out)
    return out


class ExpertMLP(torch.autograd.Function):
    """row_weight * (activation(x @ w_up.T + bias_up) @ w_down.T + bias_down) by expert, combined by token."""

    @staticmethod
    def forward(
        ctx, x, w_up, w_down, row_weight, bias_up, bias_down, row_assignment, offs, top_k, num_tokens, form, out_dtype,
        combine, buffers,
    ):  # fmt: skip
        routing = Routing(row_assignment, offs, top_k, num_tokens)
        pre, h = activated(x, w_up, bias_up, routing, form, x.dtype, True)
        ctx.save_for_backward(pre, x, w_up, w_down, row_weight, bias_up, bias_down, row_assignment, offs)
        ctx.options = top_k, num_tokens, form, combine, buffers
        terms = {"row_weight": row_weight, "bias": bias_down, "rows_dtype": _rows_dtype(combine, x.dtype, out_dtype)}
        return grouped_product(h, w_down, routing, False, True, out_dtype, **terms)

    @staticmethod
    def backward(ctx, dy):
        _refuse_transformed(dy)
        gradients = _MLPGradients.apply(dy, *ctx.saved_tensors, *ctx.options, ctx.needs_input_grad[:6])
        return *gradients, *[None] * 8


class _MLPGradients(torch.autograd.Function):
    """The gradients of ExpertMLP, as `_Gradients` are."""

    @staticmethod
    def forward(
        ctx, dy, pre, x, w_up, w_down, row_weight, bias_up, bias_down, row_assignment, offs, top_k, num_tokens, form,
        combine, buffers, needed,
    ):  # fmt: skip
        need_x, need_up, need_down, need_row_weight, need_bias_up, need_bias_down = needed
        routing = Routing(row_assignment, offs, top_k, num_tokens)
        dx = d_up = d_down = d_row_weight = d_bias_up = d_bias_down = None
        dy = unit_rows(dy.to(x.dtype))
        d_pre = torch.empty_like(pre) if need_x or need_up or need_bias_up else None
        weighted = pre.new_empty((pre.shape[0], w_down.shape[2])) if need_down else None
        dot = _row_dots(pre, w_down.shape[2], pre.shape[0]) if need_row_weight else None
        if not (d_pre is weighted is dot is None):
            back = dy, w_down.transpose(1, 2), offs, row_assignment, top_k, True, row_weight
            ops.gemm_activation_grad(*back, *form, pre, dot, d_pre, weighted)
        if need_x:
            rows_dtype = _rows_dtype(combine, x.dtype, x.dtype)
            dx = grouped_product(d_pre, w_up.transpose(1, 2), routing, False, True, x.dtype, rows_dtype=rows_dtype)
        if need_up:
            d_up = _gradient_or_sum(d_pre, x, routing, True, False, w_up, buffers[0])
        if need_down:
            d_down = _gradient_or_sum(dy, weighted, routing, False, True, w_down, buffers[1])
        if need_row_weight:
            d_row_weight = _row_weight_gradient(dot, dy, bias_down, routing, True)
        if need_bias_up:
            d_bias_up = _bias_gradient(d_pre, bias_up, None, routing, False)
        if need_bias_down:
            d_bias_down = _bias_gradient(dy, bias_down, row_weight, routing, True)
        return dx, d_up, d_down, d_row_weight, d_bias_up, d_bias_down

    @staticmethod
    def backward(ctx, *_):
        _refuse_second_derivatives()


def _rows_dtype(combine, x_dtype, out_dtype):
    """That of the rows which `combine` of moe_mlp adds in order."""
    return {None: None, "ordered": accumulator_dtype(x_dtype), "rounded": out_dtype}[combine]


def _gradient_or_sum(dy, x, routing, gather, combine, w, buffer):
    """The gradient of w, or None if it has been added to a buffer."""
    adds = buffer is not None
    out = _weight_gradient(dy, x, None, routing, gather, combine, buffer if adds else _like_weight(w), adds)
    return None if adds else out
