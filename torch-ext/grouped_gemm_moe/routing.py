"""The routing of tokens to experts as one stable sort, without reading a value on the host."""

from typing import NamedTuple

import torch

from ._ops import ops


class Routing(NamedTuple):
    """Which row of the expert-ordered batch is which assignment; made by `route`, reusable over calls.

    Assignment ``a = t * top_k + j`` is the j-th expert of token t. Rows are the assignments sorted by expert, those of
    one expert in ascending order; assignments to no expert come last, at and behind row ``offs[-1]``.

    It can be copied, pickled and saved; ``torch.load`` takes it after ``torch.serialization.add_safe_globals`` of the
    class. Another build of the package has another class: for that one save ``tuple(routing)``.

    Attributes:
        row_assignment: int32 [S], the assignment of each row; a permutation of 0 ... S - 1.
        offs: int32 [E], the row at which each expert ends.
        top_k: experts a token.
        num_tokens: tokens T; S = T * top_k.

    Example:
        >>> routing = route(torch.tensor([[2, 0], [0, -1], [2, 1]]), 3)
        >>> routing.row_assignment.tolist(), routing.offs.tolist()
        ([1, 2, 5, 0, 4, 3], [2, 3, 5])
    """

    row_assignment: torch.Tensor
    offs: torch.Tensor
    top_k: int
    num_tokens: int


def sort_by_expert(expert_ids: torch.Tensor, num_experts: int) -> Routing:
    """The `Routing` of expert_ids [T, k]; ids outside [0, num_experts) belong to no expert."""
    num_tokens, top_k = expert_ids.shape
    row_assignment = expert_ids.new_empty(num_tokens * top_k, dtype=torch.int32)
    offs = expert_ids.new_empty(num_experts, dtype=torch.int32)
    ops.route(expert_ids.contiguous(), num_experts, row_assignment, offs)
    return Routing(row_assignment, offs, top_k, num_tokens)
