"""Times moe, grouped_gemm, grouped_mm and moe_mlp beside what else does their work, all in one run.

Each row is one operation, shape and dtype, forward or forward and backward, called eagerly or replayed from a CUDA
graph. Every input requires a gradient, so a forward keeps what its backward would need. Beside it run a dense cuBLAS
product of the forward's operations ([S, K] by [K, N]; of an MLP both of its products, [S, K] by [K, 2 I] and [S, I] by
[I, N]) and the peers of peers.py; on a CPU, small shapes run beside a loop over the experts. TFLOP/s count the products
alone; a forward and backward compares with three times the dense time. Peak bytes are those of the row's own pass,
beyond its inputs.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import arguments
import package
import peers
import torch
from shapes import CPU_SHAPES, DTYPES, SHAPES, Inputs, Shape, draw
from timing import captured, medians_ms, peak_bytes, saved_bytes

DETERMINISTIC, ROUNDED = "moe(deterministic)", "moe_mlp(rounded)"
OPS = ("moe", DETERMINISTIC, "grouped_gemm", "grouped_mm", "moe_mlp", ROUNDED)
PATHS = {"fp32": ("fp32",), "mma": ("bf16", "fp16"), "wgmma": ("bf16", "fp16")}  # and the dtypes that each serves
AGREEMENT = 2e-2  # relative Frobenius norm: what is timed must compute the same thing


@dataclass(frozen=True)
class Case:
    op: str
    shape: Shape
    dtype: str
    mode: str
    pass_: str
    distribution: str = "uniform"


def main() -> int:
    args = parse_arguments()
    torch.backends.cuda.matmul.allow_tf32 = False
    wanted = cases(args)
    if not wanted:
        print("nothing to measure: no case has that operation, shape, dtype and path", file=sys.stderr)
        return 2
    tell_missing_peers(args.device)
    with forced_path(args.path):
        rows = [describe(case, args.path or automatic_path(case.dtype, args.device)) for case in wanted]
        measure_all(wanted, rows, measure, args)
    return report(rows)


def tell_missing_peers(device: str) -> None:
    for name, reason in peers.MISSING.items() if device == "cuda" else ():
        print(f"{name} is left out: {reason}")


def parse_arguments():
    parser = arguments.parser(__doc__)
    parser.add_argument("--ops", type=comma_list, default=OPS, help=f"of {','.join(OPS)}")
    parser.add_argument("--shapes", type=comma_list, help=f"of {','.join(s.name for s in SHAPES + CPU_SHAPES)}")
    parser.add_argument("--dtypes", type=comma_list, default=tuple(DTYPES), help=f"of {','.join(DTYPES)}")
    parser.add_argument("--path", choices=PATHS, help="the kernels to measure; automatic if left out")
    args = parser.parse_args()
    if args.path and args.device == "cpu":
        parser.error("--path chooses among GPU kernels; a CPU has none")
    for option, known in (("ops", OPS), ("dtypes", DTYPES), ("shapes", [s.name for s in SHAPES + CPU_SHAPES])):
        if unknown := set(getattr(args, option) or ()) - set(known):
            parser.error(f"--{option}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    return args


def comma_list(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def cases(args) -> list[Case]:
    """The set that is measured, those of one problem side by side: bf16 everywhere, other dtypes and graphs at seed."""
    found = []
    for shape in SHAPES if args.device == "cuda" else CPU_SHAPES:
        seed = shape.name == "seed"
        dtypes = DTYPES if seed else ("bf16",) if args.device == "cuda" else ("bf16", "fp32")
        for dtype in dtypes:
            for op in ops_of(shape):
                found += [Case(op, shape, dtype, "eager", pass_) for pass_ in ("fwd", "fwd+bwd")]
                found += [Case(op, shape, dtype, "graph", "fwd")] if seed else []
    return [
        case
        for case in found
        if case.op in args.ops
        and case.dtype in args.dtypes
        and (not args.shapes or case.shape.name in args.shapes)
        and (not args.path or case.dtype in PATHS[args.path])
    ]


def ops_of(shape: Shape) -> tuple[str, ...]:
    otherwise = shape.k > 2  # two experts a token are added alike either way
    if shape.I is not None:
        return ("moe_mlp", ROUNDED) if otherwise else ("moe_mlp",)
    moe = ("moe", DETERMINISTIC) if otherwise else ("moe",)
    return (*moe, "grouped_gemm", "grouped_mm") if shape.name == "seed" else (*moe, "grouped_gemm")


def measure_all(wanted: list[Case], rows: list[dict], measure: Callable, args) -> None:
    """Fills the rows of the cases in order. Those not measured, or that failed, keep null times."""
    inputs = problem = None
    for case, row in zip(wanted, rows, strict=True):
        write(args.json, rows)
        if (case.shape, case.dtype, case.distribution) != problem:
            inputs = None  # the next ones may need its memory
            torch.cuda.empty_cache()  # what was kept for reuse has other sizes
            problem = case.shape, case.dtype, case.distribution
            inputs = draw(case.shape, DTYPES[case.dtype], args.device, case.distribution)
        try:
            row.update(measure(case, inputs, args.device))
        except Exception as error:
            print(f"FAILED {label(row)}: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            print(f"{label(row)}: {row['ms']:.3f} ms", flush=True)
        inputs.clear_gradients()
    write(args.json, rows)


def describe(case: Case, path: str) -> dict:
    """A row without results."""
    return {**kind(case, path), **{"ms": None, "tflops": None, "dense_ms": None, "bytes_peak": None, "peers": {}}}


def kind(case: Case, path: str) -> dict:
    shape = case.shape
    sizes = {"T": shape.T, "K": shape.K, "N": shape.N, "I": shape.I, "E": shape.E, "k": shape.k}
    run = {"dtype": case.dtype, "path": path, "mode": case.mode, "pass": case.pass_, "distribution": case.distribution}
    return {"op": case.op, "shape": shape.name, **sizes, **run}


def measure(case: Case, inputs: Inputs, device: str) -> dict:
    ours, others = contenders(case, inputs, device)
    runs = passes(case, inputs, {"ours": ours, **others})
    if case.op == DETERMINISTIC:  # a backward asks too
        ours, runs["ours"] = deterministically(ours), deterministically(runs["ours"])
        runs["ours"]()
    check_agreement(ours(), inputs, case.op)
    inputs.clear_gradients()
    bytes_peak = peak_bytes(runs["ours"], device)
    inputs.clear_gradients()
    runs["dense"] = dense_product(case, device)
    if case.mode == "graph":
        runs = {name: captured(runs[name]) for name in ("ours", "dense")}
    return {**speed(case, medians_ms(runs, device)), "bytes_peak": bytes_peak}


def speed(case: Case, ms: dict[str, float]) -> dict:
    ours_ms, dense_ms = ms.pop("ours"), ms.pop("dense")
    flops = case.shape.flops * products(case.pass_)
    return {"ms": ours_ms, "tflops": flops / ours_ms * 1e-9, "dense_ms": dense_ms, "peers": ms}


def memory(runs: dict[str, Callable], forwards: dict[str, Callable], inputs: Inputs, device: str) -> dict:
    """What each run allocates at its peak, and what each forward keeps for its backward."""
    peak, saved = {}, {}
    for name, run in runs.items():
        peak[name] = peak_bytes(run, device)
        inputs.clear_gradients()
        saved[name] = saved_bytes(forwards[name], device)
    ours = {"bytes_peak": peak.pop("ours"), "bytes_saved": saved.pop("ours")}
    return {**ours, "peers_bytes_peak": peak, "peers_bytes_saved": saved}


def contenders(case: Case, inputs: Inputs, device: str) -> tuple[Callable, dict[str, Callable]]:
    """Our forward, and what it is compared with, by name."""
    kernel = package.load()
    loop, arguments = in_plain_torch(case.op, inputs)
    if case.op == "grouped_gemm":
        ours = kernel.grouped_gemm
        others = {"torch._grouped_mm": peers.grouped_mm}
    elif case.op == "grouped_mm":
        ours = partial(peers.grouped_mm, product=kernel.grouped_mm)
        others = {"torch._grouped_mm": peers.grouped_mm}
    elif case.op == DETERMINISTIC:
        ours = kernel.moe
        others = {"moe": kernel.moe}
    elif case.op == "moe":
        ours = kernel.moe
        _, grouped = in_plain_torch("grouped_gemm", inputs)
        others = {
            "torch._grouped_mm": lambda *_: peers.grouped_mm(*grouped),
            "unfused": peers.unfused,
            "ScatterMoE": peers.scattermoe,
        }
    else:
        ours = partial(kernel.moe_mlp, combine="rounded" if case.op == ROUNDED else None)
        others = {"unfused": peers.unfused_mlp, "ScatterMoE": peers.scattermoe_mlp, "SonicMoE": peers.sonicmoe_mlp}
    if device == "cpu":
        others = {"loop": loop}
    others = {name: partial(peer, *arguments) for name, peer in others.items() if name not in peers.MISSING}
    return partial(ours, *arguments), others


def in_plain_torch(op: str, inputs: Inputs) -> tuple[Callable, tuple[torch.Tensor, ...]]:
    """The loop over the experts that computes the same as an operation, and the arguments of both."""
    if op in ("grouped_gemm", "grouped_mm"):
        return peers.grouped_loop, (inputs.rows, inputs.weight, inputs.group_sizes)
    if op in ("moe", DETERMINISTIC):
        return peers.loop, (inputs.x, inputs.weight, inputs.expert_ids, inputs.topk_weights)
    return peers.mlp_loop, tuple(vars(inputs).values())


def passes(case: Case, inputs: Inputs, forwards: dict[str, Callable]) -> dict[str, Callable]:
    """The case's pass of each forward, which has run once. Peers that do not support the problem are left out."""
    if case.pass_ == "fwd":
        runs = forwards
    else:
        runs = {name: forward_and_backward(run, inputs) for name, run in forwards.items()}
    runs = {name: run for name, run in runs.items() if name == "ours" or runs_at_all(name, run)}
    runs["ours"]()
    inputs.clear_gradients()
    return runs


