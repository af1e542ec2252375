"""The record of what was measured on a GPU: its form, its files, and how a new measurement enters it.

A record is a JSON file in benchmarks/results. Each part carries the digest of the sources that it was measured on.
Null stands for what could not be measured, because the attempt failed.
"""

import json
import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "plots"

NUMBER, MEASURED, COUNTED = (int, float), (int, float, type(None)), (int, type(None))
STAMP = {"source_digest": str, "date": str}
CORRECTNESS = {"name": str, "dtype": str, "metric": str, "value": MEASURED, "limit": NUMBER}
SIZES = {"T": int, "K": int, "N": int, "I": COUNTED, "E": int, "k": int}
KIND = {
    **{"op": str, "shape": str, **SIZES},
    **{"dtype": str, "path": str, "mode": str, "pass": str, "distribution": str},
}
ROW = {**KIND, "ms": MEASURED, "tflops": MEASURED, "dense_ms": MEASURED, "bytes_peak": COUNTED, "peers": {str: NUMBER}}
MEMORY = {
    **{"bytes_peak": COUNTED, "bytes_saved": COUNTED},
    **{"peers_bytes_peak": {str: COUNTED}, "peers_bytes_saved": {str: COUNTED}},
}
SWEEP_ROW = {**ROW, **MEMORY}
MEMORY_ROW = {**KIND, **MEMORY}
MODEL_ROW = {
    **{"task": str, "experts": str, "sequences": int, "prompt": int, "new": int, "tokens": int},
    **{"T": int, "H": int, "I": int, "E": int, "k": int, "layers": int, "transformers": str, "dtype": str},
    **{"ms": MEASURED, "bytes_peak": COUNTED, "left_out": (str, type(None))},
}
OPTIONAL = {"fuzz", "transformers"}  # parts that are measured where they are asked for
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
MACHINE = {"gpu": str, "torch": str, "cuda": str}
PARTS = {
    "tests": {"passed": int, "failed": int, "skipped": int, **STAMP},
    "sanitizer": {**dict.fromkeys(SANITIZERS, COUNTED), **STAMP},
    "fuzz": {"seed": int, "minutes": NUMBER, "cases": int, "failures": int, **STAMP},
    "correctness": [{**CORRECTNESS, **STAMP}],
    "rows": [{**ROW, **STAMP}],
    "sweeps": [{**SWEEP_ROW, **STAMP}],
    "memory": [{**MEMORY_ROW, **STAMP}],
    "tiles": [{**ROW, **STAMP}],
    "transformers": [{**MODEL_ROW, **STAMP}],
}
ROW_KEY = ("op", "shape", "dtype", "path", "mode", "pass", "distribution")


def mismatches(value, form, where: str = "record") -> list[str]:
    """Where a value is not of a form: a type or types, [form of each], {name: form} or {str: form of each}."""
    if isinstance(form, list) and isinstance(value, list):
        return [found for i, item in enumerate(value) for found in mismatches(item, form[0], f"{where}[{i}]")]
    if isinstance(form, dict) and isinstance(value, dict):
        if str in form:
            form = dict.fromkeys(value, form[str])
        found = [f"{where} lacks {name}" for name in form if name not in value]
        found += [f"{where} should not have {name}" for name in value if name not in form]
        for name in form.keys() & value.keys():
            found += mismatches(value[name], form[name], f"{where}.{name}")
        return found
    fits = not isinstance(form, (list, dict)) and isinstance(value, form) and not isinstance(value, bool)
    return [] if fits else [f"{where} is {value!r}"]


def record_mismatches(record: dict) -> list[str]:
    """Where a record departs from its form. It may lack parts that were not measured yet."""
    return mismatches(record, {**MACHINE, **{part: form for part, form in PARTS.items() if part in record}})


def merged(record: dict, update: dict) -> dict:
    """The record with a newly measured part.

    Rows replace those of the same kind, a sanitizer's count those of the same one and of other sources; other parts are
    replaced whole.
    """
    for name in MACHINE if record else ():
        if record[name] != update[name]:
            raise ValueError(f"the record is of {name} {record[name]}, the measurement of {update[name]}")
    result = {**record, **update}
    if "rows" in update:
        rows = {tuple(row[name] for name in ROW_KEY): row for row in [*record.get("rows", []), *update["rows"]]}
        result["rows"] = list(rows.values())
    if "sanitizer" in update:
        before, now = record.get("sanitizer", {}), update["sanitizer"]
        kept = before if before.get("source_digest") == now["source_digest"] else {}
        result["sanitizer"] = {**dict.fromkeys(SANITIZERS), **kept, **now}
    return result


def file_name(gpu: str) -> str:
    """NVIDIA H200 -> h200"""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia")).strip("-")


def plot_file(gpu: str, name: str) -> Path:
    return PLOTS / f"{file_name(gpu)}-{name}.png"


def read(file: Path) -> dict:
    """The record in a file; empty where there is none."""
    return json.loads(file.read_text()) if file.exists() else {}


def write(file: Path, record: dict) -> None:
    """Replaces the file at once, so that a reader never sees half a record."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    os.replace(partial, file)
