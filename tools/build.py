#!/usr/bin/env python3
"""Build one variant of the package, laid out as the kernels hub lays it out.

    python tools/build.py                    the variant for this machine
    python tools/build.py cpu                needs g++ and an installed torch
    python tools/build.py cuda --arch 9.0    needs nvcc too, but neither a GPU nor a CUDA build of torch
    python tools/build.py --links            what the variant links to, once it is built

build.toml says what is compiled and for which GPUs. Sources are compiled in a temporary copy that holds only the
files it lists, so a file missing there fails here and not at publishing. Objects are kept in build/objects and
reused while neither their sources nor their command change. What ptxas reports of each kernel is written to
build/<variant>.ptxas.txt, the digest of the sources to build/<variant>.sources.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    try:
        import tomli as tomllib
    except ModuleNotFoundError:
        sys.exit("build.py: tomli is not installed, which Python 3.10 needs to read build.toml: pip install tomli.")

from source_digest import source_digest

ROOT = Path(__file__).resolve().parents[1]

# What every source is compiled with. Hidden symbols, and none that the loader makes unique in the process, so that
# two versions of the package can be loaded at once.
HOST_FLAGS = ["-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"]
CXX_FLAGS = ["-std=c++17", "-O2", "-Wall", *HOST_FLAGS]
# Objects name the files that nvcc writes in between: beside the object, with -objtemp, they are named after it.
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xptxas=-v", "-objtemp", "-Xcompiler=" + ",".join(HOST_FLAGS)]

# All that the package takes from libtorch_cuda.so. Linking with a stand-in of these names leaves a library that finds
# the real one in the process that imports it, so no CUDA build of torch is needed here.
TORCH_CUDA_SYMBOLS = ["aoti_torch_get_current_cuda_stream"]

# An importable module without contents, in the words of CPython's stable ABI: no Python headers are needed. The
# import of PyModule_Create2 is weak because the interpreter, not a library that could be linked, provides it.
REGISTRATION_H = """\
#pragma once

#include <cstddef>

#define STABLE_TORCH_LIBRARY_EXPAND(NAME, MODULE) STABLE_TORCH_LIBRARY(NAME, MODULE)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, DEVICE, MODULE) STABLE_TORCH_LIBRARY_IMPL(NAME, DEVICE, MODULE)

struct StableModuleDef {
  std::ptrdiff_t reference_count;
  void* type;
  void* init;
  std::ptrdiff_t index;
  void* copy;
  const char* name;
  const char* doc;
  std::ptrdiff_t size;
  void *methods, *slots, *traverse, *clear, *free;
};

extern "C" __attribute__((weak)) void* PyModule_Create2(StableModuleDef*, int abi_version);

#define REGISTER_EXTENSION_NAMED(NAME, STRING)                                    \\
  extern "C" __attribute__((visibility("default"))) void* PyInit_##NAME() {       \\
    static StableModuleDef module = {1, nullptr, nullptr, 0, nullptr, STRING};    \\
    return PyModule_Create2(&module, 3);                                          \\
  }
#define REGISTER_EXTENSION_QUOTED(NAME, QUOTED) REGISTER_EXTENSION_NAMED(NAME, #QUOTED)
#define REGISTER_EXTENSION(NAME) REGISTER_EXTENSION_QUOTED(NAME, NAME)
"""

OPS_PY = """\
import torch

from . import {id}

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    \"\"\"The name under which torch knows one of this package's ops.\"\"\"
    return f"{id}::{{op_name}}"
