"""Every op in plain torch: the CPU backend, and what the GPU kernels are tested against.

Products are accumulated in float32 (float64 for float64 operands) and rounded once, to the output's dtype.
"""

import contextlib
import functools
import reprlib
import threading

import torch

from ._ops import add_op_namespace_prefix
from .activation import Form, activate, gradient

DOT_COLUMNS = 128  # columns summed into one partial of `dot` here; a kernel may take more of them


_ieee_lock, _ieee_users, _precision_before = threading.Lock(), 0, None


@contextlib.contextmanager
def _ieee_float32():
    """float32 products stay float32, also where torch.set_float32_matmul_precision lets torch's own be less.

    The setting is the process's: the first of the threads that are inside changes it, the last one restores it.
    """
    global _ieee_users, _precision_before
    matmul = torch.backends.mkldnn.matmul
    with _ieee_lock:
        _ieee_users += 1
        if _ieee_users == 1:
            _precision_before = matmul.fp32_precision
            if _precision_before != "none":
                matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        with _ieee_lock:
            _ieee_users -= 1
            if _ieee_users == 0 and _precision_before != "none":
                matmul.fp32_precision = _precision_before


def _cpu_kernel(function):
    """Registers function as the CPU implementation of the op of its name."""

    @functools.wraps(function)
    def kernel(*args):
        with torch.no_grad(), torch.autocast("cpu", enabled=False), _ieee_float32():
            function(*args)

    torch.library.impl(add_op_namespace_prefix(function.__name__), "cpu")(kernel)
    return function


