"""The public functions: every check of arguments, then the routing and a differentiable Function of autograd.py."""

import numbers

import torch

from ._ops import ops
from .activation import CLAMPED, KINDS, Activation, Form
from .autograd import (
    ActivatedProduct,
    ExpertMLP,
    GroupedProduct,
    activated,
    expert_mlp,
    grouped_product,
    refuse_transforms,
    unit_matrices,
    unit_rows,
)
from .reference import accumulator_dtype
from .routing import Routing, sort_by_expert

OPERANDS = (torch.float32, torch.bfloat16, torch.float16)
_WEIGHTS = (*OPERANDS, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_DEVICES = ("cpu", "cuda", "meta")


def moe(
    x: torch.Tensor,
    W: torch.Tensor,
    expert_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Mixture of linear experts: ``y[t] = sum over j of topk_weights[t, j] * (x[t] @ W[expert_ids[t, j]].T)``.

    Tokens are gathered while the product reads them and combined while it writes them; on a GPU nothing of the size of
    all assignments is stored, in the forward or in the backward (but see below for deterministic sums).

    Args:
        x: tokens [T, K], float32, bfloat16 or float16 (on the CPU float64 too).
        W: expert weights [E, N, K] in x's dtype. A transposed view, as of [E, K, N] storage, is read in place.
        expert_ids: [T, k] of int8, int16, int32, int64 or uint8. An id outside [0, E) is skipped: it adds nothing to
            the output and its weight and token get a zero gradient from it.
        topk_weights: [T, k] of float32, bfloat16, float16 or float64; used as float32 (as float64 for float64 x).
        out_dtype: dtype of the result; float32 unless given (float64 for float64 x). The sum over the experts is
            rounded to it once.

    Returns:
        [T, N], contiguous. Differentiable once in x, W and topk_weights, each gradient in its input's dtype; an expert
        without tokens gets a gradient of exactly 0.

    Results and gradients have the same bits in each run for k <= 2. For larger k the experts of a token are added in
    any order, except under ``torch.use_deterministic_algorithms(True)``, which stores the [T * k, N] rows and adds them
    in order. Under autocast x and W are cast to its dtype, unless they are float64; the result still is float32.

    In the backward the incoming gradient is rounded to x's dtype, and for the gradient of W so is its product with the
    routing weight; all sums are taken in float32.

    Raises:
        ValueError: for shapes, dtypes or devices that do not agree or are not supported, naming the argument.
        TypeError: for an argument that is no tensor, and for a DTensor.

    Example:
        >>> x, W = torch.randn(5, 16), torch.randn(4, 8, 16)
        >>> topk_weights, expert_ids = torch.rand(5, 4).topk(2)
        >>> moe(x, W, expert_ids, topk_weights).shape
        torch.Size([5, 8])
    """
    sizes = _check(
        x=(x, "T K"),
        W=(W, "E N K"),
        expert_ids=(expert_ids, "T k", INTEGERS),
        topk_weights=(topk_weights, "T k", _WEIGHTS),
    )
    _check_num_rows("expert_ids", expert_ids, sizes["T"] * sizes["k"])
    x, W = _operands(x=x, W=W)
    out_dtype = _out_dtype(out_dtype, accumulator_dtype(x.dtype), x)
    routing = sort_by_expert(expert_ids, sizes["E"])
    return product(x, W, routing, topk_weights, None, True, True, out_dtype)


def grouped_gemm(a: torch.Tensor, W: torch.Tensor, group_sizes: torch.Tensor) -> torch.Tensor:
    """One product for each group of consecutive rows: ``out[r] = a[r] @ W[e].T`` for the rows r of group e.

    Args:
        a: rows [S, K] grouped by expert, float32, bfloat16 or float16 (on the CPU float64 too).
        W: expert weights [E, N, K] in a's dtype. A transposed view, as of [E, K, N] storage, is read in place.
        group_sizes: [E] of int8, int16, int32, int64 or uint8, the number of rows of each expert, in order. Their sum
            may be less than S; rows behind it are exactly 0 in the result and in the gradient of a.

    Returns:
        [S, N] in a's dtype (autocast's under autocast), contiguous. Differentiable once in a and W; an expert without
        rows gets a gradient of exactly 0. The same bits in each run.

    Raises:
        ValueError: for shapes, dtypes or devices that do not agree or are not supported, naming the argument, and on
            the CPU for a negative size or a sum above S. A GPU's sizes are not read back: there wrong ones give wrong
            numbers, without an access outside the tensors.
        TypeError: for an argument that is no tensor, and for a DTensor.

    Example:
        >>> a, W = torch.randn(7, 16), torch.randn(3, 8, 16)
        >>> grouped_gemm(a, W, torch.tensor([4, 0, 3])).shape
        torch.Size([7, 8])
    """
    sizes = _check(a=(a, "S K"), W=(W, "E N K"), group_sizes=(group_sizes, "E", INTEGERS))
    _check_num_rows("a", a, sizes["S"])
    a, W = _operands(a=a, W=W)
    ends = group_sizes.new_empty(sizes["E"], dtype=torch.int32)
    ops.group_ends(group_sizes.contiguous(), ends)
    return product(a, W, Routing(None, ends, 1, sizes["S"]), None, None, False, False, a.dtype)


def route(expert_ids: torch.Tensor, num_experts: int) -> Routing:
    """Sorts the assignments of tokens to experts by expert, for `gather_gemm` and `gemm_combine`.

    Args:
        expert_ids: [T, k] of int8, int16, int32, int64 or uint8. Ids outside [0, num_experts) are skipped: they sort
            behind all experts and take part in nothing.
        num_experts: the number of experts E, at least 1.

    Returns:
        A `Routing`; it may be used by any number of calls. The sort is stable and never waits for the GPU.

    Raises:
        ValueError: for a wrong shape, dtype or device, for num_experts outside [1, 2**31) and for T * k of 2**31 and
            more.
        TypeError: if expert_ids is no tensor or num_experts no int.

    Example:
        >>> route(torch.tensor([[1, 0], [1, 2]]), 3).offs
        tensor([1, 3, 4], dtype=torch.int32)
    """
    sizes = _check(expert_ids=(expert_ids, "T k", INTEGERS))
    if isinstance(num_experts, bool) or not isinstance(num_experts, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"num_experts must be an int, but it is of type {type(num_experts).__name__}")
    if num_experts < 1 or too_large(num_experts):
        raise ValueError(f"num_experts must be at least 1 and less than 2**31, but it is {num_experts}")
    _check_num_rows("expert_ids", expert_ids, sizes["T"] * sizes["k"])
    return sort_by_expert(expert_ids, num_experts if isinstance(num_experts, torch.SymInt) else int(num_experts))


def gather_gemm(
    x: torch.Tensor,
    W: torch.Tensor,
    routing: Routing,
    *,
    bias: torch.Tensor | None = None,
    activation: str | Activation | None = None,
    gated: bool = True,
    interleaved: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The rows of all experts in expert order: ``out[r] = x[t] @ W[e].T + bias[e]`` for row r of token t and expert e.

    With `gemm_combine` it is the first half of an expert MLP, with an activation or before one of one's own. Tokens are
    gathered while the product reads them.

    Args:
        x: tokens [T, K], float32, bfloat16 or float16 (on the CPU float64 too).
        W: expert weights [E, N, K] in x's dtype. A transposed view, as of [E, K, N] storage, is read in place.
        routing: what `route` returned for these tokens and E experts.
        bias: [E, N] in x's dtype, or None.
        activation, gated, interleaved: what is done to each row while the product writes it, as in `moe_mlp`; None:
            nothing. Where a gradient is asked for, the rows before it are kept in x's dtype.
        out_dtype: dtype of the result, x's unless given (autocast's under autocast).

    Returns:
        [S, N] with S = T * k, or [S, N / 2] of a gated activation, contiguous; rows of skipped ids are exactly 0.
        Differentiable once in x, W and bias, each gradient in its input's dtype and exactly 0 for experts without
        tokens. The result has the same bits in each run; for the gradient of x `moe`'s remark on k > 2 holds.

    Raises:
        ValueError: for shapes, dtypes or devices that do not agree or are not supported, naming the argument.
        TypeError: for an argument of the wrong type, and for a DTensor.

    Example:
        >>> x, W = torch.randn(5, 16), torch.randn(4, 8, 16)
        >>> routing = route(torch.randint(4, (5, 2)), 4)
        >>> gather_gemm(x, W, routing).shape
        torch.Size([10, 8])
    """
    sizes = _check_routing(routing)
    _check(sizes, x=(x, "T K"), W=(W, "E N K"), bias=(bias, "E N"), **_routing_tensors(routing))
    x, W, bias = _operands(x=x, W=W, bias=bias)
    out_dtype = _out_dtype(out_dtype, x.dtype, x)
    if activation is None:
        _check_flags(gated=gated, interleaved=interleaved)
        return product(x, W, routing, None, bias, True, False, out_dtype)
    form = _form(activation, gated, interleaved)
    if gated and W.shape[1] % 2:
        raise ValueError(f"W must have rows of gate and up, an even number, but its shape is {list(W.shape)}")
    read = unit_rows(x), unit_matrices(W), _contiguous(bias)
    routing = _dense(routing)
    if not _records(*read):
        return activated(*read, routing, form, out_dtype, False)[1]
    return ActivatedProduct.apply(*read, *routing, form, out_dtype)


def moe_mlp(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    expert_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    activation: str | Activation = "silu",
    gated: bool = True,
    interleaved: bool = False,
    bias_up: torch.Tensor | None = None,
    bias_down: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    combine: str | None = None,
    weight_grads: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Mixture of expert MLPs: ``y[t] = sum over j of topk_weights[t, j] * mlp(expert_ids[t, j], x[t])`` with
    ``mlp(e, v) = f(v @ w_up[e].T + bias_up[e]) @ w_down[e].T + bias_down[e]``.

    Two products: tokens are gathered and the activation f is applied in the first, rows are weighted and combined in
    the second. Between them [S, I] rows are stored, S = T * k, and where a gradient is asked for, what they are the
    activation of, which is all that the backward keeps of that size.

    Args:
        x: tokens [T, H], float32, bfloat16 or float16 (on the CPU float64 too).
        w_up: [E, 2 * I, H] in x's dtype, with ``gated=False`` [E, I, H]. A transposed view is read in place.
        w_down: [E, H, I] in x's dtype. A transposed view is read in place.
        expert_ids: [T, k] of int8, int16, int32, int64 or uint8. An id outside [0, E) is skipped.
        topk_weights: [T, k] of float32, bfloat16, float16 or float64; used as float32 (as float64 for float64 x).
        activation: f, an `Activation` or the name of its kind.
        gated: f is of two halves of a row, gate and up; else of each value by itself.
        interleaved: gate and up take turns in the rows of w_up; else all gates stand before all ups.
        bias_up: [E, 2 * I] or [E, I] in x's dtype, or None.
        bias_down: [E, H] in x's dtype, or None.
        out_dtype: dtype of the result; x's unless given (autocast's under autocast). The sum over the experts is taken
            in float32 (float64 for float64 x) and rounded to it once (but see combine).
        combine: how the k > 2 experts of a token are added, and those of its gradient; two are in any case as in None.

            - None: to the token's row at once, in any order, unless ``torch.use_deterministic_algorithms(True)`` is on.
            - ``"ordered"``: [S, H] rows are stored in float32 (float64 for float64 x) and added in order.
            - ``"rounded"``: the rows are stored in the result's dtype, each rounded once, and added in order.
        weight_grads: of w_up and of w_down a tensor that the backward adds its gradient to, in their shape, in x's
            dtype or float32, contiguous in the last dimension or the one before, apart in memory from the weights and
            each other, as views of one buffer may be; the weight itself then gets no gradient. Each backward through
            this call adds to it, whatever gradients it was asked for, unless the weight requires none. None: the
            weight gets it.

    Returns:
        [T, H], contiguous. Differentiable once in x, the weights, the biases and topk_weights, each gradient in its
        input's dtype and exactly 0 for experts without tokens. The same bits in each run for k <= 2 or in order.

    Raises:
        ValueError: for shapes, dtypes, devices or strides that do not agree or are not supported, naming the argument,
            and for weight_grads that share memory with a weight or each other, which a compiled graph does not ask.
        TypeError: for an argument of the wrong type, and for a DTensor.

    Example:
        >>> x, w_up, w_down = torch.randn(5, 16), torch.randn(4, 2 * 24, 16), torch.randn(4, 16, 24)
        >>> topk_weights, expert_ids = torch.rand(5, 4).topk(2)
        >>> moe_mlp(x, w_up, w_down, expert_ids, topk_weights).shape
        torch.Size([5, 16])
    """
    form = _form(activation, gated, interleaved)
    rows = "2I" if gated else "I"
    sizes = _check(
        x=(x, "T H"),
        w_down=(w_down, "E H I"),
        w_up=(w_up, f"E {rows} H"),
        expert_ids=(expert_ids, "T k", INTEGERS),
        topk_weights=(topk_weights, "T k", _WEIGHTS),
        bias_up=(bias_up, f"E {rows}"),
        bias_down=(bias_down, "E H"),
    )
    if gated and sizes["2I"] != 2 * sizes["I"]:
        raise ValueError(
            f"w_up must have the shape [E, 2I, H] with 2I = {2 * sizes['I']} where w_down has I = {sizes['I']}, but "
            f"its shape is {list(w_up.shape)}"
        )
    _check_num_rows("expert_ids", expert_ids, sizes["T"] * sizes["k"])
    given = {"x": x, "w_up": w_up, "w_down": w_down, "bias_up": bias_up, "bias_down": bias_down}
    x, w_up, w_down, bias_up, bias_down = _operands(**given)
    out_dtype = _out_dtype(out_dtype, x.dtype, x)
    if combine not in (None, "ordered", "rounded"):
        raise ValueError(f"combine must be None, 'ordered' or 'rounded', but it is {combine!r}")
    _check_buffers(weight_grads, w_up, w_down)
    _check_apart(weight_grads, w_up=given["w_up"], w_down=given["w_down"])
    read = (
        unit_rows(x), unit_matrices(w_up), unit_matrices(w_down), _row_weight(topk_weights, x),
        _contiguous(bias_up), _contiguous(bias_down),
    )  # fmt: skip
    if not _records(*read):
        return expert_mlp(*read, expert_ids, form, out_dtype, combine)
    routing = sort_by_expert(expert_ids, sizes["E"])
    return ExpertMLP.apply(*read, *routing, form, out_dtype, combine, tuple(weight_grads))


def gemm_combine(
    h: torch.Tensor,
    W: torch.Tensor,
    routing: Routing,
    topk_weights: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Sums the experts' results by token: ``y[t] = sum over its rows r of weight * (h[r] @ W[e].T + bias[e])``.

    With `gather_gemm` it is the half of an expert MLP behind the activation. Rows are combined while the product
    writes them.

    Args:
        h: rows [S, K] in expert order with S = T * k, as `gather_gemm` returns them; float32, bfloat16 or float16 (on
            the CPU float64 too). Rows of skipped ids are not read.
        W: expert weights [E, N, K] in h's dtype. A transposed view, as of [E, K, N] storage, is read in place.
        routing: what `route` returned for these tokens and E experts.
        topk_weights: [T, k] of float32, bfloat16, float16 or float64; used as float32 (as float64 for float64 h).
        bias: [E, N] in h's dtype, or None.
        out_dtype: dtype of the result; float32 unless given (float64 for float64 h). The sum over the experts is
            rounded to it once.

    Returns:
        [T, N], contiguous. Differentiable once in h, W, topk_weights and bias, each gradient in its input's dtype and
        exactly 0 for experts without tokens and rows of skipped ids. `moe`'s remark on reproducible bits holds.

    Raises:
        ValueError: for shapes, dtypes or devices that do not agree or are not supported, naming the argument.
        TypeError: for an argument of the wrong type, and for a DTensor.

    Example:
        >>> topk_weights, expert_ids = torch.rand(5, 4).topk(2)
        >>> h, W = torch.randn(10, 16), torch.randn(4, 8, 16)
        >>> gemm_combine(h, W, route(expert_ids, 4), topk_weights).shape
        torch.Size([5, 8])
    """
    sizes = _check_routing(routing)
    _check(
        sizes,
        h=(h, "S K"),
        W=(W, "E N K"),
        topk_weights=(topk_weights, "T k", _WEIGHTS),
        bias=(bias, "E N"),
        **_routing_tensors(routing),
    )
    h, W, bias = _operands(h=h, W=W, bias=bias)
    out_dtype = _out_dtype(out_dtype, accumulator_dtype(h.dtype), h)
    return product(h, W, routing, topk_weights, bias, False, True, out_dtype)


@torch.no_grad()
def weight_grad(
    x: torch.Tensor,
    dy: torch.Tensor,
    routing: Routing,
    topk_weights: torch.Tensor | None = None,
    *,
    gather_x: bool = True,
    gather_dy: bool = True,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """Per expert the sum of outer products, ``out[e] = sum over its rows r of topk_weights[r] * outer(dy[r], x[r])``.

    It is the gradient of W in the products above, for backward passes of one's own and for adding to a gradient that is
    there already.

    Args:
        x: tokens [T, K], float32, bfloat16 or float16 (on the CPU float64 too); with ``gather_x=False`` rows [S, K] in
            expert order.
        dy: incoming gradients by token [T, N] in x's dtype; with ``gather_dy=False`` by row [S, N] in expert order.
        routing: what `route` returned for these tokens and E experts. Rows of skipped ids are not read.
        topk_weights: [T, k] of float32, bfloat16, float16 or float64, or None for weights of 1.
        gather_x, gather_dy: whether x and dy are read by token.
        out: where the result goes, [E, N, K] in x's dtype or float32, contiguous in K or in N, without elements that
            share a place; a new tensor in x's dtype (autocast's under autocast) unless given.
        accumulate: add to what is in out, each value once, and round the sum once; in float32 a GPU may take subnormal
            numbers for 0 there.

    Returns:
        out. Not differentiable. An expert without rows has exactly 0, or keeps what was there. The same bits in each
        run. Under autocast x and dy are cast to its dtype, unless they are float64. ``topk_weights * dy`` is rounded to
        x's dtype before the products, which are summed in float32; where out is contiguous in N it is
        ``topk_weights * x`` instead.

    Raises:
        ValueError: for shapes, dtypes, devices or strides that do not agree or are not supported, naming the argument.
        TypeError: for an argument of the wrong type, and for a DTensor.

    Example:
        >>> routing = route(torch.tensor([[1, 0], [1, 2]]), 3)
        >>> weight_grad(torch.randn(2, 16), torch.randn(2, 8), routing).shape
        torch.Size([3, 8, 16])
    """
    _check_flags(gather_x=gather_x, gather_dy=gather_dy, accumulate=accumulate)
    operands = {"x": (x, "T K" if gather_x else "S K"), "dy": (dy, "T N" if gather_dy else "S N")}
    weights = {} if topk_weights is None else {"topk_weights": (topk_weights, "T k", _WEIGHTS)}
    results = {} if out is None else {"out": (out, "E N K")}
    sizes = _check(_check_routing(routing), **_routing_tensors(routing), **operands, **weights, **results)
    x, dy = _of_one_dtype(x=x, dy=dy)
    if out is None:
        if accumulate:
            raise ValueError("out must be given to accumulate into, but it is None")
        out = x.new_empty(sizes["E"], sizes["N"], sizes["K"])
    else:
        _check_gradient("out", out, x.dtype)
    row_weight = None if topk_weights is None else _row_weight(topk_weights, x)
    row_assignment, offs = routing.row_assignment.contiguous(), routing.offs.contiguous()
    read = unit_rows(x), unit_rows(dy), offs, row_assignment, routing.top_k, gather_x, gather_dy
    ops.weight_grad(*read, row_weight, accumulate, out)
    return out


def product(x, W, routing, topk_weights, bias, gather, combine, out_dtype):
    """Brings the tensors into the layouts that the ops read, by differentiable steps, and multiplies."""
    row_weight = None if topk_weights is None else _row_weight(topk_weights, x)
    x, W, bias, routing = unit_rows(x), unit_matrices(W), _contiguous(bias), _dense(routing)
    way = gather, combine, out_dtype
    if not _records(x, W, row_weight, bias):
        return grouped_product(x, W, routing, *way, row_weight=row_weight, bias=bias)
    return GroupedProduct.apply(x, W, row_weight, bias, *routing, *way)


def _dense(routing):
    row_assignment, offs, top_k, num_tokens = routing
    return Routing(_contiguous(row_assignment), offs.contiguous(), top_k, num_tokens)


def _contiguous(tensor):
    return None if tensor is None else tensor.contiguous()


def _row_weight(topk_weights, x):
    return topk_weights.to(accumulator_dtype(x.dtype)).reshape(-1).contiguous()


def _records(*tensors):
    """Whether a gradient may be asked for. If not, a Function would take the host longer than all the checks."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _form(activation, gated, interleaved):
    """The checked activation, as the ops are told of it."""
    if isinstance(activation, str):
        activation = Activation(activation)
    if not isinstance(activation, Activation):
        raise TypeError(f"activation must be an Activation or a str, but it is of type {_kind(activation, Activation)}")
    _check_flags(gated=gated, interleaved=interleaved)
    kind, limit, alpha = activation
    if kind not in (*KINDS, CLAMPED):
        raise ValueError(f"activation must be one of {', '.join((*KINDS, CLAMPED))}, but it is {kind!r}")
    for name, number in (("limit", limit), ("alpha", alpha)):
        is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
        if number is not None and not (is_number and 0 < number <= torch.finfo(torch.float32).max):
            raise ValueError(f"activation.{name} must be a positive number of float32 or None, but it is {number!r}")
    if alpha is not None and kind not in ("silu", CLAMPED):
        raise ValueError(f"activation.alpha must be None for {kind}, but it is {alpha!r}")
    if not gated and kind == CLAMPED:
        raise ValueError(f"gated must be True for {CLAMPED}, but it is {gated}")
    if not gated and limit is not None:
        raise ValueError(f"activation.limit must be None without a gate, but it is {limit!r}")
    if not gated and interleaved:
        raise ValueError(f"interleaved must be False without a gate, but it is {interleaved}")
    return Form.of(activation, gated, interleaved)


def _check(sizes=None, **arguments):
    """Checks name=(tensor, "its dimensions", dtypes or nothing) against each other; biases may be None.

    A dimension has one size wherever its letter stands, and all tensors have one device. Returns the sizes by letter.
    """
    sizes = dict(sizes or {})
    first = None
    for name, (tensor, dims, *dtypes) in arguments.items():
        if tensor is None and name.startswith("bias"):
            continue
        dims = dims.split()
        check_tensor(name, tensor)
        found = list(tensor.shape)
        if len(found) != len(dims):
            raise ValueError(f"{name} must have the shape [{', '.join(dims)}], but its shape is {found}")
        for dim, size in zip(dims, found):
            if sizes.setdefault(dim, size) != size:
                wanted = f"[{', '.join(dims)}] with {dim} = {sizes[dim]}"
                raise ValueError(f"{name} must have the shape {wanted}, but its shape is {found}")
        if dtypes and tensor.dtype not in dtypes[0]:
            raise ValueError(f"{name} must have one of the dtypes {_names(dtypes[0])}, but it is {tensor.dtype}")
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            raise ValueError(f"{name} must be on {first[1]} as {first[0]} is, but it is on {tensor.device}")
    refuse_transforms({name: tensor for name, (tensor, *_) in arguments.items()})
    return sizes


def check_tensor(name, tensor):
    kind = type(tensor).__name__
    if not isinstance(tensor, torch.Tensor):
        hint = " of torch.fx: call the function as the package's attribute" if kind == "Proxy" else ""
        raise TypeError(f"{name} must be a tensor, but it is of type {kind}{hint}")
    # The ops write into plain results, which such a tensor would do once for each tensor inside it.
    if hasattr(tensor, "__tensor_flatten__"):
        hint = ": call .to_local() first" if kind == "DTensor" else ""
        raise TypeError(f"{name} must be a plain tensor, but it is a {kind}{hint}")
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise ValueError(f"{name} must be a strided tensor, but its layout is {layout}")
    if tensor.device.type not in _DEVICES:
        raise ValueError(f"{name} must be on a CPU or a CUDA GPU, but it is on {tensor.device}")


def too_large(size):
    """Whether 32 bits cannot count a size. An exported graph takes any, and leaves it to a GPU's ops to ask."""
    return not torch.compiler.is_exporting() and size >= 2**31


def _check_num_rows(name, tensor, num_rows):
    if too_large(num_rows):
        raise ValueError(f"{name} must make fewer than 2**31 rows, but its shape is {list(tensor.shape)}")


def _check_routing(routing):
    """The sizes that a routing fixes for the tensors that go with it."""
    if not isinstance(routing, Routing):
        raise TypeError(f"routing must be a Routing, as route returns it, but it is of type {_kind(routing, Routing)}")
    return {"T": routing.num_tokens, "k": routing.top_k, "S": routing.num_tokens * routing.top_k}


def _routing_tensors(routing):
    return {
        "routing.row_assignment": (routing.row_assignment, "S", (torch.int32,)),
        "routing.offs": (routing.offs, "E", (torch.int32,)),
    }


def _operands(**operands):
    """The floating operands as autocast wants them, checked to hold an expert and to have one supported dtype."""
    for name, operand in operands.items():
        if operand is not None and operand.dim() == 3 and (operand.shape[0] < 1 or too_large(operand.shape[0])):
            found = list(operand.shape)
            raise ValueError(f"{name} must hold at least one expert and fewer than 2**31, but its shape is {found}")
    return _of_one_dtype(**operands)


def autocasts(device):
    """Whether autocast casts operands on this type of device."""
    return device != "meta" and torch.is_autocast_enabled(device)


def _of_one_dtype(**operands):
    (first, tensor), *_ = operands.items()
    device, given = tensor.device.type, operands
    if autocasts(device):
        autocast_dtype = torch.get_autocast_dtype(device)
        operands = {n: t.to(autocast_dtype) if t is not None and t.dtype in OPERANDS else t for n, t in given.items()}
    dtype = operands[first].dtype
    supported = OPERANDS if device == "cuda" else (*OPERANDS, torch.float64)
    if dtype not in supported:
        raise ValueError(f"{first} must have one of the dtypes {_names(supported)} on {device}, but it is {dtype}")
    for name, operand in operands.items():
        if operand is not None and operand.dtype is not dtype:
            raise ValueError(f"{name} must be {dtype} as {first} is, but it is {given[name].dtype}")
    return operands.values()


def _check_flags(**flags):
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, but it is of type {type(flag).__name__}")


def _check_buffers(weight_grads, *weights):
    """Checks what gradients of the weights are added to."""
    if not isinstance(weight_grads, (tuple, list)):
        raise TypeError(f"weight_grads must be a tuple, but it is of type {type(weight_grads).__name__}")
    if len(weight_grads) != len(weights):
        raise ValueError(f"weight_grads must have {len(weights)} entries, but it has {len(weight_grads)}")
    for i, (buffer, w) in enumerate(zip(weight_grads, weights)):
        if buffer is None:
            continue
        name = f"weight_grads[{i}]"
        check_tensor(name, buffer)
        if buffer is w:
            raise ValueError(f"{name} must be another tensor than the weight, but it is the weight")
        if buffer.shape != w.shape or buffer.device != w.device:
            raise ValueError(
                f"{name} must be like the weight, {list(w.shape)} on {w.device}, but its shape is "
                f"{list(buffer.shape)} on {buffer.device}"
            )
        _check_gradient(name, buffer, w.dtype)


def _check_apart(weight_grads, **others):
    """Checks that no gradient is added to a weight, which is still read, or to the other gradient."""
    if torch.compiler.is_compiling():  # the compiler's tensors do not know what they will share
        return
    for i, buffer in enumerate(weight_grads):
        if buffer is None:
            continue
        name = f"weight_grads[{i}]"
        for other, tensor in others.items():
            if _share_memory(buffer, tensor):
                raise ValueError(f"{name} must not share memory with {other}, but both lie in one storage and overlap")
        others[name] = buffer


def _share_memory(a, b):
    """Whether two tensors [E, ., .] of one storage overlap. What interleaves counts too, but not by expert."""
    if a.numel() == 0 or b.numel() == 0 or not torch._C._is_alias_of(a, b):
        return False
    shift = b.storage_offset() * b.itemsize - a.storage_offset() * a.itemsize
    if not -_span(b) < shift < _span(a):
        return False
    period, of_a, of_b = a.stride(0) * a.itemsize, _span(a[0]), _span(b[0])
    if period != b.stride(0) * b.itemsize or max(of_a, of_b) > period:
        return True
    return shift % period < of_a or shift % period + of_b > period


def _span(tensor):
    """The bytes from a tensor's first element to the end of its last."""
    return tensor.itemsize * (
        1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )


def _check_gradient(name, out, dtype):
    """Checks that a gradient of operands of this dtype can be written to out."""
    if out.dtype not in (supported := dict.fromkeys((dtype, accumulator_dtype(dtype)))):
        raise ValueError(f"{name} must be {' or '.join(map(str, supported))}, but it is {out.dtype}")
    if all(out.shape[d] > 1 and out.stride(d) != 1 for d in (1, 2)):
        raise ValueError(
            f"{name} must be contiguous in its last dimension or the one before, but its strides are {out.stride()}"
        )
    if _overlaps(out):
        raise ValueError(
            f"{name} must not have dimensions that overlap or interleave, but its shape is {list(out.shape)} and its "
            f"strides are {out.stride()}"
        )


def _overlaps(tensor):
    """Whether two elements may have one place. Dimensions that interleave without that count too."""
    if 0 in tensor.shape:
        return False
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    # A dimension steps over all that those of smaller strides reach; sorting them would break up a compiled graph.
    return any(
        stride < 1 + sum((n - 1) * s for j, (s, n) in enumerate(dims) if (s < stride) | ((s == stride) & (j < i)))
        for i, (stride, _) in enumerate(dims)
    )


def _out_dtype(out_dtype, default, operand):
    if out_dtype is None:
        return default
    supported = (*OPERANDS, torch.float64) if operand.dtype is torch.float64 else OPERANDS
    if out_dtype not in supported:
        raise ValueError(f"out_dtype must be one of {_names(supported)} here, but it is {out_dtype!r}")
    return out_dtype


def _kind(value, wanted):
    """The name of value's type; where only the module tells it from the wanted one, with that."""
    kind = type(value)
    return kind.__name__ if kind.__name__ != wanted.__name__ else f"{kind.__module__}.{kind.__name__}, of another build"


def _names(dtypes):
    return ", ".join(map(str, dtypes))
