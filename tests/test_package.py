"""The package as the hub sees it: build.toml, the folder of a built variant, and what importing it does."""

import ast
import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import kernels
import pytest
import torch
import variants
from kernels._rust import Backend, Build
from variants import PACKAGE, ROOT, build_tool, run_build, run_python


@pytest.fixture(scope="session")
def variant(kernel):
    """The folder of the variant that the tests load."""
    return Path(kernel.__file__).parent


@pytest.fixture
def project_copy(tmp_path):
    """A project of its own to change and build."""
    return copy_project(tmp_path / "project")


def copy_project(root):
    ignore = shutil.ignore_patterns("__pycache__", "_ops.py", "registration.h")
    shutil.copytree(ROOT / "torch-ext", root / "torch-ext", ignore=ignore)
    shutil.copytree(ROOT / "csrc", root / "csrc")
    shutil.copy(ROOT / "build.toml", root)
    return root


# build.toml


def test_build_file_is_valid():
    assert Build.open(ROOT).general.backends == [Backend.CPU, Backend.CUDA]


def test_build_file_is_checked(project_copy):
    build_file = project_copy / "build.toml"
    build_file.write_text(build_file.read_text().replace("[torch]\n", "[torch]\nunheard-of = 1\n", 1))
    with pytest.raises(ValueError, match="unheard-of"):
        Build.open(project_copy)


def test_build_file_lists_every_source():
    project = build_tool.Project.read(ROOT, "cuda")
    listed = sorted(name for section in project.sections for name in section.files)
    native = [*(ROOT / "csrc").rglob("*"), *(ROOT / "torch-ext").glob("*.cpp"), *(ROOT / "torch-ext").glob("*.h")]
    there = [p.relative_to(ROOT).as_posix() for p in native if p.is_file() and p.name != "registration.h"]
    assert listed == sorted(there)


def test_cpu_variant_needs_no_cuda_source():
    project = build_tool.Project.read(ROOT, "cpu")
    assert not [name for section in project.sections for name in section.files if name.startswith("csrc")]


@pytest.mark.parametrize(
    "gpus, portable, hopper",
    [
        (["8.0"], ["8.0"], []),
        (["9.0"], ["9.0"], ["9.0a"]),
        (["8.9", "9.0"], ["8.9", "9.0"], ["9.0a"]),
        (["10.3"], ["10.0"], []),
        (["12.0", "12.1"], ["12.0"], []),
        (["7.5"], [], []),
        (["13.0"], [], []),
    ],
)
def test_architectures_of_a_section(gpus, portable, hopper):
    def section(*capabilities):
        return build_tool.Section([], [], [], list(capabilities))

    assert section("8.0", "8.6", "8.9", "9.0", "10.0", "12.0").architectures(gpus) == portable
    assert section("9.0a").architectures(gpus) == hopper


def test_a_section_for_other_gpus_is_linked_as_ptx():
    section = build_tool.Section([], [], [], ["9.0a"])
    assert build_tool.gencode(section, ["8.0"]) == ["-gencode=arch=compute_90a,code=compute_90a"]
    assert build_tool.gencode(section, ["9.0"]) == ["-gencode=arch=compute_90a,code=sm_90a"]


# The variant of this machine


def test_files(variant):
    variants.check_files(variant)


def test_metadata(variant):
    variants.check_metadata(variant)


def test_symbols(variant):
    variants.check_symbols(variant)
    assert "libtorch_cpu.so" in build_tool.links(variants.library_of(variant))


# Two builds of the CPU variant


@pytest.fixture(scope="session")
def built_twice(tmp_path_factory):
    """In two folders, each with its own kept objects, with torch in two places."""
    here, moved = Path(torch.__file__).parent, tmp_path_factory.mktemp("packages") / "torch"
    shutil.copytree(here / "include", moved / "include")  # g++ would follow a link
    (moved / "lib").symlink_to(here / "lib")
    (moved / "__init__.py").touch()
    made = []
    for torch_folder in (here, moved):
        root = copy_project(tmp_path_factory.mktemp("built") / "project")
        done = run_build("cpu", "--root", root, PYTHONPATH=str(torch_folder.parent))
        assert done.returncode == 0, done.stderr
        made.append(next((root / "build").glob("torch-*-linux")))
    return made


def test_builds_are_reproducible(built_twice):
    one, another = (
        {f.relative_to(made).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in made.rglob("*.*")}
        for made in built_twice
    )
    assert any(name.endswith(".so") for name in one)
    assert one == another


