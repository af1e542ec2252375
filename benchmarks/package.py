"""The package as its users load it, through get_kernel: this checkout's build unless LOCAL_KERNELS names another."""

import importlib
import os
from pathlib import Path

import kernels

REPO_ID = "phanerozoic/grouped-gemm-moe"
ROOT = Path(__file__).resolve().parent.parent


def load():
    """The loaded kernel module."""
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={ROOT}")
    return kernels.get_kernel(REPO_ID, version=1, trust_remote_code=True)


def hooks():
    """Its private test hooks: which configurations there are, and forcing one."""
    return importlib.import_module(f"{load().__name__}._testing")
