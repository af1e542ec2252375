"""Counts what a training step of moe_mlp and of its peers allocates at qwen3-30b-a3b.

The peak is that of a forward and backward beyond the inputs, gradients included. What the forward keeps for the
backward is counted beside its arguments and its result.
"""

import sys

import arguments
import compare
from compare import Case
from shapes import CPU_SHAPES, DTYPES, SHAPES, draw

PLACE = {"cuda": "qwen3-30b-a3b", "cpu": "cpu-mlp"}


def main() -> int:
    args = arguments.parser(__doc__).parse_args()
    shape = next(shape for shape in SHAPES + CPU_SHAPES if shape.name == PLACE[args.device])
    rows = []
    for op in compare.ops_of(shape):
        rows.append(measure(Case(op, shape, "bf16", "eager", "fwd+bwd"), args.device))
        compare.write(args.json, rows)
        print(rows[-1], flush=True)
    return 0


def measure(case: Case, device: str) -> dict:
    inputs = draw(case.shape, DTYPES[case.dtype], device)
    ours, others = compare.contenders(case, inputs, device)
    forwards = {"ours": ours, **others}
    runs = compare.passes(case, inputs, forwards)
    path = compare.automatic_path(case.dtype, device)
    return {**compare.kind(case, path), **compare.memory(runs, forwards, inputs, device)}


if __name__ == "__main__":
    sys.exit(main())
