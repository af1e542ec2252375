"""CUDA's run-time compiler, which pip has for every release: it compiles device code as that release's nvcc does.

The host side of a .cu file is compiled as device code too, with the handful of host names that launches use declared
as such: so the file's own launches say which templates are instantiated, and nothing has to be listed twice.
"""

import ctypes
import importlib.util
from pathlib import Path

HEADERS = {
    "cuda_runtime.h": """
        #pragma once
        template <typename Function> cudaError_t cudaFuncSetAttribute(Function, int, int) { return cudaSuccess; }
        template <typename Function> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Function*) {
          return cudaSuccess;
        }
        template <typename... Parameters, typename... Arguments>
        cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t*, void (*)(Parameters...), const Arguments&...) {
          return cudaSuccess;
        }
        """,
    "cstdint": """
        #pragma once
        using int8_t = signed char;
        using int16_t = short;
        using int32_t = int;
        using int64_t = long long;
        using uint8_t = unsigned char;
        using uint16_t = unsigned short;
        using uint32_t = unsigned;
        using uint64_t = unsigned long long;
        using uintptr_t = unsigned long long;
        """,
    "type_traits": """
        #pragma once
        #include <cuda/std/type_traits>
        namespace std { using namespace cuda::std; }
        """,
}


def find(folder):
    """A folder of the CUDA packages from pip, such as 'cuda_nvrtc/lib'; None where it is not installed."""
    packages = importlib.util.find_spec("nvidia")
    for root in packages.submodule_search_locations if packages else []:
        if (Path(root) / folder).is_dir():
            return Path(root) / folder
    return None


class Nvrtc:
    """The run-time compiler of CUDA 12, with the headers that came with it."""

    def __init__(self):
        self.library = ctypes.CDLL(str(find("cuda_nvrtc/lib") / "libnvrtc.so.12"))
        self.include = [find("cuda_runtime/include"), find("cuda_cccl/include")]

    def version(self):
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def compile(self, source, include, arch):
        """What ptxas reports of the kernels in `source`, compiled for 'sm_80' and the like."""
        program = ctypes.c_void_p()
        text, contents, names = source.read_text(), strings(HEADERS.values()), strings(HEADERS)
        arguments = (text.encode(), str(source).encode(), len(HEADERS), contents, names)
        self._call("nvrtcCreateProgram", ctypes.byref(program), *arguments)
        options = [f"-I{folder}" for folder in [source.parent, *include, *self.include]]
        options += [f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v"]
        options += ["--device-as-default-execution-space", "--relocatable-device-code=true"]
        failed = self.library.nvrtcCompileProgram(program, len(options), strings(options))
        size = ctypes.c_size_t()
        self._call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self._call("nvrtcGetProgramLog", program, log)
        self._call("nvrtcDestroyProgram", ctypes.byref(program))
        assert not failed, log.value.decode()
        return log.value.decode()

    def _call(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        assert status == 0, f"{name} failed with {status}"


def strings(texts):
    texts = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(texts))(*texts)
