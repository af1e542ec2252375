"""transformers' experts function: an experts module, read as transformers' own functions read it, on our products."""

from types import MethodType
from typing import NamedTuple

import torch

from .activation import CLAMPED, Activation
from .functional import autocasts, gather_gemm, gemm_combine, moe_mlp, product, route
from .routing import Routing

# What these functions, and modules of these classes, compute. They are known by name: transformers need not be there.
_ACTIVATIONS = {
    "torch.nn.functional.silu": Activation("silu"),
    "torch.nn.functional.relu": Activation("relu"),
    "torch.nn.modules.activation.SiLU": Activation("silu"),
    "torch.nn.modules.activation.ReLU": Activation("relu"),
    "transformers.activations.SiLUActivation": Activation("silu"),
    "transformers.activations.QuickGELUActivation": Activation("silu", alpha=1.702),
    "transformers.activations.GELUActivation": Activation("gelu"),
    "transformers.activations.GELUTanh": Activation("gelu_tanh"),
    "transformers.activations.NewGELUActivation": Activation("gelu_tanh"),
    "transformers.activations.FastGELUActivation": Activation("gelu_tanh"),
    "transformers.activations.AccurateGELUActivation": Activation("gelu_tanh"),
    "transformers.activations.ReLUSquaredActivation": Activation("relu2"),
}


_LARGEST = torch.finfo(torch.float32).max  # of the limits that an `Activation` has


class Gate(NamedTuple):
    """What a module's ``_apply_gate`` computes."""

    kind: str | None = None  # of the activation; None: the module's act_fn
    limit: str | None = None  # the module's attributes that hold limit and alpha
    alpha: str | None = None
    interleaved: bool = False


# The same of their gates. A model with a gate of its own that is not listed computes it itself, as does a subclass.
_MODELS = "transformers.models"
_GATES = {
    "transformers.integrations.moe._default_apply_gate": Gate(),
    f"{_MODELS}.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate": Gate(CLAMPED, "limit", "alpha", True),
    f"{_MODELS}.openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts._apply_gate": Gate(
        CLAMPED, "limit", "alpha"
    ),
    f"{_MODELS}.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts._apply_gate": Gate(
        CLAMPED, "swiglu_limit", "swiglu_alpha"
    ),
    f"{_MODELS}.deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts._apply_gate": Gate(limit="limit"),
    f"{_MODELS}.hy_v4.modeling_hy_v4.HYV4Experts._apply_gate": Gate("silu", "swiglu_limit"),
    f"{_MODELS}.hy_v4_vl.modeling_hy_v4_vl.HYV4VLExperts._apply_gate": Gate("silu", "swiglu_limit"),
    f"{_MODELS}.glm5_next.modeling_glm5_next.Glm5NextTextExperts._apply_gate": Gate("silu", "swiglu_limit"),
    f"{_MODELS}.beam.modeling_beam.BeamExperts._apply_gate": Gate(),
}


