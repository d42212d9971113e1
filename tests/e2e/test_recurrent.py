"""Models with recurrent layers: the same bytes whatever is kept, evicted, drafted, preempted or killed."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.test_chaos import Deltas, kill_in_turn, kill_while_it_reloads
from tests.e2e.workload import Answer, answers, mixed_bodies, stream_all
from tests.waiting import WATCHDOG_S
from tests.workers.checkpoints import write_checkpoint
from tests.workers.test_variants import VARIANTS

NAMES = ("qwen3_5", "lfm2")
OPTIONS = ("--max-model-len", "300", "--threads", "1", "--restart-limit", "100", "--dtype", "float32")
DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}')
SMALL = ("--max-num-batched-tokens", "24", "--max-num-seqs", "8", "--block-size", "4", "--num-kv-blocks", "200")
KEPT = ("--state-cache-interval", "16", "--state-cache-memory", "1MiB")
BODIES = mixed_bodies(12, seed=31, max_tokens=60)
ONE = pytest.mark.parametrize("model", NAMES[:1], indirect=True)  # where the kind of the states makes no difference
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few layers with random weights, and the tokenizer of another one."""
    path: Path = tmp_path_factory.mktemp("models") / request.param
    shutil.copytree(GOLDEN / "qwen3", path, ignore=shutil.ignore_patterns("*.safetensors", "golden.json"))
    golden: dict[str, Any] = json.loads((path / "config.json").read_text())
    same = {name: golden[name] for name in ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings")}
    write_checkpoint(path, VARIANTS[request.param]["config"] | same)
    return path


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[Answer]:
    """The answers without kept states and drafts."""
    with EngineProcess(model, *OPTIONS, "--no-enable-prefix-caching") as engine:
        found = answers(engine, BODIES)
        assert engine.metric("num_cached_states") == 0
    return found


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EngineProcess]:
    with EngineProcess(model, *OPTIONS, *SMALL, *KEPT, *DRAFTS) as engine:
        yield engine


async def beside_kills(engine: EngineProcess, expected: list[Answer], seed: int, *victims: tuple[str, ...]) -> None:
    deltas = Deltas(seed)
    killer = asyncio.create_task(kill_in_turn(engine, deltas, victims))
    while not killer.done():
        assert await stream_all(engine.url, BODIES, len(BODIES), deltas.note) == expected
    await killer


def test_recurrent_model_keeps_its_bytes(engine: EngineProcess, undisturbed: list[Answer], model: Path) -> None:
    """In chunks, from kept states, with drafts, evicted states, and kills of one and of two actors. Only a worker knows the
    states' kind: with the second kind, fewer of the others die."""
    victims = [("worker0",), ("scheduler",), ("cache",), ("tokenizer0",), ("scheduler", "worker0"), ("cache", "worker0")]
    if model.name != NAMES[0]:
        victims = victims[::4]
    asyncio.run(beside_kills(engine, undisturbed, 3, *victims))
    assert answers(engine, BODIES[::-1])[::-1] == undisturbed
    engine.wait_until_idle()
    assert engine.metric("state_cache_hits_total") > 0
    assert engine.metric("num_used_states") == 0
    assert engine.metric("num_free_kv_blocks") == engine.metric("num_kv_blocks")


@ONE
def test_reloads_keep_the_bytes(engine: EngineProcess, undisturbed: list[Answer]) -> None:
    """The same weights again, while actors are killed: states of the former life of the weights are not found."""

    async def disturbed() -> None:
        deltas = Deltas(seed=6)
        reloads = asyncio.create_task(kill_while_it_reloads(engine, deltas))
        while not reloads.done():
            found = await stream_all(engine.url, BODIES, len(BODIES), deltas.note)
            assert [answer.token_ids for answer in found] == [answer.token_ids for answer in undisturbed]
        await reloads

    asyncio.run(disturbed())
    engine.wait_until_idle()
    assert engine.metric("num_used_states") == 0


@ONE
def test_a_thousand_cut_requests_hold_no_slot(engine: EngineProcess) -> None:
    bodies = mixed_bodies(1000, seed=5, max_tokens=20, max_prompt=60)
    rng = random.Random(2)

    async def cut_some(url: str) -> int:
        gate, num_cut = asyncio.Semaphore(24), 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=url, timeout=WATCHDOG_S, limits=limits) as client:

            async def one(body: dict[str, Any], num_lines: int) -> None:
                nonlocal num_cut
                async with gate, client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                    async for _ in response.aiter_lines():
                        num_lines -= 1
                        if not num_lines:
                            num_cut += 1
                            return

            await asyncio.gather(*(one(body, rng.randrange(1, 60)) for body in bodies))
        return num_cut

    assert asyncio.run(cut_some(engine.url)) > 300
    engine.wait_until_idle()
    assert engine.metric("num_used_states") == 0
    assert engine.metric("num_free_kv_blocks") == engine.metric("num_kv_blocks")
    assert engine.metric("num_cached_states") > 0


def test_two_ranks_share_the_states(model: Path, undisturbed: list[Answer]) -> None:
    """Each has its own heads in the same slots. A rank's death alone costs no byte of either kind."""
    with EngineProcess(model, *OPTIONS, *SMALL, *KEPT, "-tp", "2") as engine:
        assert answers(engine, BODIES) == undisturbed
        victims = [("worker1",), ("worker0",), ("scheduler", "worker1")]
        asyncio.run(beside_kills(engine, undisturbed, 4, *(victims if model.name == NAMES[0] else victims[:1])))
        engine.wait_until_idle()
        assert engine.metric("state_cache_hits_total") > 0
        assert engine.metric("num_used_states") == 0


@ONE
def test_replicas_have_states_of_their_own(model: Path, undisturbed: list[Answer]) -> None:
    """One dies while the other serves."""
    with EngineProcess(model, *OPTIONS, *SMALL, *KEPT, "-dp", "2") as engine:
        asyncio.run(beside_kills(engine, undisturbed, 5, ("worker1",), ("scheduler0",), ("cache1", "worker0")))
        engine.wait_until_idle()
        assert [engine.metric("num_used_states", actor=f"scheduler{replica}") for replica in range(2)] == [0, 0]
        assert engine.metric("requests_routed_total", reason="prefix") > 0