"""


class BuildError(Exception):
    """Why there is no build, in one sentence for the person who asked for it."""


# ---------------------------------------------------------------------------------------------------------------------
# What to build


@dataclass(frozen=True)
class Section:
    """Sources that are compiled alike: [torch], or one [kernel.…] of build.toml."""

    files: list[str]  # headers included
    include: list[str]
    flags: list[str]
    capabilities: list[str]  # GPUs its kernels are for; none in [torch]

    def architectures(self, gpus: list[str]) -> list[str]:
        """What to compile for these GPUs: code for just that GPU (9.0a) where the section has it, else the newest
        that its generation shares. Empty where the section has nothing that they run."""
        chosen = {}
        for gpu in gpus:
            own = [c for c in self.capabilities if c in (f"{gpu}a", f"{gpu}f")]
            shared = [c for c in self.capabilities if c[-1].isdigit() and number(c)[0] == number(gpu)[0]]
            runs = sorted((c for c in shared if number(c) <= number(gpu)), key=number)
            chosen.update(dict.fromkeys(own or runs[-1:]))
        return list(chosen)


@dataclass(frozen=True)
class Project:
    """What build.toml says, for one backend."""

    name: str
    version: int
    license: str
    backend: str
    stable_abi: str
    sections: list[Section]

    @classmethod
    def read(cls, root: Path, backend: str) -> Project:
        config = tomllib.loads((root / "build.toml").read_text())
        kernels = [k for k in config.get("kernel", {}).values() if k["backend"] == backend]
        sections = [
            Section(
                files=list(section["src"]),
                include=list(section.get("include", [])),
                flags=[*section.get("cxx-flags", []), *section.get("cuda-flags", [])],
                capabilities=list(section.get("cuda-capabilities", [])),
            )
            for section in [config["torch"], *kernels]
        ]
        general = config["general"]
        abi = config["torch"]["stable-abi"][backend]
        return cls(general["name"], general["version"], general["license"], backend, abi, sections)

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def capabilities(self) -> list[str]:
        """Every GPU that some section names."""
        return sorted({c.rstrip("af") for s in self.sections for c in s.capabilities}, key=number)

    def variant(self, cuda_version: str | None) -> str:
        compute = f"cu{cuda_version.replace('.', '')}" if cuda_version else "cpu"
        return f"torch-stable-abi{self.stable_abi.replace('.', '')}-{compute}-{platform.machine()}-linux"

    def target_version(self) -> str:
        """The stable ABI that is compiled for, as torch's headers want it."""
        major, minor = map(int, self.stable_abi.split("."))
        return f"0x{major << 56 | minor << 48:016x}"


def number(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.rstrip("af").split("."))


def python_files(root: Path, package: str) -> list[str]:
    folder = root / "torch-ext" / package
    files = (path for path in folder.rglob("*.py") if path.relative_to(folder).as_posix() != "_ops.py")
    return sorted(path.relative_to(root).as_posix() for path in files)


# ---------------------------------------------------------------------------------------------------------------------
# What to build with


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise BuildError(f"torch is not installed for {sys.executable}: pip install -r requirements/torch.txt.")
    return Path(spec.origin).parent


def find_cxx() -> str:
    cxx = os.environ.get("CXX", "g++")
    if not shutil.which(cxx):
        raise BuildError(f"No C++ compiler: {cxx} was not found (Debian and Ubuntu: apt install g++).")
    return cxx


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit."""

    nvcc: Path
    home: Path
    version: str
    supported: list[str]  # capabilities

    @classmethod
    def find(cls, nvcc: str | None) -> Cuda:
        candidates = [nvcc] if nvcc else [shutil.which("nvcc"), *cls._usual_places()]
        path = next((Path(c).resolve() for c in candidates if c and Path(c).is_file()), None)
        if path is None:
            missing = f"{nvcc} does not exist" if nvcc else "nvcc was not found on the PATH, in CUDA_HOME or from pip"
            raise BuildError(f"No CUDA compiler: {missing}; install the CUDA toolkit or name its nvcc with --nvcc.")
        release = re.search(r"release (\d+\.\d+)", printed_by([path, "--version"]))
        # The nvcc on the PATH may be a wrapper; the compiler itself knows where it lies.
        top = re.search(r"^#\$ TOP=(.*)$", printed_by([path, "--dryrun", "-E", "-x", "cu", os.devnull]), re.MULTILINE)
        codes = re.findall(r"compute_(\d+)(\d)$", printed_by([path, "--list-gpu-arch"]), re.MULTILINE)
        if not (release and top and codes):
            raise BuildError(f"{path} does not answer as a CUDA compiler does; name another nvcc with --nvcc.")
        return cls(path, Path(top[1]).resolve(), release[1], [f"{major}.{minor}" for major, minor in codes])

    @staticmethod
    def _usual_places() -> list[Path]:
        homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
        pip = importlib.util.find_spec("nvidia")
        homes += [Path(folder) / "cu13" for folder in (pip.submodule_search_locations if pip else [])]
        return [Path(home) / "bin" / "nvcc" for home in homes if home]

    def library(self, name: str) -> Path:
        for folder in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib"):
            if (self.home / folder / name).exists():
                return self.home / folder / name
        raise BuildError(f"{name} was not found beside {self.nvcc}: install the CUDA runtime's development files.")


def printed_by(command: list) -> str:
    """All that a command prints, whether or not it succeeds."""
    return subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def output_of(command: list) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


def gpus_here() -> list[str]:
    """Compute capabilities of this machine's GPUs."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True)
    return sorted(set(re.findall(r"^\d+\.\d+$", found.stdout, re.MULTILINE)), key=number)


