"""Kernels that `tools/device/pack` compiles for a card that is elsewhere, and that `tools/device/card` keeps there as if they
had been compiled for it. A zip file has those of a target. Each of its files has three parts: a line with the kernel's name in
source code, one with its name in the code, the code.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
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
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(folder / f"{compiler.target}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for number, (name, image) in enumerate(zip(names, pool.map(compiler.image, names), strict=True)):
                archive.writestr(f"{number}.kernel", f"{name}\n{image.entry}\n".encode() + image.code)
    return len(names)


def adopt(folder: Path, directory: Path, info: CardInfo) -> Adopted:
    """Keep the kernels of `folder` that the card of `info` runs in `directory`. BuildError if there is no NVRTC."""
    if not folder.is_dir():
        return Adopted(0, f"there is no {folder}")
    if info.capability == EMULATED:
        return Adopted(0, "the card is emulated")
    compiler = Compiler(find_nvrtc(info.driver_version), info.capability, directory)
    path = folder / f"{compiler.target}.zip"
    if not path.exists():
        return Adopted(0, f"there is no {path}")
    with zipfile.ZipFile(path) as archive:
        for file in archive.namelist():
            name, entry, code = archive.read(file).split(b"\n", 2)
            compiler.keep(name.decode(), Image(code, entry.decode()))
        return Adopted(len(archive.namelist()), f"{len(archive.namelist())} for {compiler.target}")
