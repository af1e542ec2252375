"""Private hooks for tests and benchmarks: which kernel configurations there are, and how to force one."""

import contextlib
from typing import NamedTuple

import torch

from ._ops import add_op_namespace_prefix, ops

_OPS = ("gemm", "weight_grad")
_PATHS = ("fp32", "mma", "wgmma")

# Shared memory in KiB by compute capability: of an SM, and the most that one block may take.
SHARED_MEMORY = {
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
        """Whether a GPU of this compute capability (90 for 9.0) may get it, for the calls that it serves."""
        per_sm, per_block = (1024 * size for size in SHARED_MEMORY[arch])
        return ops.config_runs_on(_like(), configs().index(self), arch, per_block, per_sm, _RESERVED)


def _like() -> torch.Tensor | None:
    """A tensor that picks the hooks; None where this variant has no kernels."""
    compiled = torch._C._dispatch_has_kernel_for_dispatch_key(add_op_namespace_prefix("config_table"), "CPU")
    return torch.empty(0) if compiled else None


def configs() -> list[Config]:
    """The configurations of the loaded variant, in the order of their indices; none in one for the CPU."""
    like = _like()
    if like is None:
        return []
    return [
        Config(_OPS[op], _PATHS[path], *numbers, bool(vectorized))
        for op, path, *numbers, vectorized in ops.config_table(like).tolist()
    ]


def configs_here() -> list[Config]:
    """Those of them that the current GPU may get."""
    major, minor = torch.cuda.get_device_capability()
    return [config for config in configs() if config.selectable_on(10 * major + minor)]


@contextlib.contextmanager
def forced(*names: str, blocks: int = 0):
    """Runs the calls inside with the first configuration of these names that fits their op and dtype (none: as always).

    No more than `blocks` blocks run at once, so that a small problem too has blocks which take several tiles
    (0: as always).
    """
    existing = [config.name for config in configs()]
    if unknown := set(names) - set(existing):
        raise ValueError(f"no configuration is called {', '.join(sorted(unknown))}; there are {existing}")
    ops.force(_like(), sum(1 << existing.index(name) for name in set(names)), blocks)
    try:
        yield
    finally:
        ops.force(_like(), 0, 0)
