"""The layouts that must not change a byte, and a comparison of any of them with one rank.

    python -m tests.e2e.layouts                            every layout of every model in every precision and condition
    python -m tests.e2e.layouts qwen3_moe int4 killed      those of this model, in this precision and condition

The suite has each of them in some pair (`test_many_ranks.py`).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence

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
    """Alone and in whole chunks on one rank; together, in some condition, on several."""
    bodies, options, compare = CONDITIONS[condition]
    common = (*OPTIONS, *PRECISIONS[precision])
    with EngineProcess(GOLDEN / model, *common, "--no-enable-prefix-caching") as one:
        expected = answers(one, bodies, concurrency=1 if bodies is BODIES else 4)
    for layout in layouts:
        with EngineProcess(GOLDEN / model, *common, *options, "--threads", "1", *LAYOUTS[layout]) as several:
            compare(several, expected, layout)


def _warm(engine: EngineProcess, expected: list[Answer], layout: str) -> None:
    """In small chunks, then with a warm prefix cache."""
    assert answers_together(engine, BODIES) == expected, layout
    assert answers(engine, BODIES[::-1], concurrency=7)[::-1] == expected, layout


def _preempted(engine: EngineProcess, expected: list[Answer], layout: str) -> None:
    assert answers_together(engine, BODIES) == expected, layout
    assert engine.metric("num_preemptions_total") > 0, layout


def _killed(engine: EngineProcess, expected: list[Answer], layout: str) -> None:
    """32 streams, while each process behind the edge dies in turn, and then all ranks at once."""
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
    """What a third party computed, in float32."""
    options = (*OPTIONS, *PRECISIONS["float32"], "--threads", "1", *(LAYOUTS | REFERENCE)[layout])
    cases = golden_cases(model)
    with EngineProcess(GOLDEN / model, *options) as engine:
        found = answers_together(engine, [body_of(case) for case in cases])
    for case, answer in zip(cases, found, strict=True):
        assert answer.token_ids == case["greedy_token_ids"], layout
        assert answer.token_logprobs == pytest.approx([best[0][1] for best in case["top_logprobs"]], abs=TOLERANCE), layout


def _chosen(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of the names that were given; all, where none was."""
    return [name for name in names if name in arguments] or list(names)


def main(arguments: Sequence[str]) -> None:
    models, layouts = _chosen(arguments, (*DENSE, *MIXTURES)), _chosen(arguments, (*LAYOUTS, *REFERENCE))
    conditions = _chosen(arguments, (*CONDITIONS, "golden"))
    for model in models:
        fitting = [layout for layout in layouts if model in MIXTURES or "ep" not in layout.split("-")]
        if "golden" in conditions:
            for layout in fitting:
                _report(f"{model} float32 {layout} golden", "the third party's", check_golden, model, layout)
        for precision in _chosen(arguments, tuple(PRECISIONS)):
            for condition in (name for name in conditions if name in CONDITIONS):
                for layout in (name for name in fitting if name in LAYOUTS):
                    title = f"{model} {precision} {layout} {condition}"
                    _report(title, "the same bytes", check, model, precision, (layout,), condition)


def _report(title: str, result: str, function: Callable[..., None], *arguments: object) -> None:
    begin = time.monotonic()
    function(*arguments)
    print(f"{title}: {result} ({time.monotonic() - begin:.0f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
