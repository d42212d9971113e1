"""Streams of a benchmark, one answer after another, and the arrival times of their tokens."""

from __future__ import annotations

import asyncio
import contextlib
import random

import orjson

from tools.bench.connection import Client
from tools.bench.prompts import WORDS
from tools.bench.timeline import Timeline

_AGAIN_S = 0.005
_PROMPT_WORDS = 16


class Stream:
    """Stream. `times`: `perf_counter` seconds; `num_failed`: failed requests, which are followed by others. `replica`: the
    requested one; None: any. `vocabulary`: prompts are token ids below it, not words; for a model without a tokenizer."""

    def __init__(self, client: Client, output_len: int, replica: int | None = None, vocabulary: int = 0) -> None:
        self._client = client
        self._vocabulary = vocabulary
        self._output_len = output_len
        self.replica = replica
        self._head = "" if replica is None else f"x-data-parallel-rank: {replica}\r\n"
        self.times: list[float] = []
        self.num_failed = 0

    async def run(self, rng: random.Random) -> None:
        while True:
            words = " ".join(rng.choices(WORDS, k=_PROMPT_WORDS))
            prompt = rng.choices(range(1, self._vocabulary), k=_PROMPT_WORDS) if self._vocabulary else words
            body = {"prompt": prompt, "max_tokens": self._output_len, "ignore_eos": True, "stream": True}
            timeline = Timeline()

            def feed(data: bytes, timeline: Timeline = timeline) -> None:
                num_before = len(timeline.deliveries)
                timeline.feed(data)
                self.times += timeline.deliveries[num_before:]

            status = 0
            with contextlib.suppress(OSError):
                status = await self._client.send("POST", "/v1/completions", orjson.dumps(body), feed, self._head)
            if status != 200 or not timeline.is_complete:
                self.num_failed += 1
                await asyncio.sleep(_AGAIN_S)

    def pauses(self, begin: float, end: float = float("inf")) -> list[float]:
        """Return the seconds between two tokens that overlap [begin, end]."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [later - earlier for earlier, later in pairs if later >= begin and earlier < end]
