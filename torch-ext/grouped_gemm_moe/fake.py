"""What torch has to know of ops that write into arguments and return nothing.

There is no shape to tell. A policy of selective checkpointing that saves what they return would save nothing, so they
are always computed again.
"""

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

from ._ops import add_op_namespace_prefix, ops


def _writes_arguments(*args):
    return None


for _op in (
    "gemm",
    "gemm_activation",
    "gemm_activation_grad",
    "gemm_combine",
    "group_ends",
    "mlp",
    "route",
    "sum_rows",
    "weight_grad",
):
    torch.library.register_fake(add_op_namespace_prefix(_op))(_writes_arguments)
    SAC_IGNORED_OPS.add(getattr(ops, _op).default)