def experts_forward(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The experts of a transformers model, ``y[t] = sum over j of top_k_weights[t, j] * mlp(top_k_index[t, j], x[t])``.

    It goes into transformers' table of such functions; a model asks for it by the name that it gets there. Where the
    activation is one that `moe_mlp` has, the module's are `moe_mlp`'s two products, and act_fn is not called; else the
    module activates the rows between `gather_gemm` and `gemm_combine` itself.

    Args:
        module: an experts module. Read are ``gate_up_proj`` [E, 2 * I, H], or ``up_proj`` [E, I, H] where ``has_gate``
            is False, ``down_proj`` [E, H, I], both with the last two dimensions swapped where ``is_transposed``; where
            ``has_bias`` ``gate_up_proj_bias`` [E, 2 * I] or ``up_proj_bias`` [E, I] and ``down_proj_bias`` [E, H];
            ``act_fn``; ``_apply_gate``, without which gate and up are halves of a row or, where ``is_concatenated`` is
            False, take turns in it; where ``has_post_expert_norm`` ``post_expert_norm``, applied to each expert's
            result before it is weighted, for which [T * k, H] rows are stored. A flag that is missing is False, but
            has_gate follows the weights that there are and is_concatenated is True.
        hidden_states: x, tokens [T, H], float32, bfloat16 or float16 (on the CPU float64 too); cast to the weights'
            dtype, under autocast with them to its.
        top_k_index: [T, k] of int8, int16, int32, int64 or uint8. An id outside [0, E) is skipped, as are -1 and the E
            that stands for the experts of other ranks in expert parallelism.
        top_k_weights: [T, k] of float32, bfloat16, float16 or float64; used as float32 (as float64 for float64 x).

    Returns:
        [T, H] in hidden_states' dtype, summed in float32 (float64 for float64 x) and rounded once. Differentiable once
        in hidden_states, top_k_weights and the module's parameters.

    Raises:
        ValueError: for shapes, dtypes or devices that do not agree or are not supported, naming `moe_mlp`'s argument.
        TypeError: for an argument that is no tensor, for a DTensor, and for a module without these weights.

    Example:
        >>> experts = torch.nn.Module()
        >>> experts.gate_up_proj, experts.down_proj = torch.randn(4, 2 * 24, 16), torch.randn(4, 16, 24)
        >>> experts.act_fn = torch.nn.SiLU()
        >>> topk_weights, expert_ids = torch.rand(5, 4).topk(2)
        >>> experts_forward(experts, torch.randn(5, 16), expert_ids, topk_weights).shape
        torch.Size([5, 16])
    """
    gated = getattr(module, "has_gate", hasattr(module, "gate_up_proj"))
    up = "gate_up_proj" if gated else "up_proj"
    w_up, w_down = (getattr(module, name, None) for name in (up, "down_proj"))
    if w_up is None or w_down is None:
        raise TypeError(f"module must have {up} and down_proj, got {type(module).__name__}")
    if getattr(module, "is_transposed", False):
        w_up, w_down = w_up.transpose(1, 2), w_down.transpose(1, 2)
    has_bias = getattr(module, "has_bias", False)
    bias_up, bias_down = (getattr(module, f"{name}_bias") if has_bias else None for name in (up, "down_proj"))
    norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    x, out_dtype = hidden_states, hidden_states.dtype
    if not autocasts(x.device.type):
        x = x.to(w_up.dtype)

    activation = _activation(module, gated)
    if activation and norm is None:
        biases = {"bias_up": bias_up, "bias_down": bias_down}
        return moe_mlp(x, w_up, w_down, top_k_index, top_k_weights, **activation, **biases, out_dtype=out_dtype)
    routing = route(top_k_index, w_up.shape[0])
    h = gather_gemm(x, w_up, routing, bias=bias_up, **activation)
    if not activation:
        h = (_gated(module, h) if gated else module.act_fn(h)).to(h.dtype)
    if norm is None:
        return gemm_combine(h, w_down, routing, top_k_weights, bias=bias_down, out_dtype=out_dtype)
    w_down, bias_down = (t if t is None else t.to(h.dtype) for t in (w_down, bias_down))
    rows = product(h, w_down, Routing(None, routing.offs, 1, h.shape[0]), None, bias_down, False, False, h.dtype)
    return _weighted_sum(norm(rows), routing, top_k_weights).to(out_dtype)


def _activation(module, gated):
    """The module's activation as arguments of `moe_mlp`; none where only the module itself can compute it."""
    gate = Gate()
    if hasattr(module, "_apply_gate") and gated:
        own = module._apply_gate
        gate = _GATES.get(_full_name(own.__func__)) if isinstance(own, MethodType) else None
    elif gated:
        gate = Gate(interleaved=_interleaved(module))
    if gate is None:
        return {}
    if gate.kind:
        activation = Activation(gate.kind)
    else:
        act_fn = module.act_fn
        activation = _ACTIVATIONS.get(_full_name(type(act_fn) if isinstance(act_fn, torch.nn.Module) else act_fn))
    if activation is None:
        return {}
    attributes = ("limit", gate.limit), ("alpha", gate.alpha)
    given = {name: getattr(module, attribute) for name, attribute in attributes if attribute}
    if not all(isinstance(value, (int, float)) and 0 < value <= _LARGEST for value in given.values()):
        return {}
    return {"activation": activation._replace(**given), "gated": gated, "interleaved": gate.interleaved}


@torch.compiler.assume_constant_result  # the compiler does not know that a function's name is a str
def _full_name(thing):
    return f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', None)}"


def _interleaved(module):
    return not getattr(module, "is_concatenated", True)


def _gated(module, z):
    if hasattr(module, "_apply_gate"):
        return module._apply_gate(z)
    gate, up = (z[..., ::2], z[..., 1::2]) if _interleaved(module) else z.chunk(2, dim=-1)
    return module.act_fn(gate) * up


def _weighted_sum(rows, routing, topk_weights):
    """Rows in expert order back to tokens, [T, H] float32 or float64, in plain torch: rows of skipped ids are left."""
    row = routing.row_assignment.argsort().view(topk_weights.shape)
    live = row < routing.offs[-1]
    weights = torch.where(live, topk_weights, 0)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return (torch.where(live[..., None], rows[row], 0).to(dtype) * weights.to(dtype)[..., None]).sum(1)
