"""Kernel variants of an engine: measured once per processor and build, stored in a file, and then the same for every start.

`kernels` is called in the launcher (by `tools/serving.py`, and by `tokamak bench step`) before anything starts. Its result is
part of the engine's configuration, and a worker selects exactly that (`device.py`), however often it restarts and whatever
happens to the file.

    <directory of packed weights>/kernels-<key>.json    Timing; the key is of the processor and the native module

The file is replaced as a whole. If it is unreadable, invalid or names unavailable kernels, they are measured again. A failure
to store it is no error.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoint.files import replace_file
from engine.config import text_of_kernels
from engine.errors import OptionError
from engine.installation import BUILD_AGAIN, IS_CHECKOUT, PACKAGES, python_environment
from engine.process.run_directory import read_document
from ops import _cpu
from ops.cpu.choice import ATTENTION, BASE, LINEARS, NUM_CASES, TIMED, choose, kernels_of
from shm.blake2 import blake2b

_LOG = logging.getLogger(__name__)
_LONGEST_S = 120.0  # measuring takes a fraction of a second on an idle machine
_PROCESSOR = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "flags",
    "CPU implementer",
    "CPU part",
    "Features",
)  # lines of /proc/cpuinfo
AUTO = "auto"


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of kernels, and the resulting choice."""

    key: str
    chosen: dict[str, str]  # variant of each of TIMED
    seconds: dict[str, dict[str, list[float]]]  # part -> variant -> time of each case; empty with a single variant

    @property
    def base(self) -> str:
        """Return the newest measured variant."""
        return list(self.seconds[TIMED[0]])[-1] if self.seconds else self.chosen[TIMED[0]]

    @staticmethod
    def read(path: Path, key: str, variants: list[str]) -> Timing | None:
        """Return the stored timing for this key and these variants; None if it is missing or different."""
        try:
            found = msgspec.json.decode(read_document(path), type=Timing)
        except (OSError, msgspec.DecodeError, RecursionError):
            return None
        is_ours = found.key == key and found.chosen.keys() == set(TIMED) and set(found.chosen.values()) <= set(variants)
        return found if is_ours and found.has_times_of(variants) else None

    def has_times_of(self, variants: list[str]) -> bool:
        """Return whether all variants were measured, unless there is only one."""
        if len(variants) == 1:
            return not self.seconds
        is_whole = self.seconds.keys() == set(TIMED) and all(list(times) == variants for times in self.seconds.values())
        return is_whole and all(
            len(seconds) == NUM_CASES[part.partition(" ")[0]] and min(seconds) > 0
            for part, times in self.seconds.items()
            for seconds in times.values()
        )


def kernels(asked: str, kv_dtype: str, directory: Path) -> dict[str, str]:
    """Return the variant of each part of an engine: `asked`, or the fastest ones for "auto". Raises OptionError if it cannot
    run here."""
    if not _cpu.candidates():
        built = ", ".join(name for name, is_built, _ in _cpu.known_variants() if is_built)
        raise OptionError(
            "--ops native: the native modules were built for another processor: this one runs none of their kernels "
            f"({built}); {BUILD_AGAIN}"
        )
    if asked != AUTO:
        check(asked)
        return kernels_of(dict.fromkeys(TIMED, asked), asked, kv_dtype)
    found = timing(directory)
    return kernels_of(found.chosen, found.base, kv_dtype)


def check(variant: str) -> None:
    """Raise OptionError if there is no such variant here."""
    if variant in _cpu.variants():
        return
    known = {name: is_runnable for name, _, is_runnable in _cpu.known_variants()}
    cause = "there is no such variant"
    if variant in known:
        build_all = "run TOKAMAK_BUILD_ALL=1 tools/serve to build all" if IS_CHECKOUT else BUILD_AGAIN
        cause = f"it is not built ({build_all})" if known[variant] else "this processor does not support it"
    raise OptionError(f"--cpu-kernels {variant}: {cause}; available here: {', '.join((AUTO, *_cpu.candidates()))}")


def timing(directory: Path) -> Timing:
    """Return the timing stored in `directory`; else measure and store it."""
    key, variants = _key(), _candidates()
    path = directory / f"kernels-{key}.json"
    if kept := Timing.read(path, key, variants):
        return kept
    variants, seconds = timed(variants)
    chosen = {part: choose(seconds[part], variants) if seconds else variants[0] for part in TIMED}
    found = Timing(key, chosen, seconds)
    _keep(path, found)
    return found


def select(chosen: Mapping[str, str]) -> None:
    """Select the variant of each part, and log the selection; an empty choice changes nothing."""
    for part, variant in sorted(chosen.items(), key=lambda item: item[0] != BASE):
        is_here = _cpu.select(variant) if part == BASE else _cpu.select_part(part, variant)
        if not is_here:
            raise OptionError(
                f"the engine was started with {variant} kernels ({part}), which are no longer available (found: "
                f"{', '.join(_cpu.variants())}); restart the engine"
            )
    if chosen:
        selected = {BASE: _cpu.variant(), **{part: _cpu.variant_of(part) for part in (*LINEARS, ATTENTION)}}
        _LOG.info("kernels: %s", text_of_kernels(selected))


def _candidates() -> list[str]:
    """Return the variants to choose from: the portable one only if there is no other."""
    found = _cpu.candidates()
    return found[1:] if len(found) > 1 and found[0] == "portable" else found


def _key() -> str:
    """Return a key of the processor and of the build of the native module."""
    native = Path(_cpu.__file__).stat()
    return blake2b(f"{native.st_size} {native.st_mtime_ns} {_processor()}".encode(), digest_size=8).hexdigest()


def _processor() -> str:
    """Return the operating system's description of the first processor."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return os.uname().machine
    return "\n".join(line for line in first.splitlines() if line.partition("\t")[0].strip() in _PROCESSOR)


def timed(variants: list[str]) -> tuple[list[str], dict[str, dict[str, list[float]]]]:
    """Return the variants that could be measured, with their times in seconds; a single one is not measured. The newest may
    crash on a processor that wrongly reports its instructions, as some virtual ones do; the engine then uses the others."""
    while len(variants) > 1:
        try:
            return variants, _measured(variants)
        except OptionError as error:
            _LOG.warning("%s; continuing without %s", error, variants[-1])
            variants = variants[:-1]
    return variants, {}


def _measured(variants: list[str]) -> dict[str, dict[str, list[float]]]:
    """Measure in a child process. Raises OptionError if it fails."""
    command = [sys.executable, "-m", "ops.cpu.rates", *variants]
    environment = {**python_environment(os.environ), "OPENBLAS_NUM_THREADS": "1"}  # numpy needs no threads
    settings: dict[str, Any] = {"cwd": PACKAGES, "env": environment, "stdin": subprocess.DEVNULL, "capture_output": True}
    try:
        child = subprocess.run(command, timeout=_LONGEST_S, check=True, **settings)
        return msgspec.json.decode(child.stdout, type=dict[str, dict[str, list[float]]])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        last = getattr(error, "stderr", None) or b""
        raise OptionError(
            f"the kernels {', '.join(variants)} could not be measured: {error} {last.decode(errors='replace')[-500:]}; choose "
            "kernels with --cpu-kernels"
        ) from error


def _keep(path: Path, found: Timing) -> None:
    try:
        replace_file(path, msgspec.json.format(msgspec.json.encode(found), indent=2))
    except OSError as error:
        _LOG.warning("kernel timings cannot be stored in %s: %s; the next start measures them again", path.parent, error)
