"""Times moe at qwen3-up while one thing changes: the routing, the tokens, the experts.

The rows are those of compare.py, with the memory of the peers beside ours and what each forward keeps for its backward.
Every point has its dense product in the same run. On a GPU all of it takes half a minute.
"""

import sys
from dataclasses import replace

import arguments
import compare
from compare import Case
from shapes import CPU_SHAPES, DISTRIBUTIONS, SHAPES, Inputs, Shape
from timing import medians_ms

BUDGET_S = 0.3  # of a point's medians
BASE = {
    "cuda": next(shape for shape in SHAPES if shape.name == "qwen3-up"),
    "cpu": next(shape for shape in CPU_SHAPES if shape.name == "cpu-top2"),
}
TOKENS = {"cuda": [2**i for i in range(10, 19)], "cpu": [64, 128, 256]}
EXPERTS = {"cuda": [2**i for i in range(3, 10)], "cpu": [4, 8]}


def main() -> int:
    args = arguments.parser(__doc__).parse_args()
    wanted = cases(args.device)
    path = compare.automatic_path("bf16", args.device)
    rows = [describe(case, path) for case in wanted]
    compare.measure_all(wanted, rows, measure, args)
    return compare.report(rows)


def cases(device: str) -> list[Case]:
    """Each point once, though the sweeps meet in the base."""
    base = BASE[device]
    scaled = [resized(base, "T", tokens) for tokens in TOKENS[device]]
    scaled += [resized(base, "E", experts) for experts in EXPERTS[device]]
    points = [(base, pass_, distribution) for distribution in DISTRIBUTIONS for pass_ in ("fwd", "fwd+bwd")]
    points += [(shape, "fwd", "uniform") for shape in scaled]
    return [Case("moe", shape, "bf16", "eager", *kind) for shape, *kind in dict.fromkeys(points)]


def resized(base: Shape, size: str, value: int) -> Shape:
    if getattr(base, size) == value:
        return base
    return replace(base, name=f"{base.name} {size}={value}", **{size: value})


def describe(case: Case, path: str) -> dict:
    return {**compare.describe(case, path), "bytes_saved": None, "peers_bytes_peak": {}, "peers_bytes_saved": {}}


def measure(case: Case, inputs: Inputs, device: str) -> dict:
    ours, others = compare.contenders(case, inputs, device)
    others.pop("ScatterMoE", None)  # it is compiled anew for each number of experts
    compare.check_agreement(ours(), inputs, case.op)
    forwards = {"ours": ours, **others}
    runs = compare.passes(case, inputs, forwards)
    memory = compare.memory(runs, forwards, inputs, device)
    runs["dense"] = compare.dense_product(case, device)
    return {**compare.speed(case, medians_ms(runs, device, BUDGET_S)), **memory}


if __name__ == "__main__":
    sys.exit(main())
