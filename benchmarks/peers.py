"""What the package is compared with. Each takes the package's own arguments and is differentiable."""

import torch

try:
    from scattermoe import parallel_experts as _scattermoe
except ImportError as error:
    _scattermoe, SCATTERMOE_MISSING = None, str(error)
else:
    SCATTERMOE_MISSING = None


def grouped_mm(rows: torch.Tensor, weight: torch.Tensor, group_sizes: torch.Tensor) -> torch.Tensor:
    """torch's grouped product of rows that are grouped already."""
    ends = group_sizes.cumsum(0).to(torch.int32)
    return torch._grouped_mm(rows, weight.transpose(1, 2), ends)


def unfused(
    x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """Sort, gather, torch's grouped product, weight, index_add: float32 [T, N], without waiting for the device."""
    num_experts, top_k = weight.shape[0], expert_ids.shape[1]
    sorted_ids, order = expert_ids.flatten().sort(stable=True)
    experts = torch.arange(num_experts, device=x.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True).to(torch.int32)
    tokens = order // top_k
    rows = torch._grouped_mm(x[tokens], weight.transpose(1, 2), ends)
    weighted = rows * topk_weights.flatten()[order, None]
    return weighted.new_zeros(x.shape[0], weight.shape[1]).index_add(0, tokens, weighted)


def scattermoe(
    x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """ScatterMoE's fused linear layer in Triton, [T, N] in x's dtype; see SCATTERMOE_MISSING."""
    routing = _scattermoe.flatten_sort_count(expert_ids, num_experts=weight.shape[0])
    gates = topk_weights.to(x.dtype)
    return _scattermoe.parallel_linear(x, weight.transpose(1, 2), expert_ids.shape[1], *routing, gates=gates)


def loop(x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """A MoE in plain torch, one expert after another: [T, N] in the wider of x's and topk_weights' dtypes."""
    y = 0
    for expert in range(weight.shape[0]):
        tokens, slots = (expert_ids == expert).nonzero(as_tuple=True)
        part = x[tokens] @ weight[expert].T * topk_weights[tokens, slots, None]
        y = y + part.new_zeros(x.shape[0], weight.shape[1]).index_add(0, tokens, part)
    return y


def grouped_loop(rows: torch.Tensor, weight: torch.Tensor, group_sizes: torch.Tensor) -> torch.Tensor:
    """A grouped product in plain torch, one group after another."""
    groups = rows.split(group_sizes.tolist())
    return torch.cat([group @ matrix.T for group, matrix in zip(groups, weight, strict=True)])
