"""Checks of engines on a device over HTTP: the same bytes op by op, captured, on one and two ranks, after a worker's death and
after a reload; golden models; and the gain of captured steps.

Used by `whole.py` and `served.py`. Answers are compared with those of the same device, op by op on one rank, each request
alone, because devices round differently. Golden tokens come from transformers. The requests and options are those of the tests
(`tests/devices/engines.py`), in which prompts are cut into chunks and sequences preempted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import httpx
import msgspec

from tests.devices.engines import (
    BODIES,
    CAPTURED,
    CAPTURED_PAIRS,
    CUT,
    DRAFTS,
    OF_PAIRS,
    OPTIONS,
    Expected,
    beside_a_kill,
    order,
    said,
)
from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.test_golden import TOLERANCE, golden_cases, with_pictures
from tests.e2e.workload import Body, answers, answers_together, stream_one
from tools.device.findings import Finding, Findings, Outcome, least

MODEL = GOLDEN / "qwen3"
CAPTURED_BAR = 2.0  # ratio of steps per second, captured to op by op


class Target(msgspec.Struct, frozen=True):
    """A device, and its number of cards."""

    device: str
    num_cards: int

    def engine(self, model: Path, ops: str, *options: str) -> EngineProcess:
        return EngineProcess(model, "--device", self.device, "--ops", ops, *options)


class Way(msgspec.Struct, frozen=True):
    """Engine configuration that must give the same answers."""

    name: str
    options: tuple[str, ...]
    num_ranks: int = 1


EAGER = Way("op by op", ("--plan", "eager", *CUT))
WAYS = {
    "eager": EAGER,
    "captured": Way("captured", (*CAPTURED, *CUT, *DRAFTS)),
    "eager-pair": Way("op by op on 2 ranks", ("--plan", "eager", *OF_PAIRS), 2),
    "captured-pair": Way("captured on 2 ranks", (*CAPTURED_PAIRS, *OF_PAIRS), 2),
}


def same_bytes(target: Target, ops: str, ways: Iterable[Way], dtype: str = "float32", bodies: list[Body] = BODIES) -> Findings:
    """Compare the answers of each way with those op by op: together, while a worker is killed, and after sleep and a reload."""
    expected: Expected = []
    runnable = []
    title = f"--ops {ops}" if dtype == "float32" else f"--ops {ops} in {dtype}"
    for way in ways:
        cause = _what_is_missing(target, ops, way)
        if cause:
            yield Finding(f"{title}, {way.name}: the same bytes", Outcome.NOT_RUN, cause)
        else:
            runnable.append(way)
    for way in sorted(runnable, key=lambda way: way is not EAGER):
        with target.engine(MODEL, ops, "--dtype", dtype, *OPTIONS, *way.options) as engine:
            expected = expected or said(answers(engine, bodies, concurrency=1))
            yield from _same_bytes(engine, f"{title}, {way.name}", bodies, expected, way.num_ranks)


def _what_is_missing(target: Target, ops: str, way: Way) -> str:
    if way.num_ranks > target.num_cards:
        return f"it needs {way.num_ranks} cards, and this machine has {target.num_cards}"
    return ""


def _same_bytes(engine: EngineProcess, name: str, bodies: list[Body], expected: Expected, num_ranks: int) -> Findings:
    yield compared(f"{name}: the same bytes together and in chunks", expected, said(answers_together(engine, bodies)))
    if "captured" in name:
        replayed = engine.metric("captured_step_rows_count")
        failed = engine.metric("uncaptured_step_sizes")
        is_whole = replayed > 0 and not failed
        yield Finding.of(
            f"{name}: steps are replayed", is_whole, f"{replayed:.0f} steps, {failed:.0f} sizes could not be captured"
        )
    ranks = tuple(f"worker{rank}" for rank in range(num_ranks))
    disturbed = asyncio.run(beside_a_kill(engine, bodies, len(bodies), ranks[-1], restarted=ranks))
    yield compared(f"{name}: the same bytes though {ranks[-1]} was killed", expected, said(disturbed))
    for path in ("sleep", "wake", "reload"):
        order(engine, path)
    yield compared(f"{name}: the same bytes after sleep, wake and reload", expected, said(answers(engine, bodies)))


def compared(what: str, expected: Expected, found: Expected) -> Finding:
    different = [number for number, (own, other) in enumerate(zip(expected, found, strict=True)) if own != other]
    if not different:
        return Finding.of(what, True, f"{len(found)} answers")
    (tokens, _), (others, _) = expected[different[0]], found[different[0]]
    at = next((place for place, pair in enumerate(zip(tokens, others, strict=False)) if pair[0] != pair[1]), None)
    where = "of other log-probabilities" if at is None and len(tokens) == len(others) else f"other from token {at} on"
    return Finding.of(what, False, f"{len(different)} of {len(found)} answers differ, the first is {where}")


def golden(target: Target, ops: str, models: Iterable[str], dtype: str = "float32", tolerance: float = TOLERANCE) -> Findings:
    """Compare greedy tokens and their log-probabilities with those of transformers in float32; models that see get pictures. In
    bfloat16, where another of two nearly equal tokens may be the best, an answer is compared up to its first other token."""
    for model in models:
        what = f"--ops {ops}: golden {model}" if dtype == "float32" else f"--ops {ops}: golden {model} in {dtype}"
        options = ("--dtype", dtype, "--plan", "eager", "--max-model-len", "400", "--num-kv-blocks", "600")
        with target.engine(GOLDEN / model, ops, *options) as engine:
            cases = golden_cases(model)
            found = answers_together(engine, [with_pictures(model, case) for case in cases])
        num_other, furthest = 0, 0.0
        for answer, case in zip(found, cases, strict=True):
            expected, count = case["greedy_token_ids"], len(answer.token_ids)
            same = next((place for place in range(count) if answer.token_ids[place] != expected[place]), count)
            num_other += answer.token_ids != expected
            num_compared = count if dtype == "float32" else same + 1
            pairs = zip(answer.token_logprobs[:num_compared], case["top_logprobs"], strict=False)
            furthest = max([furthest, *(abs(own - best[0][1]) for own, best in pairs)])
        text = f"{num_other} of {len(cases)} answers have other tokens, log-probabilities are off by {furthest:.2g} at most"
        is_held = furthest <= tolerance and (num_other == 0 or dtype != "float32")
        yield Finding.of(what, is_held, text, furthest=furthest, other_answers=float(num_other))


def captured_speed(target: Target, ops: str, model: Path, num_tokens: int, num_rounds: int) -> Findings:
    """Measure decode steps per second of one stream, captured and op by op in turns."""
    common = ("--max-model-len", str(num_tokens + 64), "--max-num-seqs", "4", "--num-kv-blocks", str(num_tokens // 16 + 16))
    captured = ("--plan", "captured", "--cudagraph-capture-sizes", "1")
    with (
        target.engine(model, ops, *common, "--plan", "eager") as eager,
        target.engine(model, ops, *common, *captured) as replaying,
    ):
        rates: dict[str, list[float]] = {eager.url: [], replaying.url: []}
        for number in range(1 + num_rounds):  # the first is not counted
            for url, found in rates.items():
                rate = asyncio.run(_steps_a_second(url, num_tokens))
                found += [rate] if number else []
    op_by_op, replayed = (median(found) for found in rates.values())
    beside = least(f"--ops {ops}: captured beside op by op at batch 1", replayed / op_by_op, CAPTURED_BAR)
    text = f"{beside.text}, {replayed:.1f} and {op_by_op:.1f} tokens a second, medians of {num_rounds} turns"
    yield msgspec.structs.replace(beside, text=text)


async def _steps_a_second(url: str, num_tokens: int) -> float:
    """Return tokens per second after the first."""
    arrivals: list[float] = []
    body = {
        "prompt": [5, 9, 3, 30, 22],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    async with httpx.AsyncClient(base_url=url, timeout=240) as client:
        answer = await stream_one(client, body, lambda: arrivals.append(time.monotonic()))
    assert answer.error is None, answer.error
    assert len(answer.token_ids) == num_tokens > 1, f"{len(answer.token_ids)} tokens of {num_tokens}"
    return (num_tokens - 1) / (arrivals[-1] - arrivals[0])