def default_backend() -> str:
    """CUDA where there is a GPU and a torch that can use it."""
    return "cuda" if gpus_here() and (torch_folder() / "lib" / "libtorch_cuda.so").exists() else "cpu"


def choose_architectures(project: Project, cuda: Cuda, asked: list[str] | None) -> list[str]:
    """The GPUs to build for: those asked for, else the one here, else all that this nvcc knows."""
    wanted = asked or gpus_here() or [c for c in project.capabilities if c in cuda.supported]
    for gpu in wanted:
        built = {c for s in project.sections for c in s.architectures([gpu])}
        if not built:
            raise BuildError(f"build.toml has no sources for {gpu}, only for {', '.join(project.capabilities)}.")
        if unknown := [c for c in built if c.rstrip("af") not in cuda.supported]:
            raise BuildError(f"nvcc {cuda.version} cannot compile for {', '.join(unknown)}.")
    return wanted


# ---------------------------------------------------------------------------------------------------------------------
# Compiling


@dataclass(frozen=True)
class Unit:
    """One source and the command that compiles it in the copy, up to the name of the object."""

    source: str
    compiler: str  # its version
    command: list[str]
    inputs: list[str]  # every file the command may read

    def key(self, copy: Path) -> str:
        contents = [text for name in self.inputs for text in (name, (copy / name).read_text())]
        return digest([self.compiler, *self.command, *contents])


def digest(parts: list[str]) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode())
        state.update(b"\0")
    return state.hexdigest()


def identify(root: Path, project: Project, architectures: list[str], compilers: list[str]) -> str:
    """The name of this build: its module, and the namespace of its ops. Different contents have different names."""
    files = [name for section in project.sections for name in section.files]
    files += ["build.toml", *python_files(root, project.python_name)]
    contents = [text for name in sorted(files) for text in (name, read_listed(root, name))]
    tool = Path(__file__).read_text()
    name = digest([tool, *architectures, "", *compilers, "", *contents])[:10]
    return f"_{project.python_name}_{project.backend}_{name}"


def read_listed(root: Path, name: str) -> str:
    if not (root / name).is_file():
        raise BuildError(f"{name} is listed in build.toml but is not there.")
    return (root / name).read_text()


def make_copy(root: Path, project: Project, copy: Path) -> None:
    for section in project.sections:
        for name in section.files:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, copy / name)
    (copy / "torch-ext").mkdir(exist_ok=True)
    (copy / "torch-ext" / "registration.h").write_text(REGISTRATION_H)


