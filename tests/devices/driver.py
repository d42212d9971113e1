"""The emulated driver of cards without a card (`libcuda.cpp`), built once per checkout."""

from __future__ import annotations

import functools
import hashlib
import os

from tests.native_program import build_program
from tests.paths import REPOSITORY

_SOURCE = "tests/devices/libcuda.cpp"


@functools.cache
def emulated_driver() -> str:
    """Return the path of the library; its name is that of NVIDIA's, so that LD_LIBRARY_PATH finds it."""
    digest = hashlib.sha256((REPOSITORY / _SOURCE).read_bytes()).hexdigest()[:16]
    directory = REPOSITORY / "build" / f"libcuda-{digest}"
    found = directory / "libcuda.so.1"
    if not found.exists():
        directory.mkdir(parents=True, exist_ok=True)
        own = directory / str(os.getpid())
        own.mkdir(exist_ok=True)
        build_program(own, _SOURCE, flags=("-shared", "-fPIC")).rename(found)
        own.rmdir()
    return str(found)
