"""Times moe_mlp at qwen3-30b-a3b with tiles of each height that there is, beside those that it picks.

Of 1 to 65,536 tokens in bf16, replayed from CUDA graphs, without gradients. The rows are those of compare.py, with
the heights among the peers.
"""

import sys
from dataclasses import replace

import arguments
import compare
import package
import torch
from compare import Case
from shapes import CPU_SHAPES, SHAPES, Inputs, Shape
from timing import captured, medians_ms, peak_bytes

BUDGET_S = 0.2  # of a row's medians
MOST_ROWS = 2**15  # that tiles of fewer than 128 are tried with: they serve twice as many, and take ever longer
BASE = next(shape for shape in SHAPES if shape.name == "qwen3-30b-a3b")


def main() -> int:
    args = arguments.parser(__doc__).parse_args()
    wanted = cases(args.device)
    rows = [compare.describe(case, compare.automatic_path(case.dtype, args.device)) for case in wanted]
    compare.measure_all(wanted, rows, measure, args)
    return compare.report(rows)


def cases(device: str) -> list[Case]:
    if device == "cpu":
        return [Case("moe_mlp", shape, "bf16", "eager", "fwd") for shape in CPU_SHAPES if shape.I]
    shapes = [replace(BASE, name=f"{BASE.name} T={2**i}", T=2**i) for i in range(17)]
    return [Case("moe_mlp", shape, "bf16", "graph", "fwd") for shape in shapes]


@torch.no_grad()
def measure(case: Case, inputs: Inputs, device: str) -> dict:
    ours, _ = compare.contenders(case, inputs, device)
    compare.check_agreement(ours(), inputs, case.op)
    bytes_peak = peak_bytes(ours, device)
    runs = {"ours": ours, "dense": compare.dense_product(case, device)}
    if case.mode == "graph":
        runs = {name: captured(run) for name, run in runs.items()}
    for rows, config in heights(case.shape).items() if device == "cuda" else ():
        with package.hooks().forced(config):
            runs[f"{rows} rows"] = captured(ours)
    return {**compare.speed(case, medians_ms(runs, device, BUDGET_S)), "bytes_peak": bytes_peak}


def heights(shape: Shape) -> dict[int, str]:
    """For each number of rows that a tile can have the first configuration of such tiles that serves bf16."""
    found = {}
    for config in package.hooks().configs_here():
        serves = config.op == "gemm" and config.path != "fp32"
        if serves and (config.tile_m == 128 or shape.S <= MOST_ROWS):
            found.setdefault(config.tile_m, config.name)
    return dict(sorted(found.items()))


if __name__ == "__main__":
    sys.exit(main())
