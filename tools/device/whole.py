"""`tools/test --device gpu|xpu|NAME`: all checks that need a card, in one command. It names each miss, and each check that this
machine cannot run.

    rows      each CUDA row checked and timed; attention over 16,384 keys relative to copy bandwidth  GPUs
    linear    the bfloat16 linear relative to the vendor's library                                      GPUs
    arena     a cache that outlives its worker                                                          GPUs
    bytes     the same answers op by op, captured, on 1 and on 2 ranks, after kills, sleep and reload
    golden    models with transformers' tokens, over HTTP
    captured  steps per second, captured relative to op by op

`tests/tools/test_device_whole.py` runs it on the simulated device with emulated rows, where the times mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import httpx
import msgspec

from engine.errors import OptionError, StartError
from engine.options.resolve_device import ARENA_LIBRARIES, InstalledPaddle, installed_paddle, resolve_device
from engine.supervisor.device_arenas import device_arenas
from ops.cuda.library import BuildError, RowError
from shm.cuda_driver import CudaDriver
from tests.devices.child import call_there
from tests.devices.persistent_arena_worker import NUM_BYTES, run_worker
from tests.e2e.engine_process import GOLDEN
from tests.workers.serving import ARCHITECTURES
from tools.bench import dense_shape, shape
from tools.device import engines, rows
from tools.device.card import Card, CardError
from tools.device.findings import Finding, Findings, Outcome, least, summary
from workers.devices.card_kernels import card_library

LINEAR_BAR = 0.8  # relative to the vendor's library
_SHAPES = [(count, 4096, 14336) for count in (1, 16, 2048)]
_SMALL_SHAPES = [(count, 128, 40) for count in (1, 70)]
_ON_GPUS = "CUDA's kernels are of NVIDIA's GPUs"
_ERRORS = (AssertionError, OSError, RuntimeError, ValueError, CardError, BuildError, RowError, StartError, httpx.HTTPError)


class Options(msgspec.Struct, frozen=True):
    device: str
    only: tuple[str, ...]
    ops: tuple[str, ...]
    ways: tuple[str, ...]
    models: tuple[str, ...]
    driver: str  # "": the rows do not support this device
    is_small: bool


Part = Callable[[engines.Target, Options], Findings]


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 1 if a check missed, 2 if there is no card."""
    options = _options(arguments)
    asked: list[InstalledPaddle] = []

    def ask() -> InstalledPaddle:
        asked.append(installed_paddle())
        return asked[-1]

    try:
        if options.device in ("cpu", "auto"):
            raise OptionError(f"--device {options.device}: that is no card; give gpu, xpu or a custom device")
        resolve_device(options.device, "auto", 1, ask)
    except OptionError as error:
        print(f"tools/test: {error}", file=sys.stderr)
        return 2
    target = engines.Target(options.device, asked[0].cards[options.device])
    print(f"{asked[0].text}; {target.num_cards} cards of {target.device}", flush=True)
    found = []
    for part, run in PARTS.items():
        for finding in _told(part, run if part in options.only else _left_out(part), target, options):
            print(finding.line, flush=True)
            found.append(finding)
    lines, code = summary(found)
    print("\n" + "\n".join(lines))
    return code


def _left_out(part: str) -> Part:
    return lambda target, options: iter([Finding(part, Outcome.NOT_RUN, "it was not asked for (--only)")])


def _told(part: str, run: Part, target: engines.Target, options: Options) -> Findings:
    """Yield the findings of one part; an error in it is a miss and does not stop the other parts."""
    try:
        yield from run(target, options)
    except _ERRORS as error:
        yield Finding(part, Outcome.MISSED, f"it ended with {type(error).__name__}: {error}")


# --------------------------------------------------------------------------------------------------------------- parts


def _rows(target: engines.Target, options: Options) -> Findings:
    if not options.driver:
        yield Finding("rows", Outcome.NOT_RUN, _ON_GPUS)
        return
    card = Card(options.driver, 0)
    library = card_library(card.driver, rows.directory(is_small=options.is_small))
    passed, failed, timed = rows.run(card, library, is_small=options.is_small)
    yield Finding.of("rows: right on the card", failed == 0, f"{passed} of {passed + failed} checks")
    for each in timed:
        if each.case.bandwidth_bar:
            yield least(f"rows: bandwidth of attention, {each.case.text}", each.bandwidth_share, each.case.bandwidth_bar)