def dense_product(case: Case, device: str) -> Callable:
    """The products of the forward's operations, which have run once."""

    def normal(*sizes):
        return torch.randn(sizes, device=device).to(DTYPES[case.dtype])

    factors = [(normal(case.shape.S, features), normal(features, outputs)) for features, outputs in case.shape.products]

    def run():
        for a, b in factors:
            a @ b

    run()
    return run


def forward_and_backward(forward: Callable, inputs: Inputs) -> Callable:
    """With an incoming gradient of the result's shape and dtype that is made here, beforehand."""
    with torch.no_grad():
        try:
            y = forward()
        except Exception:
            return forward  # it fails again where failures are told
    dy = torch.randn_like(y, requires_grad=False)

    def run():
        inputs.clear_gradients()
        forward().backward(dy)

    return run


def deterministically(run: Callable) -> Callable:
    """With torch's deterministic algorithms; torch fills no memory for them meanwhile."""

    def wrapped():
        before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)
        try:
            return run()
        finally:
            on, torch.utils.deterministic.fill_uninitialized_memory = before
            torch.use_deterministic_algorithms(on)

    return wrapped


def runs_at_all(name: str, run: Callable) -> bool:
    """Whether a peer supports the problem; says so where it does not."""
    try:
        run()
    except Exception as error:
        print(f"  {name} is left out: {type(error).__name__}: {error}".splitlines()[0])
        return False
    return True


