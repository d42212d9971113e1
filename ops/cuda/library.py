"""The compiled rows: for a card by nvcc, for the emulation by the machine's C++ compiler. Cached by a key of all inputs.

A library is built if there is none yet for these sources, this compiler and these flags, in a file that is renamed when
complete. `Library.run` calls a row; errors that the emulation finds in a kernel are raised.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from ops.cuda.operands import ROWS, STRUCTURES

SOURCES = Path(__file__).parent
# The toolkit's place, which is often not in PATH, and that of PyPI's nvidia-cuda-nvcc (the extra `nvcc`).
USUAL_NVCCS = ("/usr/local/cuda/bin/nvcc", f"{sysconfig.get_path('purelib')}/nvidia/cu13/bin/nvcc")
CARDS = ("80", "90", "100")  # compute capabilities that kernels are compiled for
# Products and sums are fused only where a kernel does so explicitly, so that a row's bits are the same in all kernels.
_EMULATION = ("-std=c++17", "-Og", "-fPIC", "-shared", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-x", "c++")
_CARDS = ("-std=c++17", "-O3", "--fmad=false", "--shared", "-Xcompiler", "-fPIC")


class BuildError(Exception):
    """The compiler failed, or there is none."""


def emulation_command() -> list[str]:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise BuildError("the CUDA emulation needs a C++ compiler, and none was found; install g++")
    return [compiler, *_EMULATION]


def find_nvcc() -> str:
    """Return the path of nvcc. BuildError if there is none."""
    found = next(filter(None, map(shutil.which, ("nvcc", *USUAL_NVCCS))), None)
    if found is None:
        where = " or ".join(("on PATH", *USUAL_NVCCS))
        raise BuildError(
            f"nvcc was not found ({where}), but is needed to build the kernels; run pip install 'tokamak-serve[nvcc]'"
        )
    return found


def card_command(nvcc: str, cards: tuple[str, ...] = CARDS) -> list[str]:
    codes = [f"-gencode=arch=compute_{card},code=sm_{card}" for card in cards]
    return [nvcc, *_CARDS, *codes]


def build(command: list[str], directory: Path) -> Path:
    """Return the library that `command` builds from the sources. BuildError with the compiler's last lines."""
    sources = sorted(SOURCES.glob("*.cu"))
    key = hashlib.blake2b(repr(command).encode(), digest_size=12)
    for file in (*sources, *sorted(SOURCES.glob("*.h"))):
        key.update(file.name.encode() + b"\0" + file.read_bytes())
    path = directory / f"cuda-rows-{key.hexdigest()}.so"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process finds the library of the first
        if path.exists():
            return path
        partial = path.with_suffix(f".{os.getpid()}")
        made = subprocess.run([*command, "-o", str(partial), *map(str, sources)], capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise BuildError(f"{command[0]} failed with exit code {made.returncode}:\n{made.stderr[-2000:]}")
        partial.rename(path)
    return path


class RowError(Exception):
    """A kernel was not run, or made an error."""


class Library:
    """The rows of one file."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for row in ROWS:
            size = getattr(self._library, f"tokamak_size_of_{row}")()
            assert size == ctypes.sizeof(STRUCTURES[row]), (
                f"{row} has {size} bytes in the library, but {ctypes.sizeof(STRUCTURES[row])} in Python"
            )
        self._library.tokamak_error.restype = ctypes.c_char_p

    def run(self, row: str, operands: ctypes.Structure, stream: int = 0) -> None:
        """Enqueue a row on a stream of the card (its address); the emulation runs it before returning."""
        call: Any = getattr(self._library, f"tokamak_{row}")
        status = call(ctypes.byref(operands), ctypes.c_void_p(stream))
        if status != 0:
            raise RowError(f"{row}: {self._library.tokamak_error(status).decode()}")

    def seed(self, value: int) -> None:
        """Set the seed of the order of threads and blocks in the emulation. No effect on a card."""
        self._library.tokamak_seed(value)
