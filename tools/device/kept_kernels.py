"""Kernels that `tools/device/pack` compiles for a card that is elsewhere, and that `tools/device/card` keeps there as if they
had been compiled for it. A file has three parts: a line with the kernel's name in source code, one with its name in the code,
the code. The folder has the name of the target.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ops.cuda.compiler import EMULATED, Compiler, Image, find_nvrtc
from ops.cuda.library import Library, build, host_command
from shm.cuda_driver import CardInfo


class Adopted(NamedTuple):
    num: int
    text: str


def compile_for(capability: tuple[int, int], folder: Path) -> int:
    """Compile all kernels into `folder` and return their number. BuildError if a compiler is missing."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(os.cpu_count()) as pool:
        compiler = Compiler(find_nvrtc(), capability, Path(directory))
        names = Library(build(host_command(), Path("build") / "cuda")).kernel_names
        place = folder / compiler.target
        place.mkdir(parents=True, exist_ok=True)
        for number, (name, image) in enumerate(zip(names, pool.map(compiler.image, names), strict=True)):
            (place / f"{number}.kernel").write_bytes(f"{name}\n{image.entry}\n".encode() + image.code)
    return len(names)


def adopt(folder: Path, directory: Path, info: CardInfo) -> Adopted:
    """Keep the kernels of `folder` that the card of `info` runs in `directory`. BuildError if there is no NVRTC."""
    if not folder.is_dir():
        return Adopted(0, f"there is no {folder}")
    if info.capability == EMULATED:
        return Adopted(0, "the card is emulated")
    compiler = Compiler(find_nvrtc(info.driver_version), info.capability, directory)
    files = sorted((folder / compiler.target).glob("*.kernel"))
    for file in files:
        name, entry, code = file.read_bytes().split(b"\n", 2)
        compiler.keep(name.decode(), Image(code, entry.decode()))
    return Adopted(len(files), f"{len(files)} for {compiler.target}")
