"""Promise 3: an answer depends on the request alone. Greedy and seeded answers are compared byte by byte over conditions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.workload import Answer, Body, answers, mixed_bodies

MODEL = GOLDEN / "qwen3"
BODIES: list[Body] = mixed_bodies(32, seed=20)


@pytest.fixture(scope="module")
def alone() -> Iterator[list[Answer]]:
    """The reference: every request alone in the engine, without a prefix cache."""
    with EngineProcess(MODEL, "--max-model-len", "400", "--no-enable-prefix-caching") as engine:
        yield answers(engine, BODIES, concurrency=1)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--max-num-batched-tokens", "16", "--max-num-seqs", "16"),
        ("--num-kv-blocks", "60", "--block-size", "8"),
        ("--threads", "2", "--block-size", "32", "--max-num-batched-tokens", "2048"),
        ("--tokenizer-processes", "2", "--api-processes", "2"),
    ],
    ids=["together", "chunked", "preempted", "two-threads", "pools"],
)
def test_same_bytes(alone: list[Answer], options: tuple[str, ...]) -> None:
    """Together, and a second time with a warm prefix cache."""
    with EngineProcess(MODEL, "--max-model-len", "400", *options) as engine:
        assert answers(engine, BODIES, concurrency=32) == alone
        assert answers(engine, BODIES[::-1], concurrency=7)[::-1] == alone
        if "--num-kv-blocks" in options:
            assert engine.metric("num_preemptions_total") > 0
        else:
            assert engine.metric("prefix_cache_hits_total") > 0


def test_sampling_is_spread(alone: list[Answer]) -> None:
    """The comparison would mean little if all requests answered the same."""
    assert len({tuple(answer.token_ids) for answer in alone}) > 20
    assert all(answer.num_completion_tokens == 32 for answer in alone)
