#!/usr/bin/env python3
"""Measure the built package on this machine's GPU and keep the figures in benchmarks/results.

    python tools/record_gpu.py                      everything but what is measured where it is asked for
    python tools/record_gpu.py --only tests,rows    some parts; the others stay as they are
    python tools/record_gpu.py --only rows --ops moe_mlp --path mma    some rows
    python tools/record_gpu.py --only sanitizer --sanitizers racecheck  one of compute-sanitizer's tools
    python tools/record_gpu.py --only fuzz --minutes 10                 the fuzzer, tests/fuzz.py
    python tools/record_gpu.py --only transformers                      a model of transformers, benchmarks/model.py

The record is written after each part. A part that fails is recorded as it failed, and the exit status is 1.
Build first (tools/build.py): what is measured is the variant in build/.
"""

import argparse
import datetime
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import record as records
import torch
from source_digest import source_digest

BENCHMARKS = records.ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import package  # noqa: E402

SWEEP = records.ROOT / "tools" / "sanitize_sweep.py"
SHARES = 16  # processes that a sanitizer's sweep is shared among
ROW_CHOICES = ("ops", "shapes", "path")
ERRORS = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [part for part in PARTS if part not in records.OPTIONAL]
    parser.add_argument("--only", default=",".join(usual), metavar="PARTS", help=f"of {','.join(PARTS)}")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the record; benchmarks/results/<gpu>.json if left out"
    )
    for choice in ROW_CHOICES:
        parser.add_argument(f"--{choice}", help="rows: as in benchmarks/compare.py")
    parser.add_argument("--jobs", type=int, help="tests: processes to run them in (needs pytest-xdist)")
    parser.add_argument("--sanitizers", default=",".join(records.SANITIZERS), metavar="TOOLS", help="which of them")
    parser.add_argument("--minutes", type=float, default=10, help="fuzz: how long")
    parser.add_argument("--seed", type=int, help="fuzz: as in tests/fuzz.py")
    args = parser.parse_args()
    parts = args.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure")

    os.environ.setdefault("LOCAL_KERNELS", f"phanerozoic/grouped-gemm-moe={records.ROOT}")
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    output = args.output or records.RESULTS / f"{records.file_name(machine['gpu'])}.json"
    if built_from() != source_digest():
        parser.error("the variant in build/ was built from other sources: run tools/build.py")
    # Of a record that is measured whole nothing is kept: torch may be another one.
    record, failed = {} if set(parts) >= set(usual) else records.read(output), []
    for part in parts:
        print(f"== {part}", flush=True)
        stamp = {"source_digest": source_digest(), "date": datetime.date.today().isoformat()}
        measured, good = PARTS[part](args)
        if isinstance(measured, list):
            measured = [{**item, **stamp} for item in measured]
        else:
            measured = {**measured, **stamp}
        record = records.merged(record, {**machine, part: measured})
        records.write(output, record)
        failed += [] if good else [part]
    print(f"{output}: " + (f"{', '.join(failed)} FAILED" if failed else "all is well"))
    return 1 if failed else 0


def built_from() -> str | None:
    """The digest of the sources of the variant that is loaded; None if it was not built here."""
    name = f"{Path(package.load().__file__).parent.name}.sources.txt"
    file = records.ROOT / "build" / name
    return file.read_text().strip() if file.exists() else None


def run_tests(args) -> tuple[dict, bool]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        jobs = ["-n", str(args.jobs)] if args.jobs else []
        status = python("-m", "pytest", "-q", f"--junitxml={report}", *jobs)
        counts = count_tests(report.read_text() if report.exists() else None, status)
    return counts, not counts["failed"]


def count_tests(report: str | None, status: int) -> dict:
    """From a JUnit report. A run that ended badly without saying which test failed counts as one failure."""
    suites = ElementTree.fromstring(report).iter("testsuite") if report else ()
    total = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for name in total:
            total[name] += int(suite.get(name, 0))
    failed = total["failures"] + total["errors"]
    passed = total["tests"] - failed - total["skipped"]
    return {"passed": passed, "failed": failed or int(status != 0), "skipped": total["skipped"]}


