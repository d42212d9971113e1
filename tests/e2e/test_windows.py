"""A model with sliding windows: the same bytes while blocks behind windows are freed and processes are killed."""

from __future__ import annotations

import asyncio

from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.test_chaos import Deltas, kill_in_turn
from tests.e2e.workload import answers, mixed_bodies, stream_all

MODEL = GOLDEN / "gemma3_text"  # windows of 40
DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}')
SMALL = ("--max-num-batched-tokens", "24", "--max-num-seqs", "8", "--block-size", "4", "--num-kv-blocks", "200")


def test_windowed_model_keeps_its_bytes() -> None:
    """In chunks shorter than a window, with drafts, cached prefixes and kills."""
    options = ("--max-model-len", "300", "--threads", "1", "--restart-limit", "100")
    bodies = mixed_bodies(12, seed=31, max_tokens=100)
    with EngineProcess(MODEL, *options, "--no-enable-prefix-caching") as engine:
        undisturbed = answers(engine, bodies)
    with EngineProcess(MODEL, *options, *SMALL, *DRAFTS) as engine:

        async def disturbed() -> None:
            deltas = Deltas(seed=3)
            killer = asyncio.create_task(kill_in_turn(engine, deltas, [("worker0",), ("scheduler",), ("scheduler", "worker0")]))
            while not killer.done():
                assert await stream_all(engine.url, bodies, len(bodies), deltas.note) == undisturbed
            await killer

        asyncio.run(disturbed())
        assert answers(engine, bodies[::-1])[::-1] == undisturbed
        engine.wait_until_idle()
        assert engine.metric("prefix_cache_hits_total") > 0
        assert engine.metric("num_free_kv_blocks") == engine.metric("num_kv_blocks")
