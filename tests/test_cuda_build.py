"""The CUDA sources, compiled and linked on any machine: no GPU and no CUDA build of torch are needed.

Without a CUDA compiler these tests are skipped, but not on CI.
"""

import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor

import nvrtc
import pytest
import torch
import variants
from variants import ROOT, build_tool, run_build, run_python

ARCHITECTURES = ["8.0", "9.0", "12.0"]

# Of each GPU that the package is built for, in KiB: shared memory of an SM, and the most that a block may take.
BUILT_FOR = {
    "8.0": (164, 163),
    "8.6": (100, 99),
    "8.7": (164, 163),
    "8.9": (100, 99),
    "9.0": (228, 227),
    "10.0": (228, 227),
    "11.0": (228, 227),
    "12.0": (100, 99),
}
SHARED_MEMORY = BUILT_FOR | {"10.3": (228, 227), "12.1": (100, 99)}  # these run what is built for 10.0 and 12.0
RESERVED = 1024  # bytes that the driver keeps for each block

pytestmark = pytest.mark.timeout(1800)


def skip_unless_ci(reason):
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, which CI must have")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cuda():
    try:
        return build_tool.Cuda.find(None)
    except build_tool.BuildError:
        skip_unless_ci("there is no nvcc")


@pytest.fixture(scope="session")
def variant(cuda, tmp_path_factory):
    """The CUDA variant for three generations of GPUs."""
    output = tmp_path_factory.mktemp("cuda")
    done = run_build("cuda", "--arch", ",".join(ARCHITECTURES), "--output", output)
    assert done.returncode == 0, done.stdout + done.stderr
    (metadata,) = output.glob("*/metadata.json")
    return metadata.parent


@pytest.fixture(scope="session")
def kernels(variant):
    """What ptxas reports of every kernel for every architecture."""
    return build_tool.read_ptxas_report(variant.with_name(f"{variant.name}.ptxas.txt").read_text())


@pytest.fixture(scope="session")
def configs(variant):
    """The kernel configurations, as the built library lists them: it is loaded without a GPU, beside a stand-in for
    torch's CUDA library."""
    stub = build_tool.make_torch_cuda_stub(variant.parent, build_tool.find_cxx())
    script = """
import ctypes, importlib, importlib.util, json, sys
from pathlib import Path
import torch
folder, stub = sys.argv[1:]
if torch.version.cuda is None:
    ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL)
name = json.loads((Path(folder) / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, Path(folder) / "__init__.py")
sys.modules[name] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
testing = importlib.import_module(f"{name}._testing")
archs = [int(arch.replace(".", "")) for arch in SHARED_MEMORY]
print(json.dumps([
    config._asdict() | {"name": config.name, "selectable": {str(a): config.selectable_on(a) for a in archs}}
    for config in testing.configs()
]))
"""
    script = f"SHARED_MEMORY = {SHARED_MEMORY!r}\n{script}"
    return json.loads(run_python(script, variant, stub))


def test_it_is_a_variant_for_these_gpus(variant):
    variants.check_files(variant)
    variants.check_metadata(variant)
    metadata = json.loads((variant / "metadata.json").read_text())
    assert {arch.rstrip("af") for arch in metadata["backend"]["archs"]} == set(ARCHITECTURES)


def test_library(variant):
    """The CUDA runtime is inside, the driver is asked for when it is there, and Python is whichever imports it."""
    variants.check_symbols(variant)
    variants.check_links(variant, "CUDA")
    needed = build_tool.links(variants.library_of(variant))
    assert {"libtorch_cpu.so", "libtorch_cuda.so"} <= set(needed)
    assert [name for name in needed if name.startswith(("libcuda", "libpython"))] == []


def test_objects_are_reproducible(cuda, tmp_path):
    """The same bytes, wherever they are compiled: of a source whose names are seen from outside, and of one that has
    hidden names alone, which nvcc tells from others' in another way."""
    project, cxx = build_tool.Project.read(ROOT, "cuda"), build_tool.find_cxx()
    objects = []
    for name in ("one", "another"):
        copy = tmp_path / name
        copy.mkdir()
        build_tool.make_copy(ROOT, project, copy)
        units = build_tool.plan_units(project, "same", copy, cxx, cuda, ["8.0"])
        chosen = [unit for unit in units if unit.source in ("csrc/group_ends.cu", "csrc/register.cu")]
        objects.append([build_tool.compile_unit(unit, copy, copy)[0].read_bytes() for unit in chosen])
    assert len(objects[0]) == 2
    assert [one == another for one, another in zip(*objects)] == [True, True]
    assert not any(str(build_tool.torch_folder()).encode() in made for made in objects[0])


def test_no_kernel_spills_registers(kernels):
    assert kernels
    assert [f"{kernel.arch}: {build_tool.demangle(kernel.name)}" for kernel in kernels if kernel.spills] == []