def check_agreement(y: torch.Tensor, inputs: Inputs, op: str) -> None:
    """Against plain torch: a wrong answer is not worth timing."""
    loop, arguments = in_plain_torch(op, inputs)
    with torch.no_grad():
        want = loop(*arguments)
        error = float((y.float() - want.float()).norm() / want.float().norm())
    if not error <= AGREEMENT:
        raise AssertionError(f"the result is off by {error:.2g} (relative Frobenius norm)")


def products(pass_: str) -> int:
    return {"fwd": 1, "fwd+bwd": 3}[pass_]


def automatic_path(dtype: str, device: str, narrow: bool = False) -> str:
    """The path of the first configuration that serves the dtype on this GPU: the one that is picked unasked.

    narrow: of the tiles for few rows an expert.
    """
    if device == "cpu":
        return "reference"
    for config in package.hooks().configs_here():
        if dtype in PATHS[config.path] and narrow == (config.tile_m < 128):
            return config.path
    raise RuntimeError(f"no kernel configuration serves {dtype} on this GPU")


@contextlib.contextmanager
def forced_path(path: str | None):
    """Runs the products and their gradients inside on the configurations of this path that fit the GPU."""
    if path is None:
        yield
        return
    names = [config.name for config in package.hooks().configs_here() if config.path == path]
    if not names:
        sys.exit(f"this GPU has no {path} kernels")
    with package.hooks().forced(*names):
        yield


def write(file: Path | None, rows: list[dict]) -> None:
    if file:
        partial = file.with_name(file.name + ".partial")
        partial.write_text(json.dumps(rows, indent=1) + "\n")
        os.replace(partial, file)


def label(row: dict) -> str:
    return " ".join(row[name] for name in ("op", "shape", "dtype", "path", "mode", "pass", "distribution"))


def report(rows: list[dict]) -> int:
    """Prints milliseconds, and how many times as fast as dense products and as each peer; the exit status."""
    width = max(len(label(row)) for row in rows)
    print(f"\n{'':{width}}{'ms':>9}{'TFLOP/s':>9}{'/dense':>8}{'MB':>8}  times as fast as")
    for row in rows:
        if row["ms"] is None:
            print(f"{label(row):{width}}   failed")
            continue
        dense = row["dense_ms"] * products(row["pass"]) / row["ms"]
        megabytes = "" if row["bytes_peak"] is None else f"{row['bytes_peak'] / 1e6:.0f}"
        ratios = ", ".join(f"{name} {ms / row['ms']:.2f}" for name, ms in row["peers"].items())
        print(f"{label(row):{width}}{row['ms']:9.3f}{row['tflops']:9.3g}{dense:8.2f}{megabytes:>8}  {ratios}")
    failed = sum(row["ms"] is None for row in rows)
    if failed:
        print(f"{failed} of {len(rows)} rows failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
