"""Private hooks for tests and benchmarks: which kernel configurations there are, and how to force one."""

import contextlib
from typing import NamedTuple

import torch

from ._ops import add_op_namespace_prefix, ops

_OPS = ("gemm", "weight_grad")
_PATHS = ("fp32", "mma", "wgmma")

# Shared memory in KiB by compute capability: of an SM, and the most that one block may take.
_SHARED_MEMORY = {
    80: (164, 163),
    86: (100, 99),
    87: (164, 163),
    89: (100, 99),
    90: (228, 227),
    100: (228, 227),
    103: (228, 227),
    110: (228, 227),
    120: (100, 99),
    121: (100, 99),
}
_RESERVED = 1024  # bytes of an SM's shared memory that the driver keeps for each block


class Config(NamedTuple):
    """One compiled tile configuration of an op on a kernel path."""

    op: str
    path: str
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    smem_bytes: int
    blocks_per_sm: int
    vectorized: bool

    @property
    def name(self) -> str:
        tile = f"{self.tile_m}x{self.tile_n}x{self.tile_k}x{self.stages}"
        return f"{self.op}-{self.path}-{tile}" + ("" if self.vectorized else "-unaligned")

    def selectable_on(self, arch: int) -> bool:
        """Whether a GPU of this compute capability (90 for 9.0) has the shared memory for it."""
        sm, block = _SHARED_MEMORY[arch]
        fits_block = self.smem_bytes <= block * 1024
        return fits_block and self.blocks_per_sm * (self.smem_bytes + _RESERVED) <= sm * 1024


def _gpu() -> torch.Tensor | None:
    """A tensor that picks the CUDA ops; None where this variant has none or no GPU is present."""
    compiled = torch._C._dispatch_has_kernel_for_dispatch_key(add_op_namespace_prefix("config_table"), "CUDA")
    return torch.empty(0, device="cuda") if compiled and torch.cuda.is_available() else None


def configs() -> list[Config]:
    """The configurations of the loaded variant, in the order of their indices; none without a GPU."""
    gpu = _gpu()
    if gpu is None:
        return []
    return [
        Config(_OPS[op], _PATHS[path], *numbers, bool(vectorized))
        for op, path, *numbers, vectorized in ops.config_table(gpu).tolist()
    ]


@contextlib.contextmanager
def forced(name: str):
    """Runs the calls inside with the configuration of this name where it fits their op and dtype."""
    names = [config.name for config in configs()]
    if name not in names:
        raise ValueError(f"no configuration is called {name!r}; there are {names}")
    gpu = _gpu()
    ops.force_config(gpu, names.index(name))
    try:
        yield
    finally:
        ops.force_config(gpu, -1)
