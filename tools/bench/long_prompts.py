"""Delay of streams and short requests by a long prompt: `python -m tools.bench.long_prompts`.

One engine serves a small model with random weights. Interleaved rounds run the same streams and short requests, every second
time together with a prompt of 100,000 tokens. The prefix cache continues that prompt from round to round, so that its whole
length is covered. Prints a table: time to first token of short requests, pauses between tokens of streams, the ratios, the
computed tokens of the long prompt, and the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import orjson

from engine.observation.observer import Observer
from engine.process.run_directory import open_run
from tokamak.launched import COMMAND
from tools.bench.connection import Client
from tools.bench.processes import ServerProcess
from tools.bench.timeline import Timeline
from tools.target import Target

VOCABULARY = 8192
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "vocab_size": VOCABULARY,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
SHORT_LEN, STREAM_LEN = 64, 100_000
PERIOD_S = 0.25  # between two short requests


class Figures:
    """Milliseconds under one condition."""

    def __init__(self) -> None:
        self.first_ms: list[float] = []  # of short requests
        self.pauses_ms: list[float] = []  # of streams
        self.num_prompt_tokens = 0


class Bench:
    def __init__(self, client: Client, observer: Observer, options: argparse.Namespace) -> None:
        self._client, self._observer, self._options = client, observer, options
        self._rng = random.Random(0)
        self._long = self._tokens(options.prompt_len)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1, VOCABULARY) for _ in range(count)]

    async def _ask(self, prompt: list[int], max_tokens: int, timeline: Timeline) -> None:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        await self._client.send("POST", "/v1/completions", orjson.dumps(body), timeline.feed)

    async def round(self, figures: Figures, *, is_beside: bool) -> None:
        """Run streams and short requests for some seconds."""
        streams = [Timeline() for _ in range(self._options.streams)]
        tasks = [asyncio.create_task(self._ask(self._tokens(16), STREAM_LEN, each)) for each in streams]
        while not all(len(each.deliveries) > 20 for each in streams):
            await asyncio.sleep(0.01)
        if is_beside:
            tasks.append(asyncio.create_task(self._ask(self._long, 1, Timeline())))
            await asyncio.sleep(0.5)  # time to encode it
        begin, num_before = time.perf_counter(), self._num_computed()
        while time.perf_counter() < begin + self._options.seconds:
            short, sent = Timeline(), time.perf_counter()
            await self._ask(self._tokens(SHORT_LEN), 1, short)
            figures.first_ms.append((short.deliveries[0] - sent) * 1e3)
            await asyncio.sleep(PERIOD_S)
        end = time.perf_counter()
        figures.num_prompt_tokens += int(self._num_computed() - num_before)
        for each in streams:
            times = [when for when in each.deliveries if begin <= when < end]
            figures.pauses_ms += [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(times)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.5)

    def _num_computed(self) -> float:
        return sum(row.value for row in self._observer.snapshot().rows if row.name == "scheduled_tokens_total")


def at(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def show(alone: Figures, beside: Figures, seconds: float) -> None:
    print(f"{'ms':<28}{'alone':>10}{'beside':>10}{'ratio':>8}")
    rows = [
        ("TTFT of short, median", statistics.median(alone.first_ms), statistics.median(beside.first_ms)),
        ("TTFT of short, p90", at(alone.first_ms, 0.9), at(beside.first_ms, 0.9)),
        ("ITL of streams, median", statistics.median(alone.pauses_ms), statistics.median(beside.pauses_ms)),
        ("ITL of streams, p99", at(alone.pauses_ms, 0.99), at(beside.pauses_ms, 0.99)),
    ]
    for name, first, second in rows:
        print(f"{name:<28}{first:>10.2f}{second:>10.2f}{second / first:>8.2f}")
    rates = [figures.num_prompt_tokens / seconds for figures in (alone, beside)]
    print(f"tokens computed a second: {rates[0]:.0f} alone, {rates[1]:.0f} beside")


async def main_async(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="tokamak-bench-") as name, contextlib.ExitStack() as open_until_end:
        directory = Path(name)
        (model := directory / "model").mkdir()
        (model / "config.json").write_bytes(orjson.dumps(CONFIG))
        flags = f"--load-format dummy --no-weight-cache --max-model-len 131072 --num-kv-blocks 24000 {options.flags}"
        command = f"{shlex.join(COMMAND)} serve --model {model} --run-dir {directory / 'run'} --port {{port}} {flags}"
        server = ServerProcess("engine", command, directory / "log", timeout_s=300)
        open_until_end.callback(server.stop)
        client = Client(Target.parse(server.url), 600)
        open_until_end.callback(client.close)
        observer = open_until_end.enter_context(contextlib.closing(Observer(open_run(directory / "run"))))
        bench, alone, beside = Bench(client, observer, options), Figures(), Figures()
        for _ in range(options.rounds):
            await bench.round(alone, is_beside=False)
            await bench.round(beside, is_beside=True)
        show(alone, beside, options.rounds * options.seconds)
        processor = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        print(f"{os.cpu_count()} cores of {processor[1] if processor else 'an unknown processor'}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.long_prompts", description="Streams beside a long prompt.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a round")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--prompt-len", type=int, default=100_000)
    parser.add_argument("--flags", default="", help="of the engine")
    asyncio.run(main_async(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