def run_sanitizer(args) -> tuple[dict, bool]:
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    tools = args.sanitizers.split(",")
    if not program:
        print("compute-sanitizer is not on the PATH")
        return dict.fromkeys(tools), False
    # Every tensor gets an allocation of its own, so that a step past its end is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    def errors(tool, share):
        command = [program, "--tool", tool, "--report-api-errors", "no", sys.executable, SWEEP, "--share"]
        run = subprocess.run(
            [*command, f"{share}/{SHARES}"],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        count, lines = count_errors(run.stdout, run.returncode), run.stdout.splitlines()
        print("\n".join([tool, *(lines[-4:] if count == 0 else [*lines[:60], "...", *lines[-4:]])]), flush=True)
        return count

    # A tool works on one core of the host for most of its time.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        counts = {tool: [pool.submit(errors, tool, share) for share in range(SHARES)] for tool in tools}
    counts = {tool: [count.result() for count in of_tool] for tool, of_tool in counts.items()}
    found = {tool: None if None in of_tool else sum(of_tool) for tool, of_tool in counts.items()}
    return found, all(count == 0 for count in found.values())


def count_errors(output: str, status: int) -> int | None:
    """The count in a tool's last line; None if there is none, or if the program failed with nothing found."""
    summary = ERRORS.search(output)
    count = int(summary[1]) if summary else None
    return None if count == 0 and status != 0 else count


def run_fuzz(args) -> tuple[dict, bool]:
    seed = random.getrandbits(32) if args.seed is None else args.seed
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counts.json"
        how = ["--device", "cuda", "--minutes", str(args.minutes), "--seed", str(seed), "--json", file]
        status = python(records.ROOT / "tests" / "fuzz.py", *how)
        counts = count_cases(file.read_text() if file.exists() else None, seed, args.minutes, status)
    return counts, not counts["failures"]


def count_cases(counts: str | None, seed: int, minutes: float, status: int) -> dict:
    """What the fuzzer wrote. One that ended badly without saying which case failed counts as one failure."""
    found = json.loads(counts) if counts else {"seed": seed, "minutes": minutes, "cases": 0, "failures": 0}
    return {**found, "failures": found["failures"] or int(status != 0)}


def run_correctness(args) -> tuple[list, bool]:
    rows, status = json_of("correctness.py")
    if rows is None:
        name = "benchmarks/correctness.py ended before it was done"
        rows = [{"name": name, "dtype": "-", "metric": "exit status", "value": status, "limit": 0}]
    for row in rows:
        row["value"] = row["value"] if math.isfinite(row["value"]) else None
    return rows, status == 0


def run_rows(args) -> tuple[list, bool]:
    chosen = {choice: getattr(args, choice) for choice in ROW_CHOICES}
    rows, good = rows_of("compare.py", *(f"--{choice}={value}" for choice, value in chosen.items() if value))
    if any(chosen.values()):
        return rows, good
    few_tokens, few_good = rows_of("decode.py")
    return rows + few_tokens, good and few_good


def run_sweeps(args) -> tuple[list, bool]:
    return rows_of("sweep.py")


def run_memory(args) -> tuple[list, bool]:
    return rows_of("memory.py")


def run_tiles(args) -> tuple[list, bool]:
    return rows_of("tiles.py")


def run_transformers(args) -> tuple[list, bool]:
    return rows_of("model.py")


def rows_of(script: str, *options: str) -> tuple[list, bool]:
    rows, status = json_of(script, *options)
    return rows or [], status == 0


def json_of(script: str, *options: str) -> tuple[list | None, int]:
    """What a benchmark wrote, None if nothing, and its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        status = python(BENCHMARKS / script, "--device", "cuda", "--json", file, *options)
        return json.loads(file.read_text()) if file.exists() else None, status


def python(*arguments) -> int:
    return subprocess.run([sys.executable, *arguments], cwd=records.ROOT).returncode


PARTS = {
    "tests": run_tests,
    "sanitizer": run_sanitizer,
    "fuzz": run_fuzz,
    "correctness": run_correctness,
    "rows": run_rows,
    "sweeps": run_sweeps,
    "memory": run_memory,
    "tiles": run_tiles,
    "transformers": run_transformers,
}

if __name__ == "__main__":
    sys.exit(main())
