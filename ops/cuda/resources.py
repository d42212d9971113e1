"""Registers and memory of the kernels on a card, by ptxas: `python -m ops.cuda.resources` prints a table and fails if a kernel
spills.

NVRTC compiles each kernel as for a card, which need not be there. The table is kept in `.github/DEVICES.md` with the digest of
its sources, because a run takes minutes. `--targets` compiles all kernels for more cards, with the newest NVRTC of each major
version that is installed, and prints a line for each; it takes about half an hour on two cores. What ptxas said of kernels with
unchanged sources is read from files.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ops.cuda.compiler import OLDEST, OPTIONS, Compiler, find_nvrtc, newest_nvrtcs
from ops.cuda.library import SOURCES, Library, build, host_command

CAPABILITIES = ((8, 0), (9, 0), (10, 0))  # of A100, H100 and B200
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_103", "sm_120")

_SIZES = ("registers", "shared_bytes", "stack_bytes", "spilled_bytes")
_DIRECTORY = Path("build") / "cuda"
_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<card>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)
_KERNEL = re.compile(r"\d+([a-z][a-z_]*?)(?:I|E)")  # in a mangled name, after its namespace


class Resources(msgspec.Struct, frozen=True):
    """Resources of one kernel, for one type of its operands, on one card."""

    kernel: str
    card: str
    registers: int
    shared_bytes: int  # fixed for every launch; others are chosen at launch
    stack_bytes: int
    spilled_bytes: int


def resources_of(log: str) -> list[Resources]:
    """Parse the output of `ptxas -v`."""
    found = []
    for entry in _ENTRY.finditer(log):
        named = [name for name in _KERNEL.findall(entry["name"]) if not name.startswith("_")]
        spilled = int(entry["stores"]) + int(entry["loads"])
        sizes = int(entry["registers"]), int(entry["shared"] or 0), int(entry["stack"]), spilled
        found.append(Resources(named[0] if named else entry["name"], entry["card"], *sizes))
    return found


def table(found: Iterable[Resources]) -> str:
    """Return a table of the maximum over all types of a kernel, a line for each kernel and card."""
    most: dict[tuple[str, str], Resources] = {}
    for each in found:
        key = each.kernel, each.card
        before = most.get(key, each)
        most[key] = Resources(*key, *(max(getattr(before, size), getattr(each, size)) for size in _SIZES))
    lines = ["| kernel | card | registers | shared memory | stack | spilled |", "|---|---|---|---|---|---|"]
    for each in most.values():
        values = each.kernel, f"sm_{each.card}", each.registers, each.shared_bytes, each.stack_bytes, each.spilled_bytes
        lines.append(f"| {' | '.join(map(str, values))} |")
    return "\n".join(lines)


def digest() -> str:
    """Return the digest of the sources without their comments, and of the compiler's options."""
    found = hashlib.blake2b(repr(OPTIONS).encode(), digest_size=8)
    for file in sorted({*SOURCES.glob("*.cu"), *SOURCES.glob("*.h")} - {SOURCES / "emulation.h", SOURCES / "library.cu"}):
        lines = (" ".join(line.split("//", 1)[0].split()) for line in file.read_text().splitlines())
        found.update("\n".join([file.name, *(line for line in lines if line), ""]).encode())
    return found.hexdigest()


def is_kept() -> bool:
    """Return whether .github/DEVICES.md has the table of these kernels."""
    return f"Sources `{digest()}`:" in (SOURCES.parents[1] / ".github" / "DEVICES.md").read_text()


def logs(names: Iterable[str], compilers: Sequence[Compiler]) -> Iterator[str]:
    """Yield what ptxas says of each kernel on each card. BuildError if NVRTC fails."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles several programs at once
        yield from pool.map(lambda job: job[1].report(job[0]), itertools.product(names, compilers))


def kernel_names() -> list[str]:
    return Library(build(host_command(), _DIRECTORY)).kernel_names


def main() -> int:
    """Print the table and return the exit code: 1 if a kernel spills. BuildError if there is no NVRTC."""
    path = find_nvrtc()
    compilers = [Compiler(path, capability, _DIRECTORY) for capability in CAPABILITIES]
    found = [each for log in logs(kernel_names(), compilers) for each in resources_of(log)]
    print(f"Sources `{digest()}`:\n\n{table(found)}")
    return int(any(each.spilled_bytes for each in found))


def print_targets(paths: Iterable[str]) -> int:
    """Print a line for each NVRTC of `paths` and each target, and return the exit code: 1 if a kernel spills."""
    names, num_spilled = kernel_names(), 0
    print(f"All kernels of sources `{digest()}`:\n")
    print(f"| card | NVRTC | kernels | registers | shared memory | stack | spilled |\n|{'---|' * 7}")
    for path, target in itertools.product(paths, TARGETS):
        compiler = Compiler(path, OLDEST, _DIRECTORY)
        compiler.target = target
        found = [each for log in logs(names, [compiler]) for each in resources_of(log)]
        most = [max(getattr(each, size) for each in found) for size in _SIZES]
        print(f"| {' | '.join(map(str, (target, compiler.version, len(names), *most)))} |", flush=True)
        num_spilled += most[-1]
    return int(num_spilled > 0)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--is-kept"]:
            raise SystemExit(int(not is_kept()))
        case ["--targets"]:
            raise SystemExit(print_targets(newest_nvrtcs()))
    raise SystemExit(main())