def accumulator_dtype(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


def _groups(offs, num_rows):
    """(expert, its rows) for every expert that has rows. The GPU kernels clamp wrong offsets; here they are refused."""
    ends = offs.tolist()
    groups = [*enumerate(zip([0, *ends], ends))]
    for e, (start, end) in groups:
        if not start <= end <= num_rows:
            raise ValueError(
                f"offs, or group_sizes of which they are the running sum, must rise from 0 to no more than the "
                f"{num_rows} rows there are, but group {e} has the rows {start} to {end} by offs = {reprlib.repr(ends)}"
            )
    return [(e, slice(start, end)) for e, (start, end) in groups if start < end]


def _assignments(row_assignment, num_rows, device):
    """The assignment of each row as an index tensor; without a map rows are their own assignments."""
    if row_assignment is None:
        return torch.arange(num_rows, device=device)
    return row_assignment.long()


def _dot_partials(z, other):
    """Sums of z * other over DOT_COLUMNS columns at a time, [ceil(N / DOT_COLUMNS), rows]."""
    return torch.stack([block.sum(1) for block in (z * other).split(DOT_COLUMNS, dim=1)])


def _multiply(a, w, offs, row_assignment, top_k, gather, scatter, bias, row_weight, dot_with, dot_by_token, dot, out):
    """out[row or assignment] = row_weight * (a @ w.T + bias), and the row dots; out may be None."""
    _clear(out)
    for rows, assignment, z in _rows_and_products(a, w, offs, row_assignment, top_k, gather, bias):
        if dot is not None:
            other = dot_with[assignment // top_k if dot_by_token else rows].to(z.dtype)
            dot[:, assignment] = _dot_partials(z, other)
        if out is not None:
            if row_weight is not None:
                z = z * row_weight[assignment, None]
            out[assignment if scatter else rows] = z.to(out.dtype)


def _clear(*results):
    """Zeros for the rows of no expert; a result may be None."""
    for result in results:
        if result is not None:
            result.zero_()


def _rows_and_products(a, w, offs, row_assignment, top_k, gather, bias):
    """(rows, their assignments, a @ w.T + bias) for every expert that has rows, in the dtype of sums."""
    num_rows = a.shape[0] if row_assignment is None else row_assignment.shape[0]
    assignments = _assignments(row_assignment, num_rows, a.device)
    dtype = accumulator_dtype(a.dtype)
    for e, rows in _groups(offs, num_rows):
        assignment = assignments[rows]
        # Fresh copies: the bits of a CPU's product depend on where its operands begin.
        z = a[assignment // top_k if gather else rows].to(dtype, copy=True) @ w[e].to(dtype, copy=True).T
        if bias is not None:
            z += bias[e].to(dtype)
        yield rows, assignment, z


def _add_slots(rows, top_k, out):
    """out[t] += the rows of token t, in slot order."""
    for slot in rows.view(out.shape[0], top_k, rows.shape[1]).unbind(1):
        out += slot


@_cpu_kernel
def gemm(a, w, offs, row_assignment, top_k, gather, scatter, bias, row_weight, dot_with, dot, out):
    _multiply(a, w, offs, row_assignment, top_k, gather, scatter, bias, row_weight, dot_with, scatter, dot, out)


@_cpu_kernel
def gemm_combine(a, w, offs, row_assignment, top_k, gather, bias, row_weight, dot_with, dot, out):
    # A rows buffer, not index_add by expert: the slot order of the additions makes the sum reproducible at any top_k.
    rows = out.new_empty(row_assignment.shape[0], out.shape[1])
    _multiply(a, w, offs, row_assignment, top_k, gather, True, bias, row_weight, dot_with, True, dot, rows)
    out.zero_()
    _add_slots(rows, top_k, out)


@_cpu_kernel
def gemm_activation(a, w, offs, row_assignment, top_k, gather, bias, *form_pre_out):
    *form, pre, out = form_pre_out
    _clear(pre, out)
    for rows, _, z in _rows_and_products(a, w, offs, row_assignment, top_k, gather, bias):
        if pre is not None:
            pre[rows] = z.to(pre.dtype)
        out[rows] = activate(z, Form(*form)).to(out.dtype)


@_cpu_kernel
def mlp(x, w_up, w_down, ids, row_weight, bias_up, bias_down, *form_h_rows_sums_out):
    *form, h, rows, sums, out = form_h_rows_sums_out
    row_assignment, offs = (ids.new_empty(size, dtype=torch.int32) for size in (ids.numel(), w_up.shape[0]))
    route(ids, w_up.shape[0], row_assignment, offs)
    top_k = ids.shape[1]
    gemm_activation(x, w_up, offs, row_assignment, top_k, True, bias_up, *form, None, h)
    read = h, w_down, offs, row_assignment, top_k, False
    if rows is not None:
        gemm(*read, True, bias_down, row_weight, None, None, rows)
        return sum_rows(rows, top_k, out)
    gemm_combine(*read, bias_down, row_weight, None, None, out if sums is None else sums)
    if sums is not None:
        out.copy_(sums)


@_cpu_kernel
def gemm_activation_grad(a, w, offs, row_assignment, top_k, gather, row_weight, *form_pre_results):
    *form, pre, dot, d_pre, weighted = form_pre_results
    _clear(d_pre, weighted)
    for rows, assignment, d in _rows_and_products(a, w, offs, row_assignment, top_k, gather, None):
        weight = row_weight[assignment, None]
        h, d_z = gradient(pre[rows].to(d.dtype), weight * d, Form(*form))
        if dot is not None:
            dot[:, assignment] = _dot_partials(d, h)
        if d_pre is not None:
            d_pre[rows] = d_z.to(d_pre.dtype)
        if weighted is not None:
            weighted[rows] = (weight * h).to(weighted.dtype)


@_cpu_kernel
def weight_grad(x, dy, offs, row_assignment, top_k, gather_x, gather_dy, row_weight, accumulate, out):
    if out.shape[2] > 1 and out.stride(2) != 1:  # x and dy change places, so that x is scaled, as in the kernels
        read = dy, x, offs, row_assignment, top_k, gather_dy, gather_x
        weight_grad(*read, row_weight, accumulate, out.transpose(1, 2))
        return
    num_rows = x.shape[0] if row_assignment is None else row_assignment.shape[0]
    assignments = _assignments(row_assignment, num_rows, x.device)
    dtype = accumulator_dtype(x.dtype)
    if not accumulate:
        out.zero_()
    for e, rows in _groups(offs, num_rows):
        assignment = assignments[rows]
        token = assignment // top_k
        d = dy[token if gather_dy else rows].to(dtype, copy=True)
        if row_weight is not None:
            d = (d * row_weight[assignment, None]).to(dy.dtype).to(dtype)  # as the tensor cores read it
        out[e] += d.T @ x[token if gather_x else rows].to(dtype, copy=True)


@_cpu_kernel
def sum_rows(rows, top_k, out):
    total = torch.zeros(out.shape, dtype=accumulator_dtype(rows.dtype), device=out.device)
    _add_slots(rows, top_k, total)
    out.copy_(total)


@_cpu_kernel
def route(ids, num_experts, row_assignment, offs):
    # In int64: a narrower type would wrap num_experts, and a wide id must not be cut to a valid one.
    ids = ids.reshape(-1).to(torch.int64)
    # Dead ids on either side become num_experts, which -1 is modulo num_experts + 1.
    ids = ids.clamp(-1, num_experts).remainder(num_experts + 1)
    # The narrowest key, since a radix sort makes a pass for each of its bytes.
    key_dtype = next(d for d in (torch.uint8, torch.int16, torch.int32) if num_experts <= torch.iinfo(d).max)
    expert_of_row, order = torch.sort(ids.to(key_dtype), stable=True)
    experts = torch.arange(num_experts, dtype=key_dtype, device=ids.device)
    row_assignment.copy_(order)
    offs.copy_(torch.searchsorted(expert_of_row, experts, right=True))


@_cpu_kernel
def group_ends(sizes, offs):
    # Saturated to int32 on the way down, so that a wrong sum cannot wrap to a plausible one.
    offs.copy_(sizes.cumsum(0, dtype=torch.int64).clamp(-1, torch.iinfo(torch.int32).max))
