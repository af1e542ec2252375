"""The problems that are timed: names, sizes and inputs. Every benchmark and every record goes by these names."""

from dataclasses import dataclass

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DISTRIBUTIONS = ("uniform", "zipf", "one")


@dataclass(frozen=True)
class Shape:
    """T tokens of K features, each sent to k of E experts of N outputs."""

    name: str
    T: int
    K: int
    N: int
    E: int
    k: int

    @property
    def S(self) -> int:
        """Assignments: rows of the grouped product."""
        return self.T * self.k

    @property
    def flops(self) -> int:
        """Of the forward's products; a backward costs twice as many again."""
        return 2 * self.S * self.K * self.N


SHAPES = (
    Shape("seed", 4096, 2048, 2048, 8, 2),
    Shape("qwen3-up", 16384, 2048, 1536, 128, 8),
    Shape("qwen3-down", 16384, 768, 2048, 128, 8),
    Shape("olmoe-up", 16384, 2048, 2048, 64, 8),
    Shape("mixtral-up", 8192, 4096, 14336, 8, 2),
)
CPU_SHAPES = (
    Shape("cpu-top1", 256, 128, 96, 4, 1),
    Shape("cpu-top2", 256, 128, 96, 8, 2),
)


@dataclass
class Inputs:
    """The same random problem in the two forms that the operations take. Leaves require gradients."""

    x: torch.Tensor  # [T, K]
    weight: torch.Tensor  # [E, N, K]
    expert_ids: torch.Tensor  # int64 [T, k], no expert twice in a row but where all go to one
    topk_weights: torch.Tensor  # float32 [T, k]
    rows: torch.Tensor  # [S, K], already grouped by expert
    group_sizes: torch.Tensor  # int64 [E]

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.weight, self.topk_weights, self.rows

    def clear_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


def draw(shape: Shape, dtype: torch.dtype, device: str, distribution: str = "uniform") -> Inputs:
    """Fresh random inputs, routed as one of DISTRIBUTIONS."""
    ids = draw_ids(shape, device, distribution)
    return Inputs(
        x=torch.randn(shape.T, shape.K, device=device).to(dtype).requires_grad_(),
        weight=(torch.randn(shape.E, shape.N, shape.K, device=device) / shape.K**0.5).to(dtype).requires_grad_(),
        expert_ids=ids,
        topk_weights=torch.rand(shape.T, shape.k, device=device).requires_grad_(),
        rows=torch.randn(shape.S, shape.K, device=device).to(dtype).requires_grad_(),
        group_sizes=torch.bincount(ids.flatten(), minlength=shape.E),
    )


def draw_ids(shape: Shape, device: str, distribution: str) -> torch.Tensor:
    """int64 [T, k]: the experts of each token.

    `uniform` and `zipf` draw k different experts one after the other, each in proportion to its popularity: 1 for all,
    or 1 / rank, where the ranks are dealt to the experts at random. `one` sends every assignment to expert 0, k of them
    a token, so that S is the others'.
    """
    if distribution == "one":
        return torch.zeros(shape.T, shape.k, dtype=torch.int64, device=device)
    ranks = torch.randperm(shape.E, device=device) + 1
    popularity = 1 / ranks if distribution == "zipf" else torch.ones_like(ranks)
    # In a race of exponential clocks whose rates are the popularities, the order of arrival is such a drawing.
    arrivals = torch.empty(shape.T, shape.E, device=device).exponential_() / popularity
    return arrivals.topk(shape.k, dim=-1, largest=False).indices
