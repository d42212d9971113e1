"""The host's part of the rows: it chooses a row's kernels and launches them, on a card or on the emulation. Built by the
machine's C++ compiler and cached by a key of all inputs.

A library is built if there is none yet for these sources, this compiler and these flags, in a file that is renamed when
complete. `Library.run` calls a row; errors that the emulation finds in a kernel are raised. On a card, `compiler.py` compiles a
kernel when it is first launched.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_void_p
from pathlib import Path
from typing import Any, Protocol

from ops.cuda.operands import ROWS, STRUCTURES

SOURCES = Path(__file__).parent
_OUTPUT = ("-fPIC", "-shared", "-fvisibility-inlines-hidden")
_FLAGS = ("-std=c++17", "-Og", *_OUTPUT, "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-x", "c++")
_Resolve = CFUNCTYPE(c_int, c_char_p, c_int, POINTER(c_void_p))
_UNRESOLVED = -1  # status of a launch without a kernel; the driver's are positive


class BuildError(Exception):
    """The compiler failed, or there is none."""


class RowError(Exception):
    """A kernel was not run, or made an error."""


class Kernels(Protocol):
    """Kernels on a card (`workers/devices/card_kernels.py`)."""

    launch_address: int  # of cuLaunchKernel

    def function(self, name: str, num_shared_bytes: int) -> int:
        """Return the kernel `name` ("attend<float, 64>"), which may use that many bytes of dynamic shared memory. Raises
        BuildError."""

    def error_name(self, status: int) -> str: ...


def host_command() -> list[str]:
    """Return the call of the C++ compiler. BuildError if there is none."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise BuildError("CUDA's rows need a C++ compiler for the host's part, and none was found; install g++")
    return [compiler, *_FLAGS]


def build(command: list[str], directory: Path) -> Path:
    """Return the library that `command` builds from the sources. BuildError with the compiler's last lines."""
    sources = sorted(SOURCES.glob("*.cu"))
    key = hashlib.blake2b(repr(command).encode(), digest_size=12)
    for file in (*sources, *sorted(SOURCES.glob("*.h"))):
        key.update(file.name.encode() + b"\0" + file.read_bytes())
    path = directory / f"cuda-rows-{key.hexdigest()}.so"
    if path.exists():
        return path
    with writing_to(directory), (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process finds the library of the first
        if path.exists():
            return path
        with tempfile.TemporaryDirectory(dir=directory) as made, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = [Path(made) / f"{source.name}.o" for source in sources]
            for _ in pool.map(lambda pair: _run([*command, "-c", "-o", *map(str, pair)]), zip(objects, sources, strict=True)):
                pass
            linked = Path(made) / path.name
            _run([command[0], "-shared", "-o", str(linked), *map(str, objects)])
            with linked.open("rb") as whole:
                os.fsync(whole.fileno())  # a part, after a crash of the machine, would crash each process that loads it
            linked.rename(path)
    return path


@contextlib.contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Make `directory`, for files of the context. BuildError if it, or one of them, cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise BuildError(
            f"{directory} cannot be written: {error.strerror}; make room there, or set XDG_CACHE_HOME to another directory"
        ) from error


def _run(command: list[str]) -> None:
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise BuildError(f"{command[0]} failed with exit code {made.returncode}:\n{made.stderr[-2000:]}")


class Library:
    """The rows of one file, on `kernels` of a card, or emulated (None)."""

    def __init__(self, path: Path, kernels: Kernels | None = None) -> None:
        self.name = path.name  # has a digest of all sources
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"{error}; delete it to have it built again") from error
        for row in ROWS:
            size = getattr(self._library, f"tokamak_size_of_{row}")()
            assert size == ctypes.sizeof(STRUCTURES[row]), (
                f"{row} has {size} bytes in the library, but {ctypes.sizeof(STRUCTURES[row])} in Python"
            )
        self._library.tokamak_error.restype = self._library.tokamak_kernels.restype = c_char_p
        self._library.tokamak_use_driver.argtypes = (c_void_p, c_void_p)
        self._kernels, self._cause = kernels, ""
        self._resolve = _Resolve(self._found)  # lives as long as its address is used

    @property
    def kernel_names(self) -> list[str]:
        names: str = self._library.tokamak_kernels().decode()
        return names.splitlines()

    def run(self, row: str, operands: ctypes.Structure, stream: int = 0) -> None:
        """Enqueue a row on a stream of the card (its address); the emulation runs it before returning."""
        if self._kernels is None:
            self._library.tokamak_use_driver(None, None)
        else:
            self._library.tokamak_use_driver(ctypes.cast(self._resolve, c_void_p), self._kernels.launch_address)
        call: Any = getattr(self._library, f"tokamak_{row}")
        status = call(ctypes.byref(operands), c_void_p(stream))
        if status == 0:
            return
        if self._kernels is None:
            raise RowError(f"{row}: {self._library.tokamak_error().decode()}")
        raise RowError(f"{row}: {self._cause if status == _UNRESOLVED else self._kernels.error_name(status)}")

    def _found(self, name: bytes, num_shared_bytes: int, function: Any) -> int:
        assert self._kernels is not None, "the emulation resolves no kernels"
        try:
            function[0] = self._kernels.function(name.decode(), num_shared_bytes)
        except Exception as error:  # it would be lost in the library between
            self._cause = str(error)
            return _UNRESOLVED
        return 0

    def seed(self, value: int) -> None:
        """Set the seed of the order of threads and blocks in the emulation. No effect on a card."""
        self._library.tokamak_seed(value)
