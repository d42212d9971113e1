"""Compiles kernels at run time for the card that is there: by NVRTC, which needs no CUDA toolkit and no card.

A kernel is compiled when it is first launched, by its name in source code ("attend<float, 64>"), and kept in a file for later
starts. NVRTC comes from PyPI (`nvidia-cuda-nvrtc`, the extra `cuda`) or from a toolkit. A card newer than NVRTC gets PTX, which
its driver compiles.
"""

from __future__ import annotations

import ctypes
import glob
import hashlib
import logging
import os
import re
import sys
import sysconfig
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

from ops.cuda.library import SOURCES, BuildError, writing_to

_LOG = logging.getLogger(__name__)
_PLACES = (  # of packages (PyTorch brings one), of toolkits and of distributions
    *(
        f"{directory}/nvidia/*/lib/libnvrtc.so.[0-9]*"
        for directory in dict.fromkeys((sysconfig.get_path("purelib"), *sys.path))
    ),
    "/usr/local/cuda/lib64/libnvrtc.so.[0-9]*",
    "/usr/local/cuda-*/lib64/libnvrtc.so.[0-9]*",
    "/usr/lib/*-linux-gnu/libnvrtc.so.[0-9]*",
    "/usr/lib64/libnvrtc.so.[0-9]*",
)
# Products and sums are fused only where a kernel does so explicitly, so that a row's bits are the same in all kernels.
OPTIONS = ("--std=c++17", "--fmad=false", "--diag-suppress=177")  # 177: constants that only other kernels use
_KERNEL = r"__global__ void (?:__launch_bounds__\([^)]*\) )?%s\("
OLDEST_VERSION = 12  # of CUDA, that NVRTC and the driver may have
OLDEST = (8, 0)  # compute capability with the products of a warp that kernels use
EMULATED = (0, 0)  # compute capability of an emulated card, which runs the kernels of the host's library


class Image(NamedTuple):
    """A compiled kernel."""

    code: bytes  # cubin or PTX
    entry: str  # the kernel's name in it


class Compiler:
    """The NVRTC at `path`, for cards of one compute capability. `directory`: of compiled kernels. BuildError if it cannot be
    loaded."""

    def __init__(self, path: str, capability: tuple[int, int], directory: Path) -> None:
        self._path = path
        self._nvrtc = _load(path)
        self._directory = directory
        supported = self._supported()
        wanted = 10 * capability[0] + capability[1]
        older = max((each for each in supported if each < wanted), default=0)
        if wanted not in supported and not older:
            raise BuildError(
                f"NVRTC {self.version} compiles no kernels for compute capability {wanted / 10}; install an older one"
            )
        self.target = f"sm_{wanted}" if wanted in supported else f"compute_{older}"
        self._headers = {file.name: file.read_bytes() for file in sorted(SOURCES.glob("*.h"))}
        self._sources = {file.name: file.read_bytes() for file in sorted(SOURCES.glob("*.cu"))}

    def image(self, name: str) -> Image:
        """Return the kernel `name`, from its file if it was compiled before. BuildError with the compiler's messages."""
        path = self._file_of(name)
        if (kept := _kept(path)) is not None:
            return kept
        begin = time.monotonic()
        image, _ = self._compile(self.source_of(name), name)
        _LOG.debug("compiled %s for %s in %.1f s", name, self.target, time.monotonic() - begin)
        self._write(path, _with_digest(image))
        return image

    def keep(self, name: str, image: Image) -> None:
        """Keep a kernel that was compiled elsewhere, from the same sources for the same target."""
        path = self._file_of(name)
        if _kept(path) is None:
            self._write(path, _with_digest(image))

    def _file_of(self, name: str) -> Path:
        key = hashlib.blake2b(repr((name, self.target, OPTIONS, os.path.basename(self._path))).encode(), digest_size=12)
        for text in (self._sources[self.source_of(name)], *self._headers.values()):
            key.update(text)
        return self._directory / f"{key.hexdigest()}.kernel"

    def _write(self, path: Path, contents: bytes) -> None:
        with writing_to(self._directory):
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_bytes(contents)
            partial.rename(path)

    def prepare(self, names: Iterable[str]) -> None:
        """Compile those of the kernels that have no file, on all cores. BuildError as for `image`."""
        missing = [name for name in names if _kept(self._file_of(name)) is None]
        if not missing:
            return
        begin = time.monotonic()
        _LOG.info("compiling %d kernels for %s, which is done once", len(missing), self.target)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compiler") as pool:
            for _ in pool.map(self.image, missing):
                pass
        _LOG.info("compiled %d kernels in %.0f s", len(missing), time.monotonic() - begin)

    def report(self, name: str) -> str:
        """Return what ptxas says of the kernel, from its file if it was asked before."""
        path = self._file_of(name).with_suffix(".report")
        if not path.exists():
            self._write(path, self._compile(self.source_of(name), name, "--ptxas-options=-v")[1].encode())
        return path.read_text()

    @property
    def version(self) -> str:
        """The version of NVRTC, such as "13.0"."""
        major, minor = c_int(), c_int()
        self._nvrtc.nvrtcVersion(byref(major), byref(minor))
        return f"{major.value}.{minor.value}"

    def source_of(self, name: str) -> str:
        declared = re.compile(_KERNEL % name.partition("<")[0])
        return next(file for file, text in self._sources.items() if declared.search(text.decode()))

    def _compile(self, source: str, name: str, *more: str) -> tuple[Image, str]:
        """Return the kernel and the compiler's messages."""
        headers = (c_char_p * len(self._headers))(*self._headers.values())
        names = (c_char_p * len(self._headers))(*map(str.encode, self._headers))
        all_options = (*OPTIONS, f"--gpu-architecture={self.target}", *more)
        options = (c_char_p * len(all_options))(*map(str.encode, all_options))
        program = c_void_p()
        made = self._nvrtc.nvrtcCreateProgram(
            byref(program), self._sources[source], source.encode(), len(self._headers), headers, names
        )
        assert made == 0, f"nvrtcCreateProgram: error {made}"
        try:
            self._nvrtc.nvrtcAddNameExpression(program, name.encode())
            status = self._nvrtc.nvrtcCompileProgram(program, len(all_options), options)
            if status != 0:
                raise BuildError(f"NVRTC cannot compile {name}:\n{self._text(program, 'ProgramLog')[-2000:]}")
            entry = c_char_p()
            self._nvrtc.nvrtcGetLoweredName(program, name.encode(), byref(entry))
            kind = "CUBIN" if self.target.startswith("sm_") else "PTX"
            return Image(self._bytes(program, kind), (entry.value or b"").decode()), self._text(program, "ProgramLog")
        finally:
            self._nvrtc.nvrtcDestroyProgram(byref(program))

    def _supported(self) -> list[int]:
        count = c_int()
        self._nvrtc.nvrtcGetNumSupportedArchs(byref(count))
        found = (c_int * count.value)()
        self._nvrtc.nvrtcGetSupportedArchs(found)
        return list(found)

    def _bytes(self, program: c_void_p, what: str) -> bytes:
        size = c_size_t()
        getattr(self._nvrtc, f"nvrtcGet{what}Size")(program, byref(size))
        found = ctypes.create_string_buffer(size.value)
        getattr(self._nvrtc, f"nvrtcGet{what}")(program, found)
        return found.raw

    def _text(self, program: c_void_p, what: str) -> str:
        return self._bytes(program, what).rstrip(b"\0").decode(errors="replace")


