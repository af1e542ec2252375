"""Fixtures: the kernel as users load it, and every device, dtype and configuration that it runs on.

The kernel always comes through `kernels.get_kernel`. LOCAL_KERNELS points it to the variant built in this checkout.
"""

import contextlib
import fcntl
import functools
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import kernels
import pytest
import torch

REPOSITORY = "phanerozoic/grouped-gemm-moe"
os.environ.setdefault("LOCAL_KERNELS", f"{REPOSITORY}={Path(__file__).resolve().parents[1]}")

torch.set_num_threads(1)  # the products are too small for more to help

HAS_GPU = torch.cuda.is_available()
DEVICES = ("cpu", "cuda") if HAS_GPU else ("cpu",)
DTYPES = {"cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
          "cuda": (torch.float32, torch.bfloat16, torch.float16)}  # fmt: skip
TURN = pytest.StashKey()


@functools.cache
def load_kernel():
    return kernels.get_kernel(REPOSITORY, version=1, trust_remote_code=True)


@functools.cache
def load_part(name):
    """A private module of the loaded kernel: `_ops`, `_testing`."""
    return importlib.import_module(f"{load_kernel().__name__}.{name}")


def load_example(name):
    """The module that examples/<name>.py is."""
    file = Path(__file__).resolve().parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Setting(NamedTuple):
    """Where a test runs; `config` names the configuration to force, None leaves the choice to the package."""

    device: str
    dtype: torch.dtype
    config: str | None = None

    def __str__(self):
        return "-".join(filter(None, (self.device, str(self.dtype).removeprefix("torch."), self.config)))


PLACES = [Setting(device, dtype) for device in DEVICES for dtype in DTYPES[device]]


@functools.cache
def forced_settings():
    """Every configuration that fits this GPU with every dtype that it serves."""
    if not HAS_GPU:
        return []
    return [
        Setting("cuda", dtype, config.name)
        for config in load_part("_testing").configs_here()
        for dtype in ((torch.float32,) if config.path == "fp32" else (torch.bfloat16, torch.float16))
    ]


# The hub runs the tests that are marked for it beside the package alone, without the project's tools.
if not (Path(__file__).resolve().parents[1] / "tools").is_dir():
    collect_ignore = [
        "test_package.py",
        "test_requirements.py",
        "test_cuda_build.py",
        "test_mutate.py",
        "test_record.py",
        "test_sweep.py",
        "test_plot.py",
        "test_examples.py",
        "test_expert_parallel.py",
        "test_readme.py",
        "test_compatibility.py",
    ]


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu(memory=0): needs a GPU, with `memory` GiB free")


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES)
    if "place" in metafunc.fixturenames:
        metafunc.parametrize("place", PLACES, ids=str)
    if "setting" in metafunc.fixturenames:
        forced = [
            setting for setting in forced_settings() if setting.dtype != torch.float16
        ]  # its tiles are bfloat16's
        metafunc.parametrize("setting", [*PLACES, *forced], ids=str, indirect=True)


def pytest_runtest_setup(item):
    mark = item.get_closest_marker("gpu")
    if mark is None:
        return
    if not HAS_GPU:
        pytest.skip("needs a GPU")
    if needed := mark.kwargs.get("memory"):
        # Where tests are shared out over processes, those that fill the GPU's memory take turns.
        item.stash[TURN] = (Path(tempfile.gettempdir()) / "grouped-gemm-moe-memory-tests.lock").open("w")
        fcntl.flock(item.stash[TURN], fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] / 2**30
        if free < needed:
            pytest.skip(f"needs {needed} GiB of GPU memory, {free:.0f} are free")


def pytest_runtest_teardown(item):
    if turn := item.stash.get(TURN, None):
        torch.cuda.empty_cache()
        turn.close()


@pytest.fixture(scope="session")
def kernel():
    return load_kernel()


@pytest.fixture(scope="session")
def ops():
    """The package's operators, `torch.ops.<namespace of this build>`."""
    return load_part("_ops").ops


@pytest.fixture(scope="session")
def hooks():
    """The package's private test hooks."""
    return load_part("_testing")


@pytest.fixture
def dynamo():
    """torch's compiler, with no graph from another test."""
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


@contextlib.contextmanager
def mesh_of_one():
    """A device mesh of this process alone, without a network."""
    from torch.distributed.device_mesh import init_device_mesh

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def mesh():
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    with mesh_of_one() as made:
        yield made


@contextlib.contextmanager
def forcing(setting):
    """A setting's configuration is forced, on so few blocks that each takes several tiles one after the other."""
    with load_part("_testing").forced(setting.config, blocks=3) if setting.config else contextlib.nullcontext():
        yield setting


@pytest.fixture
def setting(request):
    """Every device and dtype with the automatic choice, then every configuration, forced during the test."""
    with forcing(request.param):
        yield request.param