def test_security_says_what_is_linked_to(built_twice):
    variants.check_links(built_twice[0], "CPU")
    shown = run_build("cpu", "--links", "--output", built_twice[0].parent)
    assert shown.stdout == build_tool.links_table(variants.library_of(built_twice[0])) + "\n"


def test_the_library_asks_the_system_for_little(built_twice):
    """Nothing with which native code reaches the network, writes a file or starts a process."""
    library = variants.library_of(built_twice[0])
    symbols = build_tool.output_of(["readelf", "--dyn-syms", "--wide", library])
    asked = re.findall(r" UND (\w+)@GLIBC_", symbols)
    harmless = r"__cxa_(atexit|finalize)|abort|strlen|(__)?mem(chr|cmp|cpy|move|set)(_chk)?|__stack_chk_fail"
    assert asked and [name for name in asked if not re.fullmatch(harmless, name)] == []
    assert "filebuf" not in symbols


# Loading


@pytest.mark.kernels_ci
def test_public_names(kernel):
    products = {"gather_gemm", "gemm_combine", "grouped_gemm", "grouped_mm", "moe", "moe_mlp", "weight_grad"}
    assert set(kernel.__all__) == {"Activation", "Routing", "route", *products, "experts_forward", "layers"}
    assert all(hasattr(kernel, name) for name in kernel.__all__)


