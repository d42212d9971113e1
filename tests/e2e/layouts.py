"""The layouts that must not change a byte, and a comparison of any of them with one rank.

    python -m tests.e2e.layouts                            every layout of every model in every precision and condition
    python -m tests.e2e.layouts qwen3_moe int4 killed      those of this model, in this precision and condition
    python -m tests.e2e.layouts --held FILE --seconds 150  a part of it; again and again, until it says that all held

The suite has each of them in some pair (`test_many_ranks.py`). What does not hold is shown, the others are tried all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine.process.topology import role_of
from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.precisions import PRECISIONS
from tests.e2e.test_chaos import Deltas, kill_in_turn
from tests.e2e.test_golden import TOLERANCE, body_of, golden_cases
from tests.e2e.workload import Answer, answers, answers_together, mixed_bodies, stream_all

DENSE = ("llama", "qwen2", "qwen3", "ernie4_5")
MIXTURES = ("qwen3_moe", "ernie4_5_moe", "deepseek_v3")
OPTIONS = ("--max-model-len", "400", "--restart-limit", "100")
EP = "--enable-expert-parallel"
ALWAYS_MOVING = json.dumps(
    {"num_redundant_experts": 3, "window_size": 60, "step_interval": 5, "check_interval_s": 0.02, "min_gain": 0}
)
EPLB = (EP, "--enable-eplb", "--eplb-config", ALWAYS_MOVING)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp2": ("-tp", "2"),
    "dp2": ("-dp", "2"),
    "tp2-dp2": ("-tp", "2", "-dp", "2"),
    "tp2-ep": ("-tp", "2", EP),
    "dp2-ep": ("-dp", "2", EP),
    "tp2-dp2-ep": ("-tp", "2", "-dp", "2", EP),
    "dp2-ep-apart": ("-dp", "2", EP, "--no-ep-mixed-steps", "--ep-batched-token-timeout-ms", "0"),
    "dp2-ep-eplb": ("-dp", "2", *EPLB),
    "tp2-ep-eplb": ("-tp", "2", *EPLB),
    "tp2-dp2-ep-eplb": ("-tp", "2", "-dp", "2", *EPLB),
}
REFERENCE: dict[str, tuple[str, ...]] = {  # their bytes are not those of the native ops, their tokens are
    "tp2-reference": ("-tp", "2", "--ops", "reference"),
    "dp2-ep-reference": ("-dp", "2", EP, "--ops", "reference"),
}
CHUNKED = ("--max-num-batched-tokens", "32", "--max-num-seqs", "16")
# 65 blocks of 4 hold the longest of BODIES, not two of them
PREEMPTED = (*CHUNKED, "--block-size", "4", "--num-kv-blocks", "65", "--no-enable-prefix-caching")
BODIES = mixed_bodies(16, seed=20)
LONG_BODIES = mixed_bodies(32, seed=21, max_tokens=150)


def check(model: str, precision: str, layouts: Sequence[str], condition: str = "chunked") -> None:
    """Compare each answer alone and in whole chunks on one rank with all together, in some condition, on several ranks."""
    bodies, options, compare = CONDITIONS[condition]
    expected = _alone(model, precision, bodies is BODIES)
    for layout in layouts:
        chosen = (*OPTIONS, *PRECISIONS[precision], *options, "--threads", "1", *LAYOUTS[layout])
        with EngineProcess(GOLDEN / model, *chosen) as several:
            compare(several, expected, layout)


@functools.lru_cache(maxsize=2)
def _alone(model: str, precision: str, is_short: bool) -> list[Answer]:
    """Return the answers of one rank, in whole chunks."""
    with EngineProcess(GOLDEN / model, *OPTIONS, *PRECISIONS[precision], "--no-enable-prefix-caching") as one:
        return answers(one, BODIES, concurrency=1) if is_short else answers(one, LONG_BODIES, concurrency=4)


def _warm(engine: EngineProcess, expected: list[Answer], layout: str) -> None:
    """Compare in small chunks, then with a warm prefix cache."""
    assert answers_together(engine, BODIES) == expected, layout
    assert answers(engine, BODIES[::-1], concurrency=7)[::-1] == expected, layout


def _preempted(engine: EngineProcess, expected: list[Answer], layout: str) -> None:
    assert answers_together(engine, BODIES) == expected, layout
    assert engine.metric("num_preemptions_total") > 0, layout


def _killed(engine: EngineProcess, expected: list[Answer], layout: str) -> None:
    """Run 32 streams while each process behind the api dies in turn, and then all ranks at once."""
    names = [name for name in engine.actors() if role_of(name) not in ("supervisor", "api")]
    victims = [(name,) for name in names] + [tuple(name for name in names if role_of(name) == "worker")]

    async def disturbed() -> None:
        deltas = Deltas(seed=len(layout))
        killer = asyncio.create_task(kill_in_turn(engine, deltas, victims))
        while not killer.done():
            assert await stream_all(engine.url, LONG_BODIES, len(LONG_BODIES), deltas.note) == expected, layout
        await killer

    asyncio.run(disturbed())


Compare = Callable[[EngineProcess, list[Answer], str], None]
CONDITIONS: dict[str, tuple[list[dict[str, object]], tuple[str, ...], Compare]] = {
    "chunked": (BODIES, CHUNKED, _warm),
    "preempted": (BODIES, PREEMPTED, _preempted),
    "killed": (LONG_BODIES, CHUNKED, _killed),
}


def check_golden(model: str, layout: str) -> None:
    """Compare with a third party's outputs, in float32."""
    options = (*OPTIONS, *PRECISIONS["float32"], "--threads", "1", *(LAYOUTS | REFERENCE)[layout])
    cases = golden_cases(model)
    with EngineProcess(GOLDEN / model, *options) as engine:
        found = answers_together(engine, [body_of(case) for case in cases])
    for case, answer in zip(cases, found, strict=True):
        assert answer.token_ids == case["greedy_token_ids"], layout
        assert answer.token_logprobs == pytest.approx([best[0][1] for best in case["top_logprobs"]], abs=TOLERANCE), layout


