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


class GroupedGemmMoeMLP(torch.nn.Module):
    """Router and experts of gpt-oss, the one model of transformers that has a layer's name on both: `MegaBlocksMoeMLP`.

    The router stays the module's own, so what listens to it still does. Other models take `GroupedGemmMoeExperts`.

    Example:
        >>> import kernels
        >>> layer = kernels.LayerRepository(
        ...     "phanerozoic/grouped-gemm-moe", layer_name="GroupedGemmMoeMLP", version=1, trust_remote_code=True
        ... )
        >>> with kernels.use_kernel_mapping({"MegaBlocksMoeMLP": {"cuda": layer, "cpu": layer}}):
        ...     model = kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE)
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, L, H] -> the result [B, L, H] and the routing weights [B * L, k]; `experts_forward`'s dtypes and errors.

        Read are ``router``, which returns logits, weights and ids of tokens [T, H], and ``experts``.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, top_k_weights, top_k_index = self.router(tokens)
        y = experts_forward(self.experts, tokens, top_k_index, top_k_weights)
        return y.view(hidden_states.shape), top_k_weights
