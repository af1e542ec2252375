"""What the package is compared with. Each takes the package's own arguments, all tensors, and is differentiable."""

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F

MISSING = {}  # why a peer is left out, by its name


def _optional(peer: str, module: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except Exception as error:  # not an ImportError alone: some look for a GPU or a compiler first
        MISSING[peer] = f"{type(error).__name__}: {error}"
        return None


_scattermoe = _optional("ScatterMoE", "scattermoe.parallel_experts")
_sonicmoe = _optional("SonicMoE", "sonicmoe")
_transformers = _optional("transformers", "transformers.integrations.moe")


def grouped_mm(rows, weight, group_sizes, product=torch._grouped_mm) -> torch.Tensor:
    """torch's grouped product of rows that are grouped already, or another of the same arguments."""
    ends = group_sizes.cumsum(0).to(torch.int32)
    return product(rows, weight.transpose(1, 2), ends)


def unfused(x, weight, expert_ids, topk_weights) -> torch.Tensor:
    """Sort, gather, torch's grouped product, weight, index_add: float32 [T, N], without waiting for the device."""

    def product(rows, ends):
        return torch._grouped_mm(rows, weight.transpose(1, 2), ends)

    return _unfused(product, weight.shape[0], x, expert_ids, topk_weights)


def unfused_mlp(x, w_up, w_down, expert_ids, topk_weights) -> torch.Tensor:
    """The same of SwiGLU MLPs, in x's dtype [T, H]."""

    def mlp(rows, ends):
        h = _swiglu(torch._grouped_mm(rows, w_up.transpose(1, 2), ends))
        return torch._grouped_mm(h, w_down.transpose(1, 2), ends)

    return _unfused(mlp, w_up.shape[0], x, expert_ids, topk_weights).to(x.dtype)


def _unfused(experts: Callable, num_experts: int, x, expert_ids, topk_weights) -> torch.Tensor:
    """experts: of rows in expert order, and where each expert's end."""
    sorted_ids, order = expert_ids.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(num_experts, device=x.device), right=True).to(torch.int32)
    tokens = order // expert_ids.shape[1]
    weighted = experts(x.index_select(0, tokens), ends) * topk_weights.flatten()[order, None]
    return weighted.new_zeros(x.shape[0], weighted.shape[1]).index_add(0, tokens, weighted)


def _swiglu(rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return F.silu(gate) * up


def scattermoe(x, weight, expert_ids, topk_weights) -> torch.Tensor:
    """ScatterMoE's fused linear layer in Triton, [T, N] in x's dtype."""
    routing = _scattermoe.flatten_sort_count(expert_ids, num_experts=weight.shape[0])
    gates = topk_weights.to(x.dtype)
    return _scattermoe.parallel_linear(x, weight.transpose(1, 2), expert_ids.shape[1], *routing, gates=gates)


def scattermoe_mlp(x, w_up, w_down, expert_ids, topk_weights) -> torch.Tensor:
    """Its gated MLP, [T, H] in x's dtype."""
    routing = _scattermoe.flatten_sort_count(expert_ids, num_experts=w_up.shape[0])
    top_k, gates = expert_ids.shape[1], topk_weights.to(x.dtype)
    h = _swiglu(_scattermoe.parallel_linear(x, w_up.transpose(1, 2), top_k, *routing, grouped_out=True))
    return _scattermoe.parallel_linear(h, w_down.transpose(1, 2), 1, *routing, gates=gates, grouped_in=True)


def sonicmoe_mlp(x, w_up, w_down, expert_ids, topk_weights) -> torch.Tensor:
    """SonicMoE's gated MLP in CuTe, for a routing that is given, [T, H] in x's dtype."""
    num_tokens, top_k = expert_ids.shape
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=x.device).repeat_interleave(top_k)
    y, _ = _sonicmoe.moe_general_routing_inputs(
        x,
        topk_weights.flatten(),
        tokens,
        expert_ids.flatten().to(torch.int32),
        w_up.permute(1, 2, 0),
        None,
        w_down.permute(1, 2, 0),
        None,
        E=w_up.shape[0],
        stream_id=torch.cuda.current_stream().cuda_stream,
        activation_type=_sonicmoe.enums.ActivationType.SWIGLU,
        is_inference_mode_enabled=False,
        concat_layout=True,
    )
    return y


class _Experts(torch.nn.Module):
    """An expert layer as transformers' functions read it."""

    has_gate, has_bias, is_transposed, is_concatenated, has_post_expert_norm = True, False, False, True, False
    _is_expert_parallel = False

    def __init__(self, w_up, w_down):
        super().__init__()
        self.num_experts, self.gate_up_proj, self.down_proj = w_up.shape[0], w_up, w_down

    def _apply_gate(self, rows):
        return _swiglu(rows)


def _transformers_mlp(function: str, x, w_up, w_down, expert_ids, topk_weights) -> torch.Tensor:
    return getattr(_transformers, function)(_Experts(w_up, w_down), x, expert_ids, topk_weights)


TRANSFORMERS = {  # its two implementations
    f"transformers {name}": partial(_transformers_mlp, f"{name}_experts_forward")
    for name in ("batched_mm", "grouped_mm")
    if _transformers
}


def loop(x, weight, expert_ids, topk_weights) -> torch.Tensor:
    """A MoE in plain torch, one expert after another: [T, N] in the wider of x's and topk_weights' dtypes."""
    return _loop(lambda rows, e: rows @ weight[e].T, weight.shape[0], x, expert_ids, topk_weights)


def mlp_loop(x, w_up, w_down, expert_ids, topk_weights) -> torch.Tensor:
    """The same of SwiGLU MLPs."""

    def mlp(rows, e):
        return _swiglu(rows @ w_up[e].T) @ w_down[e].T

    return _loop(mlp, w_up.shape[0], x, expert_ids, topk_weights)


def _loop(expert: Callable, num_experts: int, x, expert_ids, topk_weights) -> torch.Tensor:
    """expert: of its rows and its number."""
    y = 0
    for e in range(num_experts):
        tokens, slots = (expert_ids == e).nonzero(as_tuple=True)
        part = expert(x[tokens], e) * topk_weights[tokens, slots, None]
        y = y + part.new_zeros(x.shape[0], part.shape[1]).index_add(0, tokens, part)
    return y


def grouped_loop(rows, weight, group_sizes) -> torch.Tensor:
    """A grouped product in plain torch, one group after another."""
    groups = rows.split(group_sizes.tolist())
    return torch.cat([group @ matrix.T for group, matrix in zip(groups, weight, strict=True)])
