"""What is installed to build, test and run: pinned, with hashes, and all of it what the inputs say."""

import importlib.metadata
import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from variants import ROOT

FOLDER = ROOT / "requirements"
GENERATED = ["use", "dev", "ci"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
MACHINES = ["x86_64", "aarch64"]


def entries(path):
    """The requirements of a file, each with its hashes."""
    lines = [line.split(" #")[0].strip() for line in path.read_text().replace("\\\n", " ").splitlines()]
    for line in (line for line in lines if line and not line.startswith("#")):
        if line.startswith("-r "):
            yield from entries(path.parent / line.removeprefix("-r "))
            continue
        requirement, *hashes = line.split(" --hash=")
        yield Requirement(requirement), [text.strip() for text in hashes]


def version(requirement):
    """The one version that it allows, None where it leaves it open."""
    (pin,) = requirement.specifier or [None]
    if pin is None:
        return None
    assert pin.operator == "==" and "*" not in pin.version, requirement
    return pin.version


def wanted(path, python, machine):
    """Name and version of all that a file has for one kind of machine."""
    place = {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found = {}
    for requirement, _ in entries(path):
        if requirement.marker is None or requirement.marker.evaluate(place):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} twice for Python {python}"
            found[name] = version(requirement)
    return found


@pytest.mark.parametrize("name", GENERATED)
def test_all_but_torch_is_pinned_with_hashes(name):
    found = list(entries(FOLDER / f"{name}.txt"))
    assert found
    for requirement, hashes in found:
        assert version(requirement), requirement
        assert requirement.url is None and hashes, requirement
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", text) for text in hashes), requirement


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_generated_files_say_what_their_inputs_say(python, machine):
    pins = {name: wanted(FOLDER / f"{name}.txt", python, machine) for name in GENERATED}
    for name in GENERATED:
        for package, asked in wanted(FOLDER / f"{name}.in", python, machine).items():
            assert pins[name].get(package), f"{package} is missing in {name}.txt: make requirements"
            assert asked in (None, pins[name][package]), f"{package} is another in {name}.txt: make requirements"
    assert pins["use"].items() <= pins["dev"].items()
    assert not pins["ci"].keys() & pins["dev"].keys()


def test_torch_is_pinned_in_one_place():
    ((torch, hashes),) = entries(FOLDER / "torch.txt")
    assert torch.name == "torch" and version(torch) and hashes == []
    elsewhere = [*FOLDER.glob("*.in"), *(FOLDER / f"{name}.txt" for name in GENERATED)]
    assert [path.name for path in elsewhere if re.search(r"^torch\b", path.read_text(), re.MULTILINE)] == []
    others = [ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / "README.md", *(ROOT / ".github").rglob("*.yml")]
    assert [path.name for path in others if re.search(r"torch ?==", path.read_text())] == []


def test_what_torch_needs_is_there_before_it():
    """All but what comes with CUDA, which a torch for a CPU does without."""
    pins = {canonicalize_name(r.name): r for r, _ in entries(FOLDER / "use.txt") if not r.marker or r.marker.evaluate()}
    needed = [r for r in map(Requirement, importlib.metadata.requires("torch")) if not r.marker or r.marker.evaluate()]
    needed = [r for r in needed if not r.name.startswith(("nvidia-", "cuda-", "triton"))]
    assert needed
    for requirement in needed:
        assert requirement.specifier.contains(version(pins[canonicalize_name(requirement.name)])), requirement


def test_no_file_names_an_index():
    for path in FOLDER.iterdir():
        assert not re.search(r"://|^\s*--(?!hash=)|^-[^r]", path.read_text(), re.MULTILINE), path.name
