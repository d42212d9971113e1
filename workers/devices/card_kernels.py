"""Kernels of `ops/cuda` on a card, by its driver: compiled for it when first launched, and loaded.

Used by the device (`cuda/device.py`) and by `tools/device`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from pathlib import Path

from ops.cuda.compiler import EMULATED, OLDEST, Compiler, EmulatedCompiler, find_nvrtc
from ops.cuda.library import BuildError, Library, build, host_command
from shm.cuda_driver import MAX_DYNAMIC_SHARED_BYTES, CudaDriver

_TYPES = {"float32": "float", "bfloat16": "Bfloat16"}  # in names of kernels
_ALWAYS_ALLOWED = 48 << 10  # bytes of dynamic shared memory that a kernel may use without asking


class CardKernels:
    """Kernels for the card of `driver`; `host` is the file of the host's part. BuildError if they cannot be compiled for it."""

    def __init__(self, driver: CudaDriver, host: Path, directory: Path) -> None:
        info = driver.info()
        self._driver = driver
        self._compiler: Compiler | EmulatedCompiler = EmulatedCompiler(host)
        if info.capability != EMULATED:
            if info.capability < OLDEST:
                raise BuildError(
                    f"{info.name} has compute capability {info.capability[0]}.{info.capability[1]}, but the kernels need "
                    f"{OLDEST[0]}.{OLDEST[1]}"
                )
            self._compiler = Compiler(find_nvrtc(info.driver_version), info.capability, directory)
        self.launch_address = driver.address_of("cuLaunchKernel")
        self._functions: dict[str, int] = {}

    def prepare(self, names: Iterable[str]) -> None:
        """Compile kernels before they are used."""
        self._compiler.prepare(names)

    def function(self, name: str, num_shared_bytes: int) -> int:
        if name not in self._functions:
            self._functions[name] = self._driver.function(*self._compiler.image(name))
        if num_shared_bytes > _ALWAYS_ALLOWED:
            self._allow(name, num_shared_bytes)
        return self._functions[name]

    def _allow(self, name: str, num_shared_bytes: int) -> None:
        function = ctypes.c_void_p(self._functions[name])
        if status := self._driver.library.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_BYTES, num_shared_bytes):
            raise BuildError(
                f"{name} needs {num_shared_bytes} bytes of shared memory per block, which {self._driver.info().name} does not "
                f"have ({self.error_name(status)}); use --dtype bfloat16, which needs half of float32's, or another GPU"
            )

    def error_name(self, status: int) -> str:
        return self._driver.error_name(status)


def card_library(driver: CudaDriver, directory: Path, dtype: str = "") -> Library:
    """Return the rows on the card of `driver`. `directory`: of what is compiled. `dtype`: of activations, for which the kernels
    are compiled now; others when they are first launched. BuildError if a compiler is missing or fails."""
    host = build(host_command(), directory)
    kernels = CardKernels(driver, host, directory)
    library = Library(host, kernels)
    if dtype:
        wanted = re.compile(rf"^\w+(<{_TYPES[dtype]}(, {_TYPES[dtype]})?(, \d+)?>)?$")
        kernels.prepare(name for name in library.kernel_names if wanted.match(name))
    return library
