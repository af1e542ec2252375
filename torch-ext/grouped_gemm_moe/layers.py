"""Layers for the kernels library, which puts the forward of one into a model's own modules: they have no state."""

import torch

from .experts import experts_forward


class GroupedGemmMoeExperts(torch.nn.Module):
    """The experts of a Mixture-of-Experts layer, for modules as `experts_forward` reads them.

    Example:
        >>> import kernels
        >>> kernels.replace_kernel_forward_from_hub(Experts, "GroupedGemmMoeExperts")  # a class of the model's
        >>> layer = kernels.LayerRepository(
        ...     "phanerozoic/grouped-gemm-moe", layer_name="GroupedGemmMoeExperts", version=1, trust_remote_code=True
        ... )
        >>> with kernels.use_kernel_mapping({"GroupedGemmMoeExperts": {"cuda": layer, "cpu": layer}}):
        ...     model = kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE)
    """

    can_torch_compile = True
    has_backward = True

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """`experts_forward` of the module, its shapes, dtypes and errors: [T, H], [T, k], [T, k] -> [T, H]."""
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)
