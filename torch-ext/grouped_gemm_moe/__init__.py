"""Grouped GEMM with the token permutation of Mixture-of-Experts layers fused into it, differentiable end to end.

`moe` multiplies each token by its experts' matrices and sums the results by routing weight; `moe_mlp` does so with
expert MLPs of two matrices. `grouped_gemm` multiplies rows that are grouped already, and `grouped_mm` is torch's
function for that. `route`, `gather_gemm` and `gemm_combine` are the pieces for MLPs of one's own; `weight_grad` is the
gradient of an expert matrix. `experts_forward` is transformers' function for the experts of a model, and `layers` has
the same for the kernels library to put into models.
"""

import torch.fx

from . import fake, layers, reference  # noqa: F401  (two register the fake and the CPU kernels)
from .activation import Activation
from .experts import experts_forward
from .functional import gather_gemm, gemm_combine, grouped_gemm, moe, moe_mlp, route, weight_grad
from .grouped_mm import grouped_mm
from .routing import Routing

__all__ = [
    "Activation",
    "Routing",
    "experts_forward",
    "gather_gemm",
    "gemm_combine",
    "grouped_gemm",
    "grouped_mm",
    "layers",
    "moe",
    "moe_mlp",
    "route",
    "weight_grad",
]

for _name in set(__all__) - {"Activation", "Routing", "experts_forward", "layers"}:
    torch.fx.wrap(_name)  # torch.fx.symbolic_trace keeps the call of a function, for its checks want tensors