def _linear(target: engines.Target, options: Options) -> Findings:
    if not options.driver:
        yield Finding("linear", Outcome.NOT_RUN, _ON_GPUS)
        return
    place = "cpu" if options.is_small else target.device
    dtype = "float32" if place == "cpu" else "bfloat16"  # the only type that Paddle multiplies there
    shapes, num_runs = (_SMALL_SHAPES, 2) if options.is_small else (_SHAPES, 50)
    arguments = options.driver, str(rows.directory(is_small=options.is_small)), place, dtype, shapes, num_runs
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found = pool.submit(call_there, "linears_beside_the_librarys", arguments, {}).result()
    for each in found:
        what = f"linear: {each.num_rows} rows, {each.num_inputs} x {each.num_outputs} {dtype}, beside the library's"
        yield Finding.of(f"{what}: the same numbers", each.error < 1.6e-2, f"off by {each.error:.2g} of the largest")
        yield least(f"{what}: its rate", each.librarys / each.own, LINEAR_BAR)


def _arena(target: engines.Target, options: Options) -> Findings:
    library = options.driver or ARENA_LIBRARIES.get(target.device, "")
    if not library:
        yield Finding("arena", Outcome.NOT_RUN, f"the cache of {target.device} ends with its worker, and is computed again")
        return
    device = target.device if target.device in ARENA_LIBRARIES else "cpu"  # with a stub of the driver
    notes: list[str] = []
    with device_arenas(library, 1, NUM_BYTES, notes.append) as (arena,):
        if notes:
            yield Finding("arena", Outcome.NOT_RUN, notes[0])
            return
        whole = run_worker(library, arena, device, has_blocks=False)
        again = run_worker(library, arena, device, has_blocks=True)
    is_same = (again["outputs"], again["logprobs"]) == (whole["outputs"], whole["logprobs"])
    text = f"{again['num_computed']} positions of a killed worker were there"
    yield Finding.of("arena: what a killed worker computed is found again", is_same and again["num_computed"] > 0, text)


def _tables(options: Options) -> Iterator[str]:
    """Yield the op tables. BuildError if CUDA kernels cannot be compiled, since engines would use fused ops instead."""
    for ops in options.ops:
        if ops == "cuda":
            card_library(CudaDriver(options.driver, 0, BuildError), rows.directory(is_small=options.is_small))
        yield ops


def _bytes(target: engines.Target, options: Options) -> Findings:
    for ops in _tables(options):
        yield from engines.same_bytes(target, ops, [engines.WAYS[way] for way in options.ways])


def _golden(target: engines.Target, options: Options) -> Findings:
    for ops in _tables(options):
        yield from engines.golden(target, ops, options.models)


def _captured(target: engines.Target, options: Options) -> Findings:
    with tempfile.TemporaryDirectory() as directory:
        model, num_tokens, num_rounds = GOLDEN / "qwen3", 24, 1
        if not options.is_small:
            model, num_tokens, num_rounds = Path(directory) / "model", 256, 5
            shape.write(model, dense_shape.CONFIG, dense_shape.CHAT_TEMPLATE, seed=0)
        for ops in _tables(options):
            yield from engines.captured_speed(target, ops, model, num_tokens, num_rounds)


PARTS: dict[str, Part] = {
    "rows": _rows,
    "linear": _linear,
    "arena": _arena,
    "bytes": _bytes,
    "golden": _golden,
    "captured": _captured,
}


def _options(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="tools/test --device", description=__doc__.split("\n\n")[0])
    parser.add_argument("device", help="gpu, xpu, or a custom device of Paddle's")

    def add_list(name: str, choices: Iterable[str], text: str) -> None:
        known = tuple(choices)

        def listed(given: str) -> tuple[str, ...]:
            if unknown := sorted({*given.split(",")} - {*known}):
                raise argparse.ArgumentTypeError(f"{','.join(unknown)}: there are {', '.join(known)}")
            return tuple(given.split(","))

        parser.add_argument(
            name, default=known, type=listed, metavar="NAMES", help=f"{text}: {', '.join(known)} (default: all)"
        )

    add_list("--only", PARTS, "parts")
    add_list("--ways", engines.WAYS, "how bytes are to be the same")
    add_list("--models", ARCHITECTURES, "golden models")
    parser.add_argument("--ops", default="", help="op tables (default: fused, on GPUs cuda too)")
    parser.add_argument("--driver", default="", help="CUDA's driver (default: libcuda.so.1 on GPUs)")
    parser.add_argument("--small", action="store_true", help="few numbers and a small model, on what is no card")
    given = parser.parse_args(arguments)
    of_driver = ARENA_LIBRARIES.get(given.device, "")
    ops = tuple((given.ops or ("fused,cuda" if of_driver else "fused")).split(","))
    driver = given.driver or of_driver
    return Options(given.device, given.only, ops, given.ways, given.models, driver, given.small)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
