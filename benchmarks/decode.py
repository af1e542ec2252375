"""Times what a few tokens cost, as when text is generated: moe_mlp beside the time that reading its weights takes.

Without gradients, replayed from CUDA graphs and, as not every peer can be captured, called eagerly too. `floor` is how
long it takes to read the weights of the experts that the tokens touch, at the rate of a copy in the same run. The rows
are those of compare.py.
"""

import math
import sys
from collections.abc import Callable
from functools import partial

import arguments
import compare
import peers
import torch
from compare import Case
from shapes import CPU_SHAPES, DECODE_SHAPES, DTYPES, Inputs
from timing import captured, medians_ms, peak_bytes

BUDGET_S = 0.5  # of a row's medians
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**24}


def main() -> int:
    args = arguments.parser(__doc__).parse_args()
    compare.tell_missing_peers(args.device)
    wanted = cases(args.device)
    rows = [compare.describe(case, compare.automatic_path(case.dtype, args.device, narrow=True)) for case in wanted]
    compare.measure_all(wanted, rows, measure, args)
    return compare.report(rows)


def cases(device: str) -> list[Case]:
    """bf16 everywhere, the other dtypes at 16 tokens and in graphs alone."""
    if device == "cpu":
        return [Case("moe_mlp", shape, "fp32", "eager", "fwd") for shape in CPU_SHAPES if shape.I]
    return [
        Case("moe_mlp", shape, dtype, mode, "fwd")
        for shape in DECODE_SHAPES
        for dtype in (DTYPES if shape.T == 16 else ("bf16",))
        for mode in (("graph", "eager") if dtype == "bf16" else ("graph",))
    ]


@torch.no_grad()
def measure(case: Case, inputs: Inputs, device: str) -> dict:
    ours, others = compare.contenders(case, inputs, device)
    compare.check_agreement(ours(), inputs, case.op)
    _, given = compare.in_plain_torch(case.op, inputs)
    others |= {name: partial(peer, *given) for name, peer in peers.TRANSFORMERS.items()}
    others = {name: run for name, run in others.items() if compare.runs_at_all(name, run)}
    bytes_peak = peak_bytes(ours, device)
    runs = {"ours": ours, **others, "dense": compare.dense_product(case, device)}
    if case.mode == "graph":
        runs = {name: replay for name, run in runs.items() if (replay := replay_of(name, run))}
    ms = medians_ms({**runs, "copy": copying(device)}, device, BUDGET_S)
    bytes_per_ms = 2 * COPIED_BYTES[device] / ms.pop("copy")  # read and written
    return {**compare.speed(case, {**ms, "floor": touched_bytes(inputs) / bytes_per_ms}), "bytes_peak": bytes_peak}


def replay_of(name: str, run: Callable) -> Callable | None:
    """Of a graph; None, and a word on it, for a peer that waits for the device."""
    try:
        return captured(run)
    except Exception as error:
        if name == "ours":
            raise
        print(f"  {name} is left out of a graph: {type(error).__name__}: {error}".splitlines()[0])
        return None


def copying(device: str) -> Callable:
    source = torch.zeros(COPIED_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    run = lambda: torch.add(source, 1.0, out=target)  # noqa: E731  (a kernel: the copy engine is slower)
    run()
    return run


def touched_bytes(inputs: Inputs) -> int:
    experts = inputs.expert_ids.unique().numel()
    return sum(math.prod(w.shape[1:]) * w.element_size() for w in (inputs.w_up, inputs.w_down)) * experts


if __name__ == "__main__":
    sys.exit(main())
