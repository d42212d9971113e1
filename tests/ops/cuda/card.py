"""The emulated card, compiled once per checkout, which takes half a minute of CPU time: `tools/test` does it first, so that not
each process of the suite runs a compiler.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ops.cuda.library import Library, build, host_command
from tests.paths import REPOSITORY


@cache
def emulated_card() -> Library:
    return Library(emulated_library())


def emulated_library() -> Path:
    return build(host_command(), REPOSITORY / "build" / "cuda")
