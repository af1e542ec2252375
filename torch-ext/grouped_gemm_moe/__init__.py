"""Grouped GEMM with the token permutation of Mixture-of-Experts layers fused into it, differentiable end to end.

`moe` multiplies each token by its experts' matrices and sums the results by routing weight; `moe_mlp` does so with
expert MLPs of two matrices. `grouped_gemm` multiplies rows that are grouped already, and `grouped_mm` is torch's
function for that. `route`, `gather_gemm` and `gemm_combine` are the pieces for MLPs of one's own; `weight_grad` is the
gradient of an expert matrix.
"""

import torch.fx

from . import fake, reference  # noqa: F401  (their import registers the fake and the CPU kernels)
from .activation import Activation
from .functional import gather_gemm, gemm_combine, grouped_gemm, moe, moe_mlp, route, weight_grad
from .grouped_mm import grouped_mm
from .routing import Routing

__all__ = [
    "Activation",
    "Routing",
    "gather_gemm",
    "gemm_combine",
    "grouped_gemm",
    "grouped_mm",
    "moe",
    "moe_mlp",
    "route",
    "weight_grad",
]

for _name in __all__:
    if _name.islower():  # torch.fx.symbolic_trace keeps the call of a function, for its checks want tensors
        torch.fx.wrap(_name)
