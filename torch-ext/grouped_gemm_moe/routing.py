"""The routing of tokens to experts as one stable sort, in torch alone and without reading a value on the host."""

from typing import NamedTuple

import torch


class Routing(NamedTuple):
    """Which row of the expert-ordered batch is which assignment; made by `route`, reusable over calls.

    Assignment ``a = t * top_k + j`` is the j-th expert of token t. Rows are the assignments sorted by expert, those of
    one expert in ascending order; assignments to no expert come last, at and behind row ``offs[-1]``.

    Attributes:
        row_assignment: int32 [S], the assignment of each row; a permutation of 0 ... S - 1.
        offs: int32 [E], the row at which each expert ends.
        top_k: experts a token.
        num_tokens: tokens T; S = T * top_k.
    """

    row_assignment: torch.Tensor
    offs: torch.Tensor
    top_k: int
    num_tokens: int


def sort_by_expert(expert_ids: torch.Tensor, num_experts: int) -> Routing:
    """The `Routing` of expert_ids [T, k]; ids outside [0, num_experts) belong to no expert."""
    num_tokens, top_k = expert_ids.shape
    # In int64: a narrower type would wrap num_experts, and a wide id must not be cut to a valid one.
    ids = expert_ids.reshape(-1).to(torch.int64)
    # Dead ids on either side become num_experts, which -1 is modulo num_experts + 1.
    ids = ids.clamp(-1, num_experts).remainder(num_experts + 1)
    # The narrowest key, since a radix sort makes a pass for each of its bytes.
    key_dtype = next(d for d in (torch.uint8, torch.int16, torch.int32) if num_experts <= torch.iinfo(d).max)
    expert_of_row, row_assignment = torch.sort(ids.to(key_dtype), stable=True)
    experts = torch.arange(num_experts, dtype=key_dtype, device=ids.device)
    offs = torch.searchsorted(expert_of_row, experts, right=True, out_int32=True)
    return Routing(row_assignment.to(torch.int32), offs, top_k, num_tokens)
