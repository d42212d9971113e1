"""Folder of `tools/device/pack`: all that `tools/device/card` needs on a machine without network, and the size of each part."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.paths import PICTURE_MODELS, REPOSITORY, TEXT_MODELS
from tools.device.kept_kernels import compile_for

MAX_BYTES = 60 << 20
_CAPABILITY = (9, 0)  # H100, H200
_LEFT_OUT = (
    ".github/",
    "tools/clients/",
    "tools/demo/",
    "tools/deploy/",
    "tools/grafana/",
    "tests/api/",
    "tests/engine/",
    "tests/tools/",
    "tests/golden/",
)
_KEPT = ("tools/demo/__init__.py", "tests/engine/__init__.py", "tests/engine/echo_engine.py")
# for downloads, vocabularies that the golden models do not have, and the terminal
_UNUSED_WHEELS = ("hf_xet", "sentencepiece", "prompt_toolkit", "wcwidth")
_FIRST_TO_GO = ("numpy",)  # if the folder is too large: PyTorch's machine has it


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 1 if the folder is too large."""
    parser = argparse.ArgumentParser(prog="tools/device/pack", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("version", help="of the machine's Python")
    parser.add_argument("--no-kernels", action="store_true", help="the machine compiles its kernels")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    for file in files(options.version):
        place = folder / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((REPOSITORY / file).read_bytes())
        place.chmod((REPOSITORY / file).stat().st_mode)
    for name in _UNUSED_WHEELS:
        for wheel in (folder / "wheels").glob(f"{name}*.whl"):
            wheel.unlink()
    if not options.no_kernels:
        print(f"{compile_for(_CAPABILITY, folder / 'kernels')} kernels for compute capability 9.0")
    for name in _FIRST_TO_GO:
        for wheel in (folder / "wheels").glob(f"{name}-*.whl"):
            if size_of(folder) > MAX_BYTES:
                print(f"left out: {wheel.name}, {wheel.stat().st_size / 2**20:.1f} MiB, the machine must have it")
                wheel.unlink()
    sizes = {part: size_of(folder / part) for part in sorted({path.name for path in folder.iterdir()})}
    sizes["of tests/: golden"] = size_of(folder / "tests" / "golden")
    for part, size in sizes.items():
        print(f"{size / 2**20:8.1f} MiB  {part}")
    total = size_of(folder)
    print(f"{total / 2**20:8.1f} MiB  in all, of {MAX_BYTES >> 20} at most")
    return int(total > MAX_BYTES)


def files(version: str) -> Iterator[str]:
    """Yield the repository's files that go along, and the native modules for that Python."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    golden = tuple(f"tests/golden/{model}/" for model in (*TEXT_MODELS, *PICTURE_MODELS))
    for file in filter(None, listed.split("\0")):
        if not file.startswith(_LEFT_OUT) or file.startswith((*golden, *_KEPT)):
            yield file
    for package in ("ops", "shm"):
        for module in (REPOSITORY / package).glob(f"_*.cpython-{version.replace('.', '')}-*.so"):
            yield str(module.relative_to(REPOSITORY))


def size_of(path: Path) -> int:
    paths = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in paths if each.is_file())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