def _chosen(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that were given; all where none was."""
    return [name for name in names if name in arguments] or list(names)


def pairs(chosen: Sequence[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield title and comparison."""
    models, layouts = _chosen(chosen, (*DENSE, *MIXTURES)), _chosen(chosen, (*LAYOUTS, *REFERENCE))
    conditions = _chosen(chosen, (*CONDITIONS, "golden"))
    for model in models:
        fitting = [layout for layout in layouts if model in MIXTURES or "ep" not in layout.split("-")]
        for layout in fitting if "golden" in conditions else ():
            yield f"{model} float32 {layout} golden", functools.partial(check_golden, model, layout)
        for precision in _chosen(chosen, tuple(PRECISIONS)):
            for condition in (name for name in conditions if name in CONDITIONS):
                for layout in (name for name in fitting if name in LAYOUTS):
                    title = f"{model} {precision} {layout} {condition}"
                    yield title, functools.partial(check, model, precision, (layout,), condition)


def main() -> int:
    names = (*DENSE, *MIXTURES, *PRECISIONS, *LAYOUTS, *REFERENCE, *CONDITIONS, "golden")
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.layouts", description=__doc__.partition("\n")[0])
    parser.add_argument("chosen", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; of a sort without a name: all")
    parser.add_argument("--held", type=Path, metavar="FILE", help="those that held, a title a line: they are not tried again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other one after that")
    options = parser.parse_args()
    if unknown := [name for name in options.chosen if name not in names]:
        parser.error(f"nothing is called {', '.join(unknown)}; choose from {', '.join(names)}")
    held = options.held.read_text().splitlines() if options.held is not None and options.held.exists() else []
    end, failed = time.monotonic() + options.seconds, []
    left = [(title, compare) for title, compare in pairs(options.chosen) if title not in held]
    while left and time.monotonic() < end:
        title, compare = left.pop(0)
        begin = time.monotonic()
        try:
            compare()
        except Exception:
            traceback.print_exc()
            failed.append(title)
            continue
        print(f"{title}: held ({time.monotonic() - begin:.0f} s)", flush=True)
        if options.held is not None:
            with options.held.open("a") as file:
                file.write(title + "\n")
    print(f"{len(left)} left, {len(failed)} did not hold{''.join(f'; {title}' for title in failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
