"""The problems that are timed: names, sizes and inputs. Every benchmark and every record goes by these names."""

from dataclasses import dataclass, replace

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DISTRIBUTIONS = ("uniform", "zipf", "one")


@dataclass(frozen=True)
class Shape:
    """T tokens of K features, each sent to k of E experts of N outputs.

    An expert is one matrix, or with an I an MLP of two: SwiGLU of K features to I, and I features to N.
    """

    name: str
    T: int
    K: int
    N: int
    E: int
    k: int
    I: int | None = None  # noqa: E741

    @property
    def S(self) -> int:
        """Assignments: rows of the grouped product."""
        return self.T * self.k

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Features in and out of each matrix that a row of the forward is multiplied by."""
        return ((self.K, self.N),) if self.I is None else ((self.K, 2 * self.I), (self.I, self.N))

    @property
    def flops(self) -> int:
        """Of the forward's products; a backward costs twice as many again."""
        return sum(2 * self.S * inputs * outputs for inputs, outputs in self.products)


SHAPES = (
    Shape("seed", 4096, 2048, 2048, 8, 2),
    Shape("qwen3-up", 16384, 2048, 1536, 128, 8),
    Shape("qwen3-down", 16384, 768, 2048, 128, 8),
    Shape("olmoe-up", 16384, 2048, 2048, 64, 8),
    Shape("mixtral-up", 8192, 4096, 14336, 8, 2),
    Shape("qwen3-30b-a3b", 32768, 2048, 2048, 128, 8, I=768),
    Shape("sonic-7b", 24576, 1536, 1536, 128, 8, I=256),
    Shape("sonic-30b", 32768, 4096, 4096, 128, 8, I=1024),
    Shape("olmoe", 16384, 2048, 2048, 64, 8, I=1024),
    Shape("mixtral-8x7b", 8192, 4096, 4096, 8, 2, I=14336),
)
DECODE_SHAPES = tuple(
    replace(next(shape for shape in SHAPES if shape.name == full), name=f"{name}-decode-{tokens}", T=tokens)
    for full, name, counts in (
        ("qwen3-30b-a3b", "qwen3", (1, 4, 16, 64, 256)),
        ("mixtral-8x7b", "mixtral", (1, 4, 16, 64)),
    )
    for tokens in counts
)
CPU_SHAPES = (
    Shape("cpu-top1", 256, 128, 96, 4, 1),
    Shape("cpu-top2", 256, 128, 96, 8, 2),
    Shape("cpu-mlp", 128, 96, 96, 8, 3, I=64),
)


class Inputs:
    """A random problem. Its leaves require gradients."""

    def clear_gradients(self) -> None:
        for tensor in vars(self).values():
            tensor.grad = None


@dataclass
class MatrixInputs(Inputs):
    """One problem in the two forms that moe and grouped_gemm take."""

    x: torch.Tensor  # [T, K]
    weight: torch.Tensor  # [E, N, K]
    expert_ids: torch.Tensor  # int64 [T, k], no expert twice in a row but where all go to one
    topk_weights: torch.Tensor  # float32 [T, k]
    rows: torch.Tensor  # [S, K], already grouped by expert
    group_sizes: torch.Tensor  # int64 [E]


@dataclass
class MLPInputs(Inputs):
    """In the order of moe_mlp's arguments."""

    x: torch.Tensor  # [T, K]
    w_up: torch.Tensor  # [E, 2 * I, K], gates before ups
    w_down: torch.Tensor  # [E, N, I]
    expert_ids: torch.Tensor  # int64 [T, k], as those of MatrixInputs
    topk_weights: torch.Tensor  # float32 [T, k]


def draw(shape: Shape, dtype: torch.dtype, device: str, distribution: str = "uniform") -> Inputs:
    """Fresh random inputs, routed as one of DISTRIBUTIONS. What is computed of them is about 1 everywhere."""

    def normal(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(sizes, device=device) * scale).to(dtype).requires_grad_()

    ids = draw_ids(shape, device, distribution)
    x = normal(shape.T, shape.K)
    weights = [normal(shape.E, outputs, inputs, scale=inputs**-0.5) for inputs, outputs in shape.products]
    topk_weights = torch.rand(shape.T, shape.k, device=device).requires_grad_()
    if shape.I is not None:
        return MLPInputs(x, *weights, ids, topk_weights)
    group_sizes = torch.bincount(ids.flatten(), minlength=shape.E)
    return MatrixInputs(x, *weights, ids, topk_weights, normal(shape.S, shape.K), group_sizes)


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
