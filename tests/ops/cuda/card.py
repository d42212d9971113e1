"""The emulated card, compiled once for a checkout, which takes half a minute of processor time: `tools/test` does it before, so
that not each process of the suite runs a compiler of its own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ops.cuda.library import Library, build, emulation_command
from tests.paths import REPOSITORY


@cache
def emulated_card() -> Library:
    return Library(emulated_library())


def emulated_library() -> Path:
    return build(emulation_command(), REPOSITORY / "build" / "cuda")
