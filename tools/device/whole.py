"""`tools/test --device xpu|NAME`, and `gpu` with `--ops fused`: all checks of Paddle's ops that need a card, in one command. It
names each miss, and each check that this machine cannot run. CUDA ops have `evidence.py`.

    arena     a cache that outlives its worker, on GPUs
    bytes     the same answers op by op, captured, on 1 and on 2 ranks, after kills, sleep and reload
    golden    models with transformers' tokens, over HTTP
    captured  steps per second, captured relative to op by op

`tests/tools/test_device_whole.py` runs it on the simulated device, where the times mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import httpx
import msgspec

from engine.errors import OptionError, StartError
from engine.options.resolve_device import ARENA_LIBRARIES, InstalledPaddle, installed_paddle, resolve_device
from engine.supervisor.device_arenas import device_arenas
from tests.devices.engines import BODIES, SHORT
from tests.devices.persistent_arena_worker import NUM_BYTES, run_worker
from tests.e2e.engine_process import GOLDEN
from tests.workers.serving import ARCHITECTURES
from tools.bench import dense_shape, shape
from tools.device import engines
from tools.device.findings import Finding, Findings, Outcome, summary

_ERRORS = (AssertionError, OSError, RuntimeError, ValueError, StartError, httpx.HTTPError)


class Options(msgspec.Struct, frozen=True):
    device: str
    only: tuple[str, ...]
    ops: tuple[str, ...]
    ways: tuple[str, ...]
    models: tuple[str, ...]
    driver: str  # "": the device's memory does not outlive its process
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
        resolve_device(options.device, options.ops[0], 1, ask)
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


def _arena(target: engines.Target, options: Options) -> Findings:
    if not options.driver:
        yield Finding("arena", Outcome.NOT_RUN, f"the cache of {target.device} ends with its worker, and is computed again")
        return
    device = target.device if target.device in ARENA_LIBRARIES else "cpu"  # with a stub of the driver
    notes: list[str] = []
    with device_arenas(options.driver, 1, NUM_BYTES, notes.append) as (arena,):
        if notes:
            yield Finding("arena", Outcome.NOT_RUN, notes[0])
            return
        whole = run_worker(options.driver, arena, device, has_blocks=False)
        again = run_worker(options.driver, arena, device, has_blocks=True)
    is_same = (again["outputs"], again["logprobs"]) == (whole["outputs"], whole["logprobs"])
    text = f"{again['num_computed']} positions of a killed worker were there"
    yield Finding.of("arena: what a killed worker computed is found again", is_same and again["num_computed"] > 0, text)


def _bytes(target: engines.Target, options: Options) -> Findings:
    bodies = SHORT if options.is_small else BODIES
    for ops in options.ops:
        yield from engines.same_bytes(target, ops, [engines.WAYS[way] for way in options.ways], bodies=bodies)


def _golden(target: engines.Target, options: Options) -> Findings:
    for ops in options.ops:
        yield from engines.golden(target, ops, options.models)


def _captured(target: engines.Target, options: Options) -> Findings:
    with tempfile.TemporaryDirectory() as directory:
        model, num_tokens, num_rounds = GOLDEN / "qwen3", 24, 1
        if not options.is_small:
            model, num_tokens, num_rounds = Path(directory) / "model", 256, 5
            shape.write(model, dense_shape.CONFIG, dense_shape.CHAT_TEMPLATE, seed=0)
        for ops in options.ops:
            yield from engines.captured_speed(target, ops, model, num_tokens, num_rounds)


PARTS: dict[str, Part] = {
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
    parser.add_argument("--ops", default="fused", help="op tables of Paddle (default: %(default)s)")
    parser.add_argument("--driver", default="", help="CUDA's driver (default: libcuda.so.1 on GPUs)")
    parser.add_argument("--small", action="store_true", help="few numbers and a small model, on what is no card")
    given = parser.parse_args(arguments)
    driver = given.driver or ARENA_LIBRARIES.get(given.device, "")
    return Options(given.device, given.only, tuple(given.ops.split(",")), given.ways, given.models, driver, given.small)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