def test_report_of_ptxas():
    text = """
ptxas info    : (C7511) Potential Performance Loss: wgmma instructions are serialized in the function 'slow'
ptxas info    : Compiling entry function 'slow' for 'sm_90a'
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
ptxas info    : Compiling entry function 'fast' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers
"""
    assert build_tool.read_ptxas_report(text) == [
        build_tool.Kernel("slow", "sm_90a", 168, 8, 16, "wgmma instructions are serialized"),
        build_tool.Kernel("fast", "sm_80", 40, 0, 0, ""),
    ]


def test_no_kernel_is_slower_than_written(kernels):
    """ptxas says so where wgmma has too few registers left to work beside anything else; nothing is spilled then."""
    assert [f"{build_tool.demangle(kernel.name)}: {kernel.loss}" for kernel in kernels if kernel.loss] == []


def test_few_kernels(kernels):
    """Every kernel costs compile time and size on every architecture; what may vary at run time does."""
    counts = {arch: len([k for k in kernels if k.arch == arch]) for arch in {kernel.arch for kernel in kernels}}
    assert {arch.rstrip("af") for arch in counts} == {"sm_" + arch.replace(".", "") for arch in ARCHITECTURES}
    assert all(0 < count <= 40 for count in counts.values()), counts


def test_every_gpu_of_the_package_is_known():
    assert set(BUILT_FOR) == set(build_tool.Project.read(ROOT, "cuda").capabilities)


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_configurations_fit_in_shared_memory(configs, arch):
    per_sm, per_block = (1024 * size for size in SHARED_MEMORY[arch])
    chosen = [config for config in configs if config["selectable"][arch.replace(".", "")]]
    for config in chosen:
        assert config["smem_bytes"] <= per_block, config["name"]
        blocks = config["blocks_per_sm"] if config["tile_m"] == 128 else 1  # narrow tiles take what room there is
        assert blocks * (config["smem_bytes"] + RESERVED) <= per_sm, config["name"]
    # Aligned or not, there is something for every op on every path that this GPU has.
    served = {(config["op"], config["path"], config["vectorized"]) for config in chosen}
    assert served >= set(itertools.product(("gemm", "weight_grad"), ("fp32", "mma"), (True, False)))


def test_configurations_differ(configs):
    names = [config["name"] for config in configs]
    assert len(set(names)) == len(names)


def test_device_code_compiles_with_cuda_12_6(kernels):
    """The oldest CUDA that the hub builds for. pip has its device compiler, but not its nvcc."""
    if nvrtc.find("cuda_nvrtc/lib") is None or nvrtc.Nvrtc().version() != (12, 6):
        skip_unless_ci("there is no NVRTC of CUDA 12.6")
    compiler = nvrtc.Nvrtc()
    sections = build_tool.Project.read(ROOT, "cuda").sections
    sources = [ROOT / f for s in sections if s.architectures(["8.0"]) for f in s.files if f.endswith(".cu")]
    sources = [source for source in sources if "<torch/" not in source.read_text()]  # the binding has no kernels
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(pool.map(lambda source: compiler.compile(source, [ROOT / "csrc"], "sm_80"), sources))
    compiled = build_tool.read_ptxas_report("\n".join(reports))
    assert len(compiled) == len([kernel for kernel in kernels if kernel.arch == "sm_80"]) > 0


@pytest.mark.gpu
def test_a_gpu_that_it_was_not_built_for(tmp_path):
    """An error that says so, after which the process goes on."""
    arch = "12.0"
    if torch.cuda.get_device_capability() >= (12, 0):
        pytest.skip("no GPU is newer than the newest that the package is built for")
    done = run_build("cuda", "--arch", arch, "--output", tmp_path / "build")
    if "No CUDA compiler" in done.stderr:
        skip_unless_ci("there is no nvcc")
    assert done.returncode == 0, done.stdout + done.stderr
    script = """
import sys, torch
from pathlib import Path
from kernels import get_local_kernel
kernel = get_local_kernel(Path(sys.argv[1]), backend="cuda")
for dtype in (torch.float32, torch.bfloat16):
    a, W = torch.ones(3, 8, device="cuda", dtype=dtype), torch.ones(2, 8, 8, device="cuda", dtype=dtype)
    for call in (
        lambda: kernel.moe(a, W, torch.zeros(3, 1, device="cuda", dtype=torch.int64), torch.ones(3, 1, device="cuda")),
        lambda: kernel.grouped_gemm(a, W, torch.tensor([1, 2], device="cuda")),
        lambda: kernel.grouped_mm(a, W, torch.tensor([1, 3], device="cuda")),
    ):
        try:
            call()
        except RuntimeError as error:
            print(error)
        else:
            raise AssertionError("no error")
        torch.cuda.synchronize()
        assert float((a + a).sum()) == 48
"""
    errors = run_python(script, tmp_path).splitlines()
    assert len([error for error in errors if "grouped-gemm-moe: cudaError" in error]) == 6, errors
