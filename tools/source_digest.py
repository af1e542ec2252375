#!/usr/bin/env python3
"""Print the sha256 of what the package is built from: paths and contents of csrc/, torch-ext/ and build.toml.

Records of measurements carry it, so that one can tell which sources they speak of.
"""

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["csrc", "torch-ext", "build.toml"]


def source_files() -> list[Path]:
    """The sources that git tracks or would add; outside a checkout all but what is generated."""
    listing = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *SOURCES]
    found = subprocess.run(listing, capture_output=True, text=True)
    if found.returncode == 0:
        files = [ROOT / name for name in found.stdout.split("\0") if name]
    else:
        files = [path for source in SOURCES for path in [ROOT / source, *(ROOT / source).rglob("*")]]
    generated = {"_ops.py", "registration.h"}
    return sorted(
        {f for f in files if f.is_file() and f.name not in generated and "__pycache__" not in f.parts},
        key=lambda path: path.relative_to(ROOT).as_posix(),
    )


def source_digest() -> str:
    """Hexadecimal sha256 over the sorted relative paths and the contents."""
    state = hashlib.sha256()
    for path in source_files():
        content = path.read_bytes()
        state.update(f"{path.relative_to(ROOT).as_posix()}\0{len(content)}\0".encode())
        state.update(content)
    return state.hexdigest()


if __name__ == "__main__":
    print(source_digest())