def test_imports_are_relative():
    allowed = {*sys.stdlib_module_names, "torch"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"


def test_it_keeps_to_itself(variant):
    """Neither the import nor a call reaches the network, writes a file or starts a process."""
    out = run_python(
        """
import socket, subprocess, sys
from pathlib import Path
import kernels, torch
sys.dont_write_bytecode = True
refused = []
def watch(event, arguments):
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if writes or event.startswith(("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system")):
        refused.append(event)
        raise RuntimeError(f"{event} {arguments}")
sys.addaudithook(watch)
kernel = kernels.get_local_kernel(Path(sys.argv[1]).parents[1])
x, W = torch.randn(6, 8, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)
kernel.moe(x, W, torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1)).sum().backward()
assert refused == [], refused
for attempt in (
    socket.socket,
    lambda: socket.create_connection(("127.0.0.1", 9)),
    lambda: socket.getaddrinfo("localhost", 9),
    lambda: open(Path(sys.argv[1]) / "new", "w"),
    lambda: subprocess.run(["true"]),
):
    try:
        attempt()
    except RuntimeError:
        print("refused")
""",
        variant,
    )
    assert out == "refused\n" * 5


def test_import_leaves_the_gpu_alone():
    run_python(
        """
import kernels, torch
def refuse(*_):
    raise AssertionError("the import initialised CUDA")
torch.cuda._lazy_init = torch._C._cuda_init = refuse
kernels.get_kernel("phanerozoic/grouped-gemm-moe", version=1, trust_remote_code=True)
assert not torch.cuda.is_initialized()
"""
    )


def test_a_fork_after_the_import_computes():
    """As workers of a data loader do: the import has started nothing that a child could not use."""
    run_python(
        """
import os, kernels, torch
torch.set_num_threads(1)
kernel = kernels.get_kernel("phanerozoic/grouped-gemm-moe", version=1, trust_remote_code=True)
def right(device):
    a, W = torch.randn(5, 8, device=device), torch.randn(3, 4, 8, device=device, requires_grad=True)
    y = kernel.grouped_gemm(a, W, torch.tensor([3, 0, 2], device=device))
    want = torch.cat([a[:3] @ W[0].T, a[3:] @ W[2].T])
    got, wanted = (torch.autograd.grad(out.square().sum(), W)[0] for out in (y, want))
    return torch.allclose(y, want, rtol=1e-5, atol=1e-5) and torch.allclose(got, wanted, rtol=1e-4, atol=1e-4)
child = os.fork()
if child == 0:
    os._exit(0 if right("cuda" if torch.cuda.is_available() else "cpu") else 1)
assert os.waitpid(child, 0)[1] == 0 and right("cpu")
"""
    )


def test_two_builds_in_one_process(project_copy):
    """Builds of different contents have different names, so that both can be loaded."""
    module = project_copy / "torch-ext" / "grouped_gemm_moe" / "__init__.py"
    roots = []
    for number in range(2):
        root = project_copy.parent / f"build{number}"
        module.write_text(module.read_text() + f"\nBUILD = {number}\n")
        done = run_build("cpu", "--root", project_copy, "--output", root / "build")
        assert done.returncode == 0, done.stderr
        roots.append(root)
    out = run_python(
        """
import sys, torch
from pathlib import Path
from kernels import get_local_kernel
first, second = (get_local_kernel(Path(root), backend="cpu") for root in sys.argv[1:])
assert first.__name__ != second.__name__ and (first.BUILD, second.BUILD) == (0, 1)
a, W, sizes = torch.randn(3, 4), torch.randn(2, 5, 4), torch.tensor([1, 2])
gradients = []
for kernel in (first, second):
    leaves = [t.clone().requires_grad_() for t in (a, W)]
    gradients.append(torch.autograd.grad(kernel.grouped_gemm(*leaves, sizes).square().sum(), leaves))
    assert kernel.moe.__module__.split(".")[0] == kernel.__name__
assert all(map(torch.equal, *gradients))
ids, x = torch.tensor([[1], [0], [1]]), torch.randn(3, 4)
for given in ({"routing": second.route(ids, 2)}, {"activation": second.Activation("relu"), "gated": False}):
    try:
        first.gather_gemm(x, W, **{"routing": first.route(ids, 2)} | given)
    except TypeError as error:
        (name, value), *_ = given.items()
        assert str(error).startswith(f"{name} must be ") and "of another build" in str(error), error
        assert f"{type(value).__module__}.{type(value).__name__}" in str(error), error
    else:
        raise AssertionError("another build's object was taken")
print("both")
""",
        *roots,
    )
    assert out == "both\n"


def test_one_build_by_two_paths(variant, tmp_path):
    """The hub's cache and a checkout may hold the same build, whose operators are registered once."""
    out = run_python(
        """
import shutil, sys, torch
from pathlib import Path
from kernels import get_kernel, get_local_kernel
variant, other = map(Path, sys.argv[1:])
copy = shutil.copytree(variant, other / "build" / variant.name)
first = get_kernel("phanerozoic/grouped-gemm-moe", version=1, trust_remote_code=True)
second = get_local_kernel(copy)
assert first is not second
a, W, sizes = torch.randn(3, 4), torch.randn(2, 5, 4), torch.tensor([1, 2])
assert torch.equal(first.grouped_gemm(a, W, sizes), second.grouped_gemm(a, W, sizes))
print("one")
""",
        variant,
        tmp_path,
    )
    assert out == "one\n"


def test_threads_may_load_it_at_once():
    """The loader has no lock, so that each thread may get a module of its own: all of the same functions."""
    out = run_python(
        """
import threading, kernels, torch
from concurrent.futures import ThreadPoolExecutor
torch.set_num_threads(1)
a, W, sizes = torch.randn(3, 4), torch.randn(2, 5, 4), torch.tensor([1, 2])
together = threading.Barrier(8)
def load_and_call(_):
    leaf = W.clone().requires_grad_()
    together.wait()
    kernel = kernels.get_kernel("phanerozoic/grouped-gemm-moe", version=1, trust_remote_code=True)
    y = kernel.grouped_gemm(a, leaf, sizes)
    return kernel, y.detach(), torch.autograd.grad(y.sum(), leaf)[0]
with ThreadPoolExecutor(8) as pool:
    (first, *want), *others = pool.map(load_and_call, range(8))
assert torch.allclose(want[0], torch.cat([a[:1] @ W[0].T, a[1:] @ W[1].T]), atol=1e-5)
for kernel, *found in others:
    assert all(getattr(kernel, name) is getattr(first, name) for name in first.__all__)
    assert all(map(torch.equal, found, want))
print("eight")
"""
    )
    assert out == "eight\n"


@pytest.mark.parametrize(
    "name, reason",
    [
        ("torch-stable-abi299-cpu-x86_64-linux", r"\(2\.99\).*too new.*\(2\.\d+\)"),
        ("torch-stable-abi211-cpu-riscv64-linux", "riscv64.*system CPU"),
        ("torch-stable-abi211-rocm71-x86_64-linux", "rocm71.*selected backend"),
    ],
)
def test_a_missing_variant_says_what_was_looked_for(variant, tmp_path, name, reason):
    """The loader's own message: the folder, each variant that is there, and what of it does not fit this machine."""
    shutil.copytree(variant, tmp_path / "build" / name)
    with pytest.raises(FileNotFoundError) as caught:
        kernels.get_local_kernel(tmp_path, backend="cpu")
    message = str(caught.value)
    assert str(tmp_path) in message and re.search(rf"{name}: .*{reason}", message), message


@pytest.mark.skipif(sys.version_info >= (3, 15), reason="free-threaded builds have the stable ABI from 3.15 on")
def test_free_threaded_python_is_refused(variant, tmp_path, monkeypatch, caplog):
    """Before 3.15 such a build has no stable ABI: the loader passes the library over, and says so."""
    shutil.copytree(variant, tmp_path / "build" / variant.name)
    of_build = sysconfig.get_config_var
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED" or of_build(name))
    with caplog.at_level("WARNING"), pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        kernels.get_local_kernel(tmp_path, backend="cpu")
    assert "stable ABI, which is not supported on free-threaded Python" in caplog.text


def test_get_kernel_takes_the_variant_of_this_checkout(kernel, variant):
    backend = "cuda" if torch.cuda.is_available() else "cpu"
    assert variant.parent == ROOT / "build"
    assert kernel.__name__.startswith(f"_grouped_gemm_moe_{backend}_")
    assert run_build("--where").stdout == f"{variant}\n"


# The build tool


def test_same_contents_are_built_once(project_copy):
    first = run_build("cpu", "--root", project_copy)
    again = run_build("cpu", "--root", project_copy)
    assert "Built" in first.stdout and "up to date" in again.stdout
    module = project_copy / "torch-ext" / "grouped_gemm_moe" / "__init__.py"
    module.write_text(module.read_text() + "\n# changed\n")
    assert "Built" in run_build("cpu", "--root", project_copy).stdout


def test_only_listed_files_are_compiled(project_copy):
    build_file = project_copy / "build.toml"
    build_file.write_text(build_file.read_text().replace('  "torch-ext/torch_binding.h",\n', ""))
    done = run_build("cpu", "--root", project_copy)
    assert done.returncode == 1
    assert "torch_binding.h: No such file" in done.stderr
    assert done.stderr.endswith("torch-ext/torch_binding.cpp did not compile.\n")
    assert not list((project_copy / "build").glob("torch-*"))


def test_a_listed_file_that_is_missing_is_named(project_copy):
    (project_copy / "torch-ext" / "torch_binding.h").unlink()
    done = run_build("cpu", "--root", project_copy)
    assert done.returncode == 1
    assert done.stderr == "build.py: torch-ext/torch_binding.h is listed in build.toml but is not there.\n"


@pytest.mark.parametrize(
    "arguments, environment, message",
    [
        (["cpu"], {"CXX": "no-such-compiler"}, "No C++ compiler: no-such-compiler was not found"),
        (["cuda", "--nvcc", "/no/such/nvcc"], {}, "No CUDA compiler: /no/such/nvcc does not exist"),
    ],
)
def test_a_missing_compiler_is_one_sentence(tmp_path, arguments, environment, message):
    done = run_build(*arguments, "--output", tmp_path / "build", **environment)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"build.py: {message}") and done.stderr.count("\n") == 1
    assert not (tmp_path / "build").exists()


