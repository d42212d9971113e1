"""Engines on a device over HTTP, and their requests: the simulated device by `test_engine.py`, a card by `tools/test --device`
(`tools/device/engines.py`).
"""

from __future__ import annotations

import asyncio

import httpx

from tests.e2e.engine_process import GOLDEN, OPERATOR, EngineProcess
from tests.e2e.workload import Answer, Body, mixed_bodies, stream_all
from tests.waiting import WATCHDOG_S

OPTIONS = ("--max-model-len", "300", "--threads", "1", "--restart-limit", "100")
DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2, "adaptive": false}')
LAYERS = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2, "adaptive": false}')
LAYERS_MODEL = GOLDEN / "deepseek_v3"  # has a layer that drafts
# Prompts of three blocks that grow to six, with thirteen blocks in all: some are preempted.
CUT = ("--max-num-batched-tokens", "48", "--max-num-seqs", "8", "--block-size", "8", "--num-kv-blocks", "13")
CAPTURED = ("--plan", "captured", "--cudagraph-capture-sizes", "24,12,6,3")  # of steps with those drafts
OF_PAIRS = ("-tp", "2", "--num-kv-blocks", "60")
CAPTURED_PAIRS = ("--plan", "captured", "--cudagraph-capture-sizes", "8,4,1")
BODIES = [
    body | {"prompt": [3 + (number * 211 + place * place * 17) % 990 for place in range(21)]}
    for number, body in enumerate(mixed_bodies(5, seed=5, max_tokens=24))
]
SHORT = [body | {"max_tokens": 9} for body in BODIES]
Expected = list[tuple[list[int], list[float]]]


def said(answers: list[Answer]) -> Expected:
    return [(answer.token_ids, answer.token_logprobs) for answer in answers]


def begun(expected: Expected) -> Expected:
    """Return the answers to `SHORT`, given those to `BODIES`."""
    return [(token_ids[:9], logprobs[:9]) for token_ids, logprobs in expected]


async def beside_a_kill(
    engine: EngineProcess, bodies: list[Body], concurrency: int, victim: str, restarted: tuple[str, ...]
) -> list[Answer]:
    """Return answers while `victim` dies and those of `restarted` begin their next life."""
    flowing = asyncio.Event()
    streams = asyncio.create_task(stream_all(engine.url, bodies, concurrency, flowing.set))
    await asyncio.wait_for(flowing.wait(), timeout=WATCHDOG_S)
    epoch = await asyncio.to_thread(engine.kill, victim)
    for name in restarted:
        await asyncio.to_thread(engine.wait_for_restart, name, epoch)
    return await streams


def order(engine: EngineProcess, path: str) -> None:
    answer = httpx.post(f"{engine.url}/admin/{path}", json={}, timeout=WATCHDOG_S, headers=OPERATOR)
    assert answer.status_code == 200, answer.text
