#!/usr/bin/env python3
"""Deliberate faults of the kernels, each of which some test must catch.

    python tools/mutate.py --list             the faults
    python tools/mutate.py --check            each still applies to the sources and compiles (needs nvcc)
    python tools/mutate.py --build DIR        a variant of each for 9.0, and of the sources as they are (needs nvcc)
    python tools/mutate.py --run DIR          on a GPU: the tests of each against its variant in DIR; the exit status is
                                              1 if one survives, or if a test fails without a fault
    ... --only NAME,NAME                      some of them

A fault is a piece of one source and what stands there instead. It enters a copy of the sources, never these. --run
writes what it finds to docs/mutations.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import build as build_tool

ROOT = build_tool.ROOT
TABLE = ROOT / "docs" / "mutations.md"
ARCHITECTURE = "9.0"
UNCHANGED = "unchanged"  # the sources as they are
PENDING = "not run yet"
LIMIT = 1200  # seconds; who does not end is caught: a barrier that nobody arrives at


class Mutation(NamedTuple):
    name: str
    fault: str
    file: str  # in csrc
    old: str
    new: str
    tests: tuple[str, ...]  # file::function in tests/


OPS_GEMM, OPS_GRAD = "test_ops.py::test_gemm", "test_ops.py::test_weight_grad"
BEYOND = "test_edges.py::test_nothing_beyond_an_operand_counts"
SHAPES = "test_configs.py::test_every_shape"
TOKENS = "test_edges.py::test_tokens"

MUTATIONS = (
    # Exact float32.
    Mutation(
        "simt-depth",
        "a step of k is multiplied twice and the one after it never",
        "simt/multiply.cuh",
        "load((depth + 1) % 2, slot, k + depth + 1);",
        "load((depth + 1) % 2, slot, k + depth + (depth != 1));",
        (OPS_GEMM, OPS_GRAD),
    ),
    Mutation(
        "simt-65th-row",
        "a tile of 65 rows is taken for one of 64",
        "simt/multiply.cuh",
        "rows > kTile / 2 ? 2 : 1;",
        "rows > kTile / 2 + 1 ? 2 : 1;",
        (TOKENS,),
    ),
    Mutation(
        "simt-weight-row",
        "a row of a weight gradient has its neighbour's routing weight",
        "simt/multiply.cuh",
        "reinterpret_cast<const float*>(weights)[Share::first() + i * Share::kStride];",
        "reinterpret_cast<const float*>(weights)[(Share::first() + i * Share::kStride) ^ 1];",
        (OPS_GRAD,),
    ),
    Mutation(
        "simt-narrow-9th-row",
        "a narrow tile of nine rows is taken for one of eight",
        "simt/narrow.cuh",
        "if (eight * 8 >= rows) break;",
        "if (eight * 8 + 1 >= rows) break;",
        (SHAPES, "test_edges.py::test_experts"),
    ),
    # mma.sync.
    Mutation(
        "mma-swizzle",
        "fragments are read at the swizzle's phase of another row",
        "mma/multiply.cuh",
        "swizzle<kRowBytes>(inside, kMajor == Major::k ? k : mn) * 16;",
        "swizzle<kRowBytes>(inside ^ 4, kMajor == Major::k ? k : mn) * 16;",
        (OPS_GEMM, OPS_GRAD),
    ),
    Mutation(
        "mma-scale-rows",
        "half of the rows of a weight gradient have the routing weights of the others",
        "mma/multiply.cuh",
        "high(slot, k + lane % 4 * 2 + 8) {}",
        "high(slot, k + lane % 4 * 2) {}",
        (OPS_GRAD,),
    ),
    Mutation(
        "mma-narrow-quarter",
        "one of the four partial sums of a fine tile is left out",
        "mma/narrow.cuh",
        "for (int i = 0; i < kWarps; ++i) sum += own[i * kSums + threadIdx.x];",
        "for (int i = 1; i < kWarps; ++i) sum += own[i * kSums + threadIdx.x];",
        (SHAPES, "test_edges.py::test_experts"),
    ),
    # What simt and mma.sync have in common.
    Mutation(
        "gemm-wait",
        "a stage is multiplied before its copies are waited for",
        "gemm.cuh",
        "ptx::wait_copies<kStages - 2>();",
        "ptx::wait_copies<kStages - 1>();",
        (OPS_GEMM, "test_moe.py::test_many_rows_and_long_sums"),
    ),
    Mutation(
        "gemm-bias-of-dead-rows",
        "rows of no expert get the first expert's bias",
        "gemm.cuh",
        """if (to.bias && tile.expert >= 0 && !through) {
      add_bias(multiply, static_cast<const T*>(to.bias) + tile.expert * to.bias_stride""",
        """if (to.bias && !through) {
      add_bias(multiply, static_cast<const T*>(to.bias) + max(tile.expert, 0) * to.bias_stride""",
        (OPS_GEMM,),
    ),
    Mutation(
        "gemm-weight-row",
        "a row has its neighbour's routing weight",
        "gemm.cuh",
        "row_weight[own] = own_weight;",
        "row_weight[own ^ 1] = own_weight;",
        (OPS_GEMM, "test_ops.py::test_gemm_combine"),
    ),
    Mutation(
        "load-32-bit-product",
        "where a row begins is computed in 32 bits",
        "load.cuh",
        "return first + uint64_t(row) * row_bytes;",
        "return first + row * row_bytes;",
        ("test_edges.py::test_more_than_2_31_elements",),
    ),
    Mutation(
        "load-tail",
        "the first value past the end of a row is multiplied too",
        "load.cuh",
        "packed.value[j] = j < left ?",
        "packed.value[j] = j <= left ?",
        (BEYOND,),
    ),
    Mutation(
        "store-tail",
        "the last column of rows that do not end with four of them is not written",
        "epilogue.cuh",
        "if (i < valid) to[i] = converted.value[i];",
        "if (i < valid - 1) to[i] = converted.value[i];",
        ("test_edges.py::test_out_features",),
    ),
    Mutation(
        "dot-tail",
        "a row dot has the products past the last column in it",
        "epilogue.cuh",
        "sum[i] = j < left ? fmaf(scaled.value[j], with_value, sum[i]) : sum[i];",
        "sum[i] = fmaf(scaled.value[j], with_value, sum[i]);",
        ("test_ops.py::test_row_dot_of_infinities",),
    ),
    Mutation(
        "activation-limit",
        "the slope of up is not cut off below -limit",
        "activation.cuh",
        "fabsf(up) > f.limit ? 0.f",
        "up > f.limit ? 0.f",
        ("test_mlp.py::test_exactly_at_the_limits", "test_ops.py::test_gemm_activation_grad"),
    ),
    # The weight gradient.
    Mutation(
        "grad-empty-expert",
        "the gradient of an expert without rows is not written",
        "weight_grad.cuh",
        "const bool nothing = stages == 0 && p.accumulate;",
        "const bool nothing = stages == 0;",
        ("test_weight_grad.py::test_adds_to_what_is_there", "test_edges.py::test_dirty_allocator", OPS_GRAD),
    ),
    Mutation(
        "grad-barrier",
        "a tile's results are staged while its last stages are still read",
        "weight_grad.cuh",
        "__syncthreads();  // the stages have been read, the next tile is known",
        "__syncwarp();",
        (OPS_GRAD, "test_weight_grad.py::test_weights_of_one_change_no_bit"),
    ),
    Mutation(
        "grad-rows",
        "an expert's last row is left out of its gradient",
        "weight_grad.cuh",
        "if (!looks || row >= tile.end) return -1;",
        "if (!looks || row + 1 >= tile.end) return -1;",
        (OPS_GRAD,),
    ),
    # Few rows an expert.
    Mutation(
        "narrow-tail",
        "the columns of a weight past the last feature are multiplied too",
        "narrow.cuh",
        "load_row<ShareW, true>(to_slot, i, from, inside ? ShareW::left(k_left) : 0);",
        "load_row<ShareW, true>(to_slot, i, from, inside);",
        (BEYOND, SHAPES),
    ),
    Mutation(
        "narrow-weight-row",
        "rows have the routing weights of the assignments of their numbers",
        "narrow.cuh",
        "to.row_weight[tile.assignment[threadIdx.x]]",
        "to.row_weight[tile.row + threadIdx.x]",
        (OPS_GEMM, "test_ops.py::test_gemm_combine"),
    ),
    Mutation(
        "narrow-clear",
        "the sums of an MLP are not cleared",
        "narrow.cuh",
        "fill_with_zeros<kThreads>(p.clear,",
        "fill_with_zeros<kThreads>(Clear{},",
        ("test_ops.py::test_mlp",),
    ),
    Mutation(
        "narrow-early-rows",
        "the second product of an MLP does not wait for the first one",
        "narrow.cuh",
        "    if (first) {  // in this order: when the next launch begins, all before this one has ended\n"
        "      wait_for_launch_before();\n",
        "    if (first) {\n",
        ("test_ops.py::test_mlp", "test_mlp.py::test_ids_that_were_written_just_before"),
    ),
    Mutation(
        "narrow-order-of-equal-ids",
        "assignments of an expert that sort themselves are one place too far on",
        "narrow.cuh",
        "before += groups[other] == group && other < assignment;",
        "before += groups[other] == group && other <= assignment;",
        ("test_ops.py::test_mlp",),
    ),
    Mutation(
        "narrow-tiles-before",
        "experts past the first 128 forget the tiles of those before them",
        "narrow.cuh",
        "tiles_before += warp_totals[kThreads / 32 - 1];",
        "tiles_before = 0;",
        ("test_edges.py::test_experts", "test_configs.py::test_few_rows_take_narrow_tiles"),
    ),
    # The sort by expert.
    Mutation(
        "route-clamped-id",
        "a negative id is taken for the first expert",
        "integers.cuh",
        "return 0 <= id && id < E ? int(id) : E;",
        "return id < E ? max(int(id), 0) : E;",
        ("test_routing.py::test_any_distribution_over_experts", "test_routing.py::test_no_id_wraps_around"),
    ),
    Mutation(
        "route-32-bit-id",
        "ids are cut to 32 bits before they are compared",
        "integers.cuh",
        "const int64_t id = __ldcg(ids + assignment);",
        "const int id = int(__ldcg(ids + assignment));",
        ("test_routing.py::test_no_id_wraps_around",),
    ),
    Mutation(
        "route-not-stable",
        "equal ids of a warp come in reverse order",
        "route.cu",
        "__popc(peers[i] & ((1u << lane) - 1));",
        "__popc(peers[i] & ~((2u << lane) - 1));",
        ("test_routing.py::test_orders_in_which_ids_may_come",),
    ),
    Mutation(
        "route-ends",
        "experts end before their rows where there are more than 1023 of them",
        "route.cu",
        "if (expert_of(ids, p.row_assignment[middle], p.E) <= expert) {",
        "if (expert_of(ids, p.row_assignment[middle], p.E) < expert) {",
        ("test_routing.py::test_any_dtype_and_number_of_experts",),
    ),
    Mutation(
        "route-planes",
        "counts of a block are cut to 16 bits",
        "route.cu",
        "plan.planes = plan.chunk >> 16 ? 2 : 1;",
        "plan.planes = 1;",
        ("test_routing.py::test_counts_of_a_block_that_need_more_than_16_bits",),
    ),
    Mutation(
        "group-ends-wrap",
        "a sum of group sizes that int32 cannot hold wraps",
        "group_ends.cu",
        "offs[group] = int(end < -1 ? -1 : end > kMost ? kMost : end);",
        "offs[group] = int(end);",
        ("test_ops.py::test_group_ends",),
    ),
    # The tiles of a launch.
    Mutation(
        "schedule-rest",
        "rows past the last group are not filled with zeros",
        "schedule.cu",
        "const bool counted = group < E || (group == E && tiling.cover_rest);",
        "const bool counted = group < E;",
        ("test_grouped_gemm.py::test_rows_past_the_last_group_are_zero", OPS_GEMM),
    ),
    Mutation(
        "schedule-first-tile",
        "a group's first tile goes to the group before it",
        "scan.cuh",
        "(sums[middle] <= value ? low : high) = middle;",
        "(sums[middle] < value ? low : high) = middle;",
        ("test_grouped_gemm.py::test_matches_the_oracle", OPS_GEMM),
    ),
    Mutation(
        "schedule-short-row",
        "short tiles begin a row late",
        "schedule.cu",
        "{group, end - tail, tail, 0};",
        "{group, end - tail + 1, tail - 1, 0};",
        (TOKENS, "test_moe.py::test_matches_the_oracle"),
    ),
    # Rows added in order.
    Mutation(
        "sum-rows-next-token",
        "the first row of the next token is added too where k is no multiple of what is loaded together",
        "sum_rows.cu",
        "columns[j] = first + j < rows ?",
        "columns[j] = first + j <= rows ?",
        ("test_ops.py::test_sum_rows",),
    ),
    Mutation(
        "sum-rows-tail",
        "columns past the last one are written",
        "sum_rows.cu",
        "valid - i, p.vector);",
        "valid, p.vector);",
        ("test_ops.py::test_sum_rows",),
    ),
    # Hopper's own.
    Mutation(
        "wgmma-65th-row",
        "a tile of 65 rows is taken for one of 64",
        "wgmma/gemm.cuh",
        "tile.rows <= kRows ? multiply(Constant<1>{}, columns)",
        "tile.rows <= kRows + 1 ? multiply(Constant<1>{}, columns)",
        (TOKENS,),
    ),
    Mutation(
        "wgmma-shared-weights",
        "the CTAs of a cluster share weights where their experts differ",
        "wgmma/gemm.cuh",
        "tile.shares = rows.expert >= 0 && rows.expert == other_expert;",
        "tile.shares = rows.expert >= 0 && other_expert >= 0;",
        (OPS_GEMM, SHAPES),
    ),
    Mutation(
        "wgmma-early-release",
        "a stage is given back while it is multiplied",
        "wgmma/gemm.cuh",
        """ptx::wgmma_wait<1>();
          if (running >= 0) release(running);
          running = turn.slot;""",
        "release(turn.slot);",
        ("test_moe.py::test_many_rows_and_long_sums", "test_configs.py::test_same_bits"),
    ),
    Mutation(
        "wgmma-store-tail",
        "the last four columns of float32 rows are not written",
        "wgmma/write.cuh",
        "if (row >= tile.rows || first >= p.N - j * 16) continue;",
        "if (row >= tile.rows || first + 4 >= p.N - j * 16) continue;",
        (OPS_GEMM, SHAPES),
    ),
    Mutation(
        "wgmma-dot-tile",
        "partial row dots of all tiles go to one place",
        "wgmma/write.cuh",
        "p.epilogue.dot[int64_t(tile.column / kTileN) * p.S + tile.assignment[row]] = dot;",
        "p.epilogue.dot[tile.assignment[row]] = dot;",
        (OPS_GEMM, "test_ops.py::test_gemm_without_a_result"),
    ),
    Mutation(
        "wgmma-grad-swizzle",
        "rows are read at the swizzle's phase of another one",
        "wgmma/weight_grad.cuh",
        "a_row * 128 + (a_chunk ^ a_row % 8) * 16;",
        "a_row * 128 + (a_chunk ^ (a_row + 4) % 8) * 16;",
        (OPS_GRAD,),
    ),
    Mutation(
        "wgmma-grad-empty-expert",
        "the gradient of an expert without rows is not written",
        "wgmma/weight_grad.cuh",
        "if (stages == 0 && p.accumulate) continue;",
        "if (stages == 0) continue;",
        ("test_weight_grad.py::test_adds_to_what_is_there", "test_edges.py::test_dirty_allocator", OPS_GRAD),
    ),
    Mutation(
        "wgmma-grad-next-stage",
        "all rows of an expert have the routing weights of its first 64",
        "wgmma/weight_grad.cuh",
        "assignment[1] = assignment[2], weight[0] = weight[1];",
        "assignment[1] = assignment[2];",
        (TOKENS, SHAPES),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true")
    what.add_argument("--check", action="store_true")
    what.add_argument("--build", type=Path, metavar="DIR")
    what.add_argument("--run", type=Path, metavar="DIR")
    parser.add_argument("--only", help="names, with commas between them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="sources compiled at once")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else [UNCHANGED, *(m.name for m in MUTATIONS)]
    if unknown := set(names) - {UNCHANGED, *(m.name for m in MUTATIONS)}:
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}")
    chosen = [m for m in MUTATIONS if m.name in names]
    try:
        if args.list:
            for mutation in chosen:
                print(f"{mutation.name:<24} {mutation.file:<22} {mutation.fault}")
        elif args.check:
            check(chosen)
        elif args.build:
            build(chosen, UNCHANGED in names, args.build.absolute(), args.jobs)
        else:
            return run(chosen, UNCHANGED in names, args.run.absolute())
    except build_tool.BuildError as error:
        print(f"mutate.py: {error}", file=sys.stderr)
        return 1
    return 0


def mutated(mutation: Mutation, text: str) -> str:
    """The source with the fault; the piece that is replaced must be there once."""
    if (count := text.count(mutation.old)) != 1:
        raise build_tool.BuildError(f"{mutation.name}: csrc/{mutation.file} has its piece {count} times.")
    return text.replace(mutation.old, mutation.new)


def apply(mutation: Mutation, root: Path) -> None:
    file = root / "csrc" / mutation.file
    file.write_text(mutated(mutation, file.read_text()))


def copy_of_the_project(root: Path) -> None:
    """What a build reads."""
    for name in ("csrc", "torch-ext"):
        shutil.copytree(ROOT / name, root / name, dirs_exist_ok=True)
    shutil.copyfile(ROOT / "build.toml", root / "build.toml")


def unit_with(file: str, units: list[build_tool.Unit], root: Path) -> build_tool.Unit:
    """The first source that is compiled with this file."""

    def included(source: Path, seen: set[Path]) -> set[Path]:
        for name in re.findall(r'#include "(.*?)"', source.read_text()):
            for folder in (source.parent, root / "csrc"):
                if (found := (folder / name).resolve()).exists() and found not in seen:
                    seen |= included(found, seen | {found})
        return seen | {source}

    wanted = (root / "csrc" / file).resolve()
    return next(u for u in units if u.source.endswith(".cu") and wanted in included((root / u.source).resolve(), set()))


def check(chosen: list[Mutation]) -> None:
    """Compiles one source with each fault in it."""
    project, cuda, cxx = build_tool.Project.read(ROOT, "cuda"), build_tool.Cuda.find(None), build_tool.find_cxx()
    for mutation in chosen:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder)
            build_tool.make_copy(ROOT, project, copy)
            units = build_tool.plan_units(project, "mutated", copy, cxx, cuda, [ARCHITECTURE])
            unit = unit_with(mutation.file, units, copy)
            apply(mutation, copy)
            seconds = build_tool.compile_unit(unit, copy, copy)[2]
        print(f"{mutation.name:<24} {unit.source} compiles, {seconds:.1f} s", flush=True)


def build(chosen: list[Mutation], unchanged: bool, folder: Path, jobs: int) -> None:
    """Each in a folder of its name. Objects are kept, so that a fault in a source of its own compiles just that."""
    root = folder / "sources"
    for mutation in [*([None] if unchanged else []), *chosen]:
        copy_of_the_project(root)
        name = mutation.name if mutation else UNCHANGED
        if mutation:
            apply(mutation, root)
        print(f"== {name}", flush=True)
        arguments = ["cuda", "--arch", ARCHITECTURE, "--root", root, "--output", folder / name, "--jobs", jobs]
        build_tool.build(build_tool.parse_arguments(list(map(str, arguments))))


def variant_of(folder: Path, name: str) -> Path:
    found = [file.parent for file in (folder / name).glob("torch-*/metadata.json")]
    if len(found) != 1:
        raise build_tool.BuildError(f"{folder / name} has no variant: run tools/mutate.py --build {folder} first.")
    return found[0]


def run(chosen: list[Mutation], unchanged: bool, folder: Path) -> int:
    """Where the sources as they are fail a test, no result means anything."""
    if unchanged:
        tests = tuple(dict.fromkeys(test for mutation in chosen for test in mutation.tests))
        if (found := tried(variant_of(folder, UNCHANGED), tests, 3 * LIMIT)) != "survived":
            print(f"The sources as they are: {found}.", file=sys.stderr)
            return 1
    results = {}
    for mutation in chosen:
        results[mutation.name] = tried(variant_of(folder, mutation.name), mutation.tests)
        print(f"{mutation.name:<24} {results[mutation.name]}", flush=True)
        TABLE.write_text(with_results(TABLE.read_text(), results))
    survivors = [name for name, result in results.items() if not result.startswith("caught")]
    print(f"{len(results) - len(survivors)} of {len(results)} are caught." + "".join(f"\n  not {n}" for n in survivors))
    return int(bool(survivors))


def tried(variant: Path, tests: tuple[str, ...], limit: float = LIMIT) -> str:
    """What becomes of a variant in these tests, as far as they are not the CPU's; the first failure is enough."""
    environment = {**os.environ, "LOCAL_KERNELS": f"phanerozoic/grouped-gemm-moe={variant}"}
    how = ["-q", "-x", "-p", "no:cacheprovider", "-k", "not cpu"]
    command = [sys.executable, "-m", "pytest", *how, *(f"tests/{test}" for test in tests)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"caught, no end in {limit:g} s"
    return verdict(process.returncode, output)


def verdict(status: int, output: str) -> str:
    """From pytest's exit status and what it printed; tests that were all skipped are no answer."""
    if status == 1 and (failed := re.search(r"^(?:FAILED|ERROR) tests/(\S+?)(?:\[| |$)", output, re.MULTILINE)):
        return f"caught by `{failed[1]}`"
    if status < 0 or status > 5:
        return f"caught, the process ended with {status}"
    if status == 0 and re.search(r"\d+ passed", output):
        return "survived"
    return f"no answer, pytest ended with {status}"


def row(mutation: Mutation, result: str) -> str:
    tests = ", ".join(f"`{test}`" for test in mutation.tests)
    return f"| `{mutation.name}` | {mutation.fault} | `csrc/{mutation.file}` | {tests} | {result} |"


def with_results(text: str, results: dict[str, str]) -> str:
    """The table with new results, dated; those that there were stay."""
    today = datetime.date.today().isoformat()
    known = dict(re.findall(r"^\| `([\w-]+)` \|.*\| ([^|]*) \|$", text, re.MULTILINE))
    known |= {name: f"{result}, {today}" for name, result in results.items()}
    head, _, _ = text.partition("| name |")
    lines = ["| name | fault | file | what should catch it | result |", "| --- | --- | --- | --- | --- |"]
    return head + "\n".join(lines + [row(m, known.get(m.name, PENDING)) for m in MUTATIONS]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
