"""Builds the plugin (`plugin/`) against the installed Paddle, and again when its sources or that Paddle change."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.devices.board import PLUGIN, Board
from tests.paths import REPOSITORY

NAME = "tokasim"  # of the device
_OF_KERNELS = ("-DPADDLE_WITH_CUSTOM_DEVICE", "-DPADDLE_WITH_CUSTOM_KERNEL")


def built_plugin() -> Path:
    """Return the directory of the plugin. Other test processes wait while one builds it."""
    spec = importlib.util.find_spec("paddle")
    assert spec is not None
    assert spec.origin is not None
    of_paddle = Path(spec.origin).parent
    digest = hashlib.sha256(f"{of_paddle} {importlib.metadata.version('paddlepaddle')}".encode())
    for path in (Path(__file__), *sorted(PLUGIN.iterdir())):
        digest.update(path.read_bytes())
    directory = REPOSITORY / "build" / f"{NAME}-{digest.hexdigest()[:16]}"
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / f"lib{NAME}.so"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(directory, library, of_paddle)
    return directory


def _build(directory: Path, library: Path, of_paddle: Path) -> None:
    compiler = ("g++", "-std=c++17", "-w", "-fPIC")
    include = of_paddle / "include"

    def compile_one(source: Path) -> Path:
        target = directory / f"{source.stem}.o"
        flags = [*_OF_KERNELS, "-O0", f"-I{include / 'third_party'}"] if source.stem == "kernels" else ["-O1"]
        subprocess.run([*compiler, *flags, f"-I{include}", "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(max_workers=2) as pool:  # the kernels beside all else, which takes as long
        sources = sorted(PLUGIN.glob("*.cpp"), key=lambda source: source.stem != "kernels")
        objects = list(pool.map(compile_one, sources))
    libraries = [f"-L{of_paddle / 'libs'}", "-lphi_core", "-lphi", "-lcommon", f"-Wl,-rpath,{of_paddle / 'libs'}"]
    unfinished = library.with_suffix(".unfinished")
    subprocess.run([*compiler, "-shared", *objects, *libraries, "-o", unfinished], check=True)
    unfinished.rename(library)
    for each in objects:
        each.unlink()


def environment(directory: Path, board: Board | None = None, **more: str) -> dict[str, str]:
    """Return the environment of processes that have the device of the plugin in `directory`."""
    shown = {} if board is None else {"TOKASIM_BOARD": str(board.path)}
    return {**os.environ, "CUSTOM_DEVICE_ROOT": str(directory), "GLOG_minloglevel": "2", **shown, **more}
