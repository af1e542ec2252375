"""Grouped GEMM with the token permutation of Mixture-of-Experts layers fused into it, differentiable end to end.

`moe` multiplies each token by its experts' matrices and sums the results by routing weight. `grouped_gemm` multiplies
rows that are grouped already. `route`, `gather_gemm` and `gemm_combine` are the pieces for expert MLPs with an
activation of one's own between two products; `weight_grad` is the gradient of an expert matrix.
"""

from . import fake, reference  # noqa: F401  (their import registers the fake and the CPU kernels)
from .functional import gather_gemm, gemm_combine, grouped_gemm, moe, route, weight_grad
from .routing import Routing

__all__ = ["Routing", "gather_gemm", "gemm_combine", "grouped_gemm", "moe", "route", "weight_grad"]