class EmulatedCompiler:
    """Stands in for NVRTC where the driver is an emulated card's: the host's library has every kernel."""

    target = "emulation"

    def __init__(self, library: Path) -> None:
        self._library = library

    def prepare(self, names: Iterable[str]) -> None:
        """Do nothing: they are there."""

    def image(self, name: str) -> Image:
        return Image(f"{self._library}\n{name}".encode() + b"\0", name)


def newest_nvrtcs() -> list[str]:
    """Return the path of the newest NVRTC of each major version that is installed; packages come before toolkits."""
    found: dict[int, str] = {}
    for place in _PLACES:
        for path in sorted(glob.glob(place), key=_version, reverse=True):
            found.setdefault(_version(path)[0], path)
    return list(found.values())


def find_nvrtc(driver_version: int = 1_000_000) -> str:
    """Return the path of the newest NVRTC that a driver can load kernels of: of its own major version of CUDA, or an earlier
    one. `driver_version`: 1000 * major + 10 * minor. BuildError if there is none."""
    found, major = newest_nvrtcs(), driver_version // 1000
    if major < OLDEST_VERSION:
        raise BuildError(f"this driver is of CUDA {major}, but the kernels need CUDA {OLDEST_VERSION}; update the driver")
    if not found:
        raise BuildError(
            "NVRTC was not found, but compiles the kernels for this card; run pip install 'tokamak-serve[cuda]', or "
            "install the CUDA toolkit"
        )
    usable = [path for path in found if OLDEST_VERSION <= _version(path)[0] <= major]
    if usable:
        return usable[0]
    newest = max(_version(path)[0] for path in found)
    if newest < OLDEST_VERSION:
        raise BuildError(
            f"NVRTC {newest} is too old, the kernels need NVRTC {OLDEST_VERSION}; run pip install 'tokamak-serve[cuda]'"
        )
    package = "nvidia-cuda-nvrtc-cu12" if major == 12 else f"'nvidia-cuda-nvrtc=={major}.*'"
    raise BuildError(
        f"NVRTC {newest} compiles kernels that this driver, of CUDA {major}, cannot load; run pip install {package}, or update "
        "the driver"
    )


def _kept(path: Path) -> Image | None:
    """Return a kernel that was kept; None: there is none, or the file is damaged."""
    try:
        digest, entry, code = path.read_bytes().split(b"\n", 2)
    except (FileNotFoundError, ValueError):
        return None
    image = Image(code, entry.decode(errors="replace"))
    return image if _digest(image) == digest else None


def _with_digest(image: Image) -> bytes:
    return b"\n".join((_digest(image), image.entry.encode(), image.code))


def _digest(image: Image) -> bytes:
    return hashlib.blake2b(image.entry.encode() + image.code, digest_size=16).hexdigest().encode()


def _version(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.partition("libnvrtc.so.")[2])]


def _load(path: str) -> Any:
    try:
        nvrtc = ctypes.CDLL(path)
    except OSError as error:
        raise BuildError(f"NVRTC cannot be loaded: {error}") from error
    for name, arguments in {
        "nvrtcCreateProgram": (POINTER(c_void_p), c_char_p, c_char_p, c_int, POINTER(c_char_p), POINTER(c_char_p)),
        "nvrtcAddNameExpression": (c_void_p, c_char_p),
        "nvrtcCompileProgram": (c_void_p, c_int, POINTER(c_char_p)),
        "nvrtcGetLoweredName": (c_void_p, c_char_p, POINTER(c_char_p)),
        "nvrtcDestroyProgram": (POINTER(c_void_p),),
        **{f"nvrtcGet{what}Size": (c_void_p, POINTER(c_size_t)) for what in ("CUBIN", "PTX", "ProgramLog")},
        **{f"nvrtcGet{what}": (c_void_p, c_char_p) for what in ("CUBIN", "PTX", "ProgramLog")},
    }.items():
        getattr(nvrtc, name).argtypes = arguments
    return nvrtc
