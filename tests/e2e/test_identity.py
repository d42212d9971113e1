"""An answer depends only on the request. Greedy and seeded answers are compared byte by byte across conditions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

import pytest

from tests.e2e import protocols
from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.kinds import Call, Json, ask_all
from tests.e2e.precisions import PRECISIONS
from tests.e2e.test_chaos import Deltas, kill_in_turn
from tests.e2e.workload import Answer, Body, answers, answers_together, mixed_bodies, stream_all

MODEL = GOLDEN / "qwen3"
BODIES: list[Body] = mixed_bodies(15, seed=20)
CALLS = [Call(path, body) for path, body in protocols.conversations(max_tokens=32)]


@pytest.fixture(scope="module", params=PRECISIONS)
def precision(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


REPLICATED = ("bfloat16",)  # the other precisions are preempted


@functools.cache
def alone_in(precision: str) -> tuple[list[Answer], list[Json]]:
    """Return the reference: every request alone in the engine, without a prefix cache; and those of other APIs."""
    options = ("--max-model-len", "400", "--no-enable-prefix-caching", *protocols.OPTIONS, *PRECISIONS[precision])
    with EngineProcess(MODEL, *options) as engine:
        return answers(engine, BODIES, concurrency=1), [conversations(engine, [call])[0] for call in CALLS]


def conversations(engine: EngineProcess, calls: list[Call]) -> list[Json]:
    """Return answers without the number of cached prompt tokens, which may differ."""
    return [protocols.without_usage(answer) for answer in asyncio.run(ask_all(engine.url, calls))]


DRAFTS = (
    "--speculative-config",
    '{"method": "ngram,suffix", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "adaptive": false}',
)


@pytest.fixture(scope="module")
def alone(precision: str) -> tuple[list[Answer], list[Json]]:
    return alone_in(precision)


async def beside_kills(engine: EngineProcess, expected: list[Answer], victims: Sequence[str]) -> None:
    deltas = Deltas(seed=77)
    killer = asyncio.create_task(kill_in_turn(engine, deltas, [(victim,) for victim in victims]))
    while not killer.done():
        assert await stream_all(engine.url, BODIES, 32, deltas.note) == expected
    await killer


def assert_same_bytes(alone: tuple[list[Answer], list[Json]], *options: str, victims: Sequence[str] = ()) -> None:
    """Compare all together, again with a warm prefix cache, and while `victims` are killed in turn."""
    with EngineProcess(MODEL, "--max-model-len", "400", *protocols.OPTIONS, *options) as engine:
        assert (answers_together(engine, BODIES), conversations(engine, CALLS)) == alone
        assert (answers(engine, BODIES[::-1], concurrency=7)[::-1], conversations(engine, CALLS)) == alone
        assert (engine.metric("spec_decode_num_accepted_tokens_total") > 0) == ("--speculative-config" in options)
        if "--num-kv-blocks" in options:
            assert engine.metric("num_preemptions_total") > 0
        else:
            assert engine.metric("prefix_cache_hits_total") > 0
        asyncio.run(beside_kills(engine, alone[0], victims))
        assert engine.metric("actor_restarts_total") == len(victims)


def test_same_bytes_in_every_precision(alone: tuple[list[Answer], list[Json]], precision: str) -> None:
    """In chunks, preempted, with two threads and drafts; or op by op in two replicas. A precision changes only what holds keys,
    values and weights, so beside these others die in one precision (`test_chaos.py`)."""
    chunked = ("--max-num-batched-tokens", "16", "--max-num-seqs", "16")
    crowded = ("--num-kv-blocks", "60", "--block-size", "8", "--threads", "2", *DRAFTS)
    is_replicated = precision in REPLICATED
    options = (*chunked, "--plan", "eager", "--data-parallel-size", "2") if is_replicated else (*chunked, *crowded)
    victims = ("scheduler1" if is_replicated else "scheduler", "worker0")
    assert_same_bytes(alone, *PRECISIONS[precision], *options, victims=victims)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--threads", "2", "--block-size", "32", "--max-num-batched-tokens", "2048"),
        ("--tokenizer-processes", "2", "--api-processes", "2", "--data-parallel-size", "2", "--plan", "eager"),
    ],
    ids=["together", "wide", "pools-and-replicas-eager"],
)
@pytest.mark.parametrize("precision", ["float32"], indirect=True)
def test_same_bytes(alone: tuple[list[Answer], list[Json]], precision: str, options: tuple[str, ...]) -> None:
    assert_same_bytes(alone, *PRECISIONS[precision], *options)


def test_precisions_differ() -> None:
    """Otherwise an option would have no effect."""
    assert len({tuple(alone_in(precision)[0][0].token_logprobs) for precision in PRECISIONS}) == len(PRECISIONS)


def test_sampling_is_spread(alone: tuple[list[Answer], list[Json]]) -> None:
    """The comparison would mean little if all requests got the same answer."""
    completions, _ = alone
    assert len({tuple(answer.token_ids) for answer in completions}) > 12
    assert all(answer.num_completion_tokens == 32 for answer in completions)