def test_a_variant_goes_by_the_sources_that_it_has(project_copy):
    """A build that fails leaves the variant that was there, and what is said of it."""
    shutil.copytree(ROOT / "tools", project_copy / "tools", ignore=shutil.ignore_patterns("__pycache__"))

    def run(tool, *arguments):
        command = [sys.executable, project_copy / "tools" / tool, *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    assert run("build.py", "cpu").returncode == 0
    (noted,) = (project_copy / "build").glob("*.sources.txt")
    before = noted.read_text()
    assert before == run("source_digest.py").stdout
    source = project_copy / "torch-ext" / "torch_binding.cpp"
    source.write_text(source.read_text() + "#error\n")
    assert run("build.py", "cpu").returncode == 1
    assert noted.read_text() == before != run("source_digest.py").stdout


def test_source_digest_follows_the_sources(project_copy):
    shutil.copytree(ROOT / "tools", project_copy / "tools", ignore=shutil.ignore_patterns("__pycache__"))

    def digest():
        tool = project_copy / "tools" / "source_digest.py"
        return subprocess.run([sys.executable, tool], capture_output=True, text=True, check=True).stdout.split()[-1]

    before = digest()
    assert re.fullmatch("[0-9a-f]{64}", before)
    (project_copy / "README.md").write_text("not a source")
    assert digest() == before
    (project_copy / "csrc" / "new.cuh").touch()
    added = digest()
    (project_copy / "csrc" / "new.cuh").write_text("//")
    assert len({before, added, digest()}) == 3


# Style


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=" ".join)
def test_style(arguments):
    done = subprocess.run([sys.executable, "-m", "ruff", *arguments, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