def plan_units(project: Project, build_id: str, copy: Path, cxx: str, cuda: Cuda | None, gpus: list[str]) -> list[Unit]:
    cxx_version = output_of([cxx, "-dumpfullversion"])
    defines = [f"-DTORCH_TARGET_VERSION={project.target_version()}"]
    system = [torch_folder() / "include"]
    if cuda:
        defines.append("-DUSE_CUDA")
        system.append(cuda.home / "include")
    listed = [name for section in project.sections for name in section.files]
    headers = [name for name in listed if not name.endswith((".cpp", ".cu"))] + ["torch-ext/registration.h"]
    # The same sources give the same variant, byte for byte, wherever they and torch lie: torch's headers write their
    # own path into messages, and nvcc tells sources' hidden names apart by their paths, or by random numbers.
    unplaced = f"-ffile-prefix-map={torch_folder() / 'include'}/="
    units = []
    for section in project.sections:
        include = [f"-I{folder}" for folder in section.include]
        include += [part for folder in system for part in ("-isystem", str(folder))]
        common = [*section.flags, *defines, *include]
        for source in (name for name in section.files if name not in headers):
            # Only where it is used, so that the other objects outlive a change of the build's name.
            named = "TORCH_EXTENSION_NAME" in (copy / source).read_text()
            flags = [*common, f"-DTORCH_EXTENSION_NAME={build_id}"] if named else common
            if source.endswith(".cu"):
                version = f"{cuda.version} {cxx_version}"
                names = [f"-frandom-seed={source}", f"-Xcudafe=--orig_src_path_name={source}"]
                compiler = [str(cuda.nvcc), f"-ccbin={cxx}", *NVCC_FLAGS, f"-Xcompiler={unplaced}", *names]
                command = [*compiler, *gencode(section, gpus), *flags, "-c", source]
            else:
                version = cxx_version
                command = [cxx, *CXX_FLAGS, unplaced, *flags, "-c", source]
            units.append(Unit(source, version, command, [source, *headers]))
    return units


def gencode(section: Section, gpus: list[str]) -> list[str]:
    """A section for none of the GPUs is still linked: as PTX, which costs no assembling and which nothing selects."""
    codes = [c.replace(".", "") for c in section.architectures(gpus)]
    if not codes:
        code = section.capabilities[0].replace(".", "")
        return [f"-gencode=arch=compute_{code},code=compute_{code}"]
    return [f"-gencode=arch=compute_{code},code=sm_{code}" for code in codes]


def compile_unit(unit: Unit, copy: Path, objects: Path) -> tuple[Path, str, float]:
    """The object, what ptxas said of it, and the seconds it took (0 when it was there)."""
    kept = objects / f"{unit.key(copy)}.o"
    report = kept.with_suffix(".txt")
    if kept.exists() and report.exists():
        return kept, report.read_text(), 0.0
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=objects) as scratch:
        made = Path(scratch) / "made.o"
        done = subprocess.run([*unit.command, "-o", str(made)], cwd=copy, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{done.stdout}{done.stderr}\n{unit.source} did not compile.")
        report.write_text(done.stderr)
        made.replace(kept)
    return kept, done.stderr, time.monotonic() - start


def compile_all(units: list[Unit], copy: Path, objects: Path, jobs: int) -> tuple[list[Path], str]:
    objects.mkdir(parents=True, exist_ok=True)
    made, reports = [], []
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(compile_unit, unit, copy, objects) for unit in units]
        try:
            for unit, future in zip(units, running, strict=True):
                path, report, seconds = future.result()
                print(f"  {unit.source:<40} {f'{seconds:6.1f} s' if seconds else '  kept'}", flush=True)
                made.append(path)
                reports.append(f"# {unit.source}\n{report}")
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise
    return made, "\n".join(reports)


# ---------------------------------------------------------------------------------------------------------------------
# What ptxas reports


@dataclass(frozen=True)
class Kernel:
    """One device kernel for one architecture."""

    name: str
    arch: str  # 'sm_90'
    registers: int
    stack: int  # bytes
    spills: int  # bytes stored and loaded
    loss: str  # what ptxas could not do as it was asked to, as when it has wgmma wait for every product


