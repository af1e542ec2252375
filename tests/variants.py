"""What holds for every built variant, whichever backend it is for, and how tests build and load one."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from kernel_abi_check import ObjectFile
from kernels._rust import Backend, Metadata

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torch-ext" / "grouped_gemm_moe"

sys.path.insert(0, str(ROOT / "tools"))
import build as build_tool  # noqa: E402, F401


def run_build(*arguments, **environment):
    """tools/build.py as its users run it, in a process of its own."""
    command = [sys.executable, str(ROOT / "tools" / "build.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def run_python(code, *arguments):
    """What `code` prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def library_of(variant):
    (library,) = variant.glob("*.so")
    return library


def check_links(variant, heading):
    """SECURITY.md has what the variant links to. The versions of the symbols are up to the machine that builds it."""
    library = library_of(variant)
    # torch's libraries are those of the process that imports it, not of a folder of the machine that built it.
    dynamic = subprocess.run(["readelf", "--dynamic", library], capture_output=True, text=True, check=True).stdout
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    text = (ROOT / "SECURITY.md").read_text()
    (table,) = re.findall(rf"^### {heading}\n\n((?:\|.*\n)+)", text, re.MULTILINE)
    found = build_tool.links_table(library) + "\n"
    compiler = build_tool.output_of([build_tool.find_cxx(), "-dumpfullversion"]).strip()
    here = f"g++ {compiler} and {os.confstr('CS_GNU_LIBC_VERSION')} on {platform.machine()}"
    if here not in text:  # then the names alone, but for the loader's, which is the machine's
        table, found = (re.findall(r"^\| `(?!ld-)(.*?)` \|", rows, re.MULTILINE) for rows in (table, found))
    assert found == table


def check_files(variant):
    """The Python package, flattened, and three generated files."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    python = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "_ops.py"]
    there = [path for path in variant.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {*python, "_ops.py", "metadata.json", f"{name}.abi3.so"}
    assert {path.relative_to(variant).as_posix() for path in there} == expected


def check_metadata(variant):
    metadata = Metadata.read_from_file(variant / "metadata.json")
    compute = re.fullmatch(r"torch-stable-abi211-(cpu|cu\d+)-(x86_64|aarch64)-linux", variant.name)[1]
    backend = "cpu" if compute == "cpu" else "cuda"
    assert str(metadata.name) == "grouped-gemm-moe"
    assert re.fullmatch(rf"_grouped_gemm_moe_{backend}_[0-9a-f]+", metadata.id)
    assert (metadata.version, metadata.license, metadata.python_depends) == (1, "Apache-2.0", [])
    assert metadata.backend.backend_type == Backend.from_str(backend)
    assert bool(metadata.backend.archs) == (backend == "cuda")


def check_symbols(variant):
    """Any Python from 3.9 on can import it, and other builds of it can be in the process already."""
    library = library_of(variant)
    assert ObjectFile(library).check_python_abi("3.9") == []
    table = subprocess.run(["readelf", "--dyn-syms", "--wide", library], capture_output=True, text=True, check=True)
    symbols = [line.split() for line in table.stdout.splitlines() if re.match(r"\s*\d+:", line)]
    assert f"PyInit_{library.name.removesuffix('.abi3.so')}" in [fields[-1] for fields in symbols]
    assert [fields for fields in symbols if "UNIQUE" in fields] == []