def read_ptxas_report(text: str) -> list[Kernel]:
    pattern = re.compile(
        r"Compiling entry function '(?P<name>\S+)' for '(?P<arch>\w+)'"
        r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
        r".*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    losses = re.compile(r"Potential Performance Loss: (?P<loss>.*?) in the function '(?P<name>\S+)'")
    lost = {m["name"]: m["loss"] for m in losses.finditer(text)}
    return [
        Kernel(
            m["name"],
            m["arch"],
            int(m["registers"]),
            int(m["stack"]),
            int(m["stores"]) + int(m["loads"]),
            lost.get(m["name"], ""),
        )
        for m in pattern.finditer(text)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Linking and laying out


def make_torch_cuda_stub(folder: Path, cxx: str) -> Path:
    """A libtorch_cuda.so with the names that the package links to and nothing behind them."""
    library = folder / "libtorch_cuda.so"
    source = folder / "torch_cuda_stub.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in TORCH_CUDA_SYMBOLS))
    subprocess.run([cxx, "-xc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", source, "-o", library], check=True)
    return library


def link(objects: list[Path], library: Path, cxx: str, cuda: Cuda | None) -> None:
    torch_lib = torch_folder() / "lib"
    with tempfile.TemporaryDirectory() as scratch:
        inputs = [*objects, f"-L{torch_lib}", "-ltorch_cpu", "-lc10"]
        if cuda:
            inputs += [make_torch_cuda_stub(Path(scratch), cxx), cuda.library("libcudart_static.a")]
            inputs += ["-ldl", "-lrt", "-lpthread"]
        # Whatever is undefined fails now, not when the library is loaded. The libraries that torch's own need are
        # none of this link's business.
        flags = ["-shared", "-s", "-Wl,-z,defs,--as-needed,--exclude-libs,ALL,--allow-shlib-undefined"]
        done = subprocess.run([cxx, *flags, "-o", library, *inputs], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{done.stdout}{done.stderr}\n{library.name} did not link.")


def lay_out(root: Path, project: Project, build_id: str, gpus: list[str], folder: Path) -> None:
    package = root / "torch-ext" / project.python_name
    for name in python_files(root, project.python_name):
        target = folder / (root / name).relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target)
    (folder / "_ops.py").write_text(OPS_PY.format(id=build_id))
    backend = {"type": project.backend}
    if gpus:
        backend["archs"] = sorted({c for s in project.sections for c in s.architectures(gpus)}, key=number)
    metadata = {
        "name": project.name,
        "id": build_id,
        "version": project.version,
        "license": project.license,
        "python-depends": [],
        "backend": backend,
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def built_id(variant: Path) -> str | None:
    metadata = variant / "metadata.json"
    return json.loads(metadata.read_text())["id"] if metadata.exists() else None


def links(library: Path) -> dict[str, list[str]]:
    """The shared libraries that this one needs, and the newest version of each kind that it asks of their symbols."""
    if not shutil.which("readelf"):
        raise BuildError("No readelf, which shows what a library links to (Debian and Ubuntu: apt install binutils).")
    # In English, whatever is spoken here.
    text = output_of(["env", "LC_ALL=C", "readelf", "--wide", "--dynamic", "--version-info", library])
    newest = {name: {} for name in sorted(re.findall(r"\(NEEDED\).*\[(.*)\]", text))}
    file = None
    for m in re.finditer(r"File: (?P<file>\S+)|Name: (?P<kind>[A-Z]+)_(?P<version>[0-9.]+)", text):
        file = m["file"] or file
        if m["kind"]:
            newest[file][m["kind"]] = max(newest[file].get(m["kind"], "0"), m["version"], key=number)
    return {file: [f"{kind}_{newest[file][kind]}" for kind in sorted(newest[file])] for file in newest}


def links_table(library: Path) -> str:
    rows = [f"| `{file}` | {', '.join(versions) or '-'} |" for file, versions in links(library).items()]
    return "\n".join(["| library | newest versions of its symbols |", "|---|---|", *rows])


def build(args: argparse.Namespace) -> Path:
    """Build what the command line asks for and return the folder of the variant."""
    start = time.monotonic()
    backend = args.backend or default_backend()
    project = Project.read(args.root, backend)
    cxx = find_cxx()
    cuda = Cuda.find(args.nvcc) if backend == "cuda" else None
    gpus = choose_architectures(project, cuda, args.arch) if cuda else []
    compilers = [output_of([cxx, "-dumpfullversion"]), cuda.version if cuda else ""]
    build_id = identify(args.root, project, gpus, compilers)
    variant = args.output / project.variant(cuda.version if cuda else None)
    if args.where:
        print(variant)
        return variant
    if args.links:
        if not built_id(variant):
            raise BuildError(f"{variant} is not there: build it first.")
        print(links_table(variant / f"{built_id(variant)}.abi3.so"))
        return variant
    if built_id(variant) == build_id and not args.force and not args.compile_only:
        print(f"{variant} is up to date ({build_id}).")
        note_sources(variant, args.root)
        return variant

    print(f"Building {variant.name}" + (f" for {', '.join(gpus)} with nvcc {cuda.version}" if cuda else ""), flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output, prefix=".making-") as scratch:
        copy, folder = Path(scratch) / "copy", Path(scratch) / "variant"
        copy.mkdir()
        folder.mkdir()
        make_copy(args.root, project, copy)
        units = plan_units(project, build_id, copy, cxx, cuda, gpus)
        objects, report = compile_all(units, copy, args.root / "build" / "objects", args.jobs)
        if cuda:
            (args.output / f"{variant.name}.ptxas.txt").write_text(report)
            print_kernels(read_ptxas_report(report))
        if args.compile_only:
            print(f"Compiled in {time.monotonic() - start:.1f} s.")
            return variant
        link(objects, folder / f"{build_id}.abi3.so", cxx, cuda)
        lay_out(args.root, project, build_id, gpus, folder)
        shutil.rmtree(variant, ignore_errors=True)
        folder.rename(variant)
    print(f"Built {variant} ({build_id}) in {time.monotonic() - start:.1f} s.")
    note_sources(variant, args.root)
    return variant


def note_sources(variant: Path, root: Path) -> None:
    """Says beside a variant of this project which sources it has, for the record of what is measured with it."""
    if root == ROOT:
        variant.with_name(f"{variant.name}.sources.txt").write_text(source_digest() + "\n")


def print_kernels(kernels: list[Kernel]) -> None:
    for arch in sorted({kernel.arch for kernel in kernels}, key=lambda name: int(re.sub(r"\D", "", name))):
        mine = [kernel for kernel in kernels if kernel.arch == arch]
        print(f"  {arch}: {len(mine)} device kernels, at most {max(kernel.registers for kernel in mine)} registers")
        for kernel in mine:
            if kernel.spills:
                print(f"    spills {kernel.spills} bytes: {demangle(kernel.name)}")
            if kernel.loss:
                print(f"    {kernel.loss}: {demangle(kernel.name)}")


def demangle(name: str) -> str:
    return output_of(["c++filt", name]).strip() if shutil.which("c++filt") else name


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", nargs="?", choices=["cpu", "cuda"], help="default: what this machine's torch uses")
    parser.add_argument("--arch", type=lambda text: text.split(","), help="compute capabilities, as in 8.0,9.0")
    parser.add_argument("--nvcc", help="path of the CUDA compiler")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="sources compiled at once")
    parser.add_argument("--output", type=Path, help="where the variant's folder goes (default: build)")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project to build (default: this one)")
    parser.add_argument("--force", action="store_true", help="build even if nothing has changed")
    parser.add_argument("--where", action="store_true", help="build nothing, print the folder of the variant")
    parser.add_argument("--links", action="store_true", help="build nothing, print what the variant links to")
    parser.add_argument("--compile-only", action="store_true", help="compile and report, link nothing")
    args = parser.parse_args(argv)
    args.output = args.output or args.root / "build"
    return args


def main() -> int:
    try:
        build(parse_arguments())
    except BuildError as error:
        print(f"build.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
