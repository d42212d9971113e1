"""Two replicas, with prompts routed by cached prefix or round-robin: `python -m tools.bench.replicas`.

Two engines with `--data-parallel-size 2`, one with `--data-parallel-routing prefix`, one with `round-robin`, get the same
prompts in interleaved rounds, each with empty prefix caches:

    prefixes     24 beginnings of 768 tokens, 8 prompts each, in random order; an arena holds 60 % of the beginnings
    one prefix   one beginning for as many prompts

A table of medians is printed: prompt tokens found in the caches, tokens (prompt and answer) per second, busy time of the ranks,
and the largest share of prompts of a replica. The model is small, with random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from engine.messages import ResetPrefixCache
from engine.observation.observer import Observer
from engine.process.control_client import ControlClient
from engine.process.run_directory import open_run
from tokamak.launched import COMMAND
from tools.bench.connection import Client
from tools.bench.processes import ServerProcess
from tools.bench.serve import Load
from tools.target import Target

POLICIES = ("prefix", "round-robin")
NUM_PREFIXES, PROMPTS_PER_PREFIX = 24, 8
WORKLOADS = {"prefixes": NUM_PREFIXES, "one prefix": 1}  # numbers of beginnings
PREFIX_LEN, OWN_LEN, OUTPUT_LEN = 768, 32, 16
BLOCK_SIZE = 16
HELD_SHARE = 0.6  # share of the prefixes that fit in an arena
VOCABULARY = 8192
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "vocab_size": VOCABULARY,
    "eos_token_id": 0,
    "bos_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class Round:
    """One engine's answers to the prompts."""

    hit_rate: float
    tokens_per_s: float
    rank_busy_s: float
    largest_share: float


class Engine:
    """One of the two engines."""

    def __init__(self, policy: str, model: Path, directory: Path, concurrency: int) -> None:
        run_directory = directory / policy
        num_blocks = int(HELD_SHARE * NUM_PREFIXES * PREFIX_LEN / BLOCK_SIZE)
        options = f"--data-parallel-size 2 --data-parallel-routing {policy} --load-format dummy --no-weight-cache --threads 1"
        options += f" --block-size {BLOCK_SIZE} --num-kv-blocks {num_blocks} --max-num-seqs {concurrency} --max-model-len 1024"
        command = f"{shlex.join(COMMAND)} serve --model {model} --run-dir {run_directory} --port {{port}} {options}"
        self._server = ServerProcess(policy, command, directory / f"{policy}.log", timeout_s=300)
        self._run = open_run(run_directory)
        self._client = Client(Target.parse(self._server.url), 600)

    async def round(self, requests: Sequence[bytes], concurrency: int) -> Round:
        ControlClient(self._run).ask(ResetPrefixCache())
        before = self._counters()
        load = Load(self._client, "/v1/completions", requests, lambda: None)
        await load.in_waves(concurrency)
        failed = [timeline for timeline in load.timelines if timeline.error]
        assert not failed, f"{failed[0].error}: {failed[0].detail}"
        after = self._counters()
        grown = {key: after[key] - before[key] for key in after}
        queries = [grown["prefix_cache_queries_total", f"scheduler{replica}"] for replica in range(2)]
        hits = sum(grown["prefix_cache_hits_total", f"scheduler{replica}"] for replica in range(2))
        return Round(
            hit_rate=hits / sum(queries),
            tokens_per_s=len(requests) * (PREFIX_LEN + OWN_LEN + OUTPUT_LEN) / load.wall_s,
            rank_busy_s=sum(grown["worker_busy_seconds_total", f"worker{rank}"] for rank in range(2)),
            largest_share=max(queries) / sum(queries),
        )

    def close(self) -> None:
        self._client.close()
        self._server.stop()

    def _counters(self) -> dict[tuple[str, str], float]:
        with contextlib.closing(Observer(self._run)) as observer:
            return {(row.name, str(row.labels["actor"])): row.value for row in observer.snapshot().rows}


def make_requests(num_prefixes: int, num_prompts: int, seed: int) -> list[bytes]:
    """Return `num_prompts` prompts with `num_prefixes` different prefixes, in random order."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, VOCABULARY) for _ in range(count)]

    prefixes = [tokens(PREFIX_LEN) for _ in range(num_prefixes)]
    prompts = [prefixes[number % num_prefixes] + tokens(OWN_LEN) for number in range(num_prompts)]
    rng.shuffle(prompts)
    rest = {"max_tokens": OUTPUT_LEN, "ignore_eos": True, "temperature": 0, "stream": True}
    return [orjson.dumps({"prompt": prompt, **rest, "stream_options": {"include_usage": True}}) for prompt in prompts]


async def compare(engines: dict[str, Engine], num_prefixes: int, options: argparse.Namespace) -> dict[str, list[Round]]:
    """Run interleaved rounds; each begins with the other engine."""
    rounds: dict[str, list[Round]] = {policy: [] for policy in engines}
    for number in range(options.rounds):
        requests = make_requests(num_prefixes, NUM_PREFIXES * PROMPTS_PER_PREFIX, seed=number)
        for policy in sorted(engines, reverse=number % 2 == 1):
            rounds[policy].append(await engines[policy].round(requests, options.concurrency))
    return rounds


def show(title: str, rounds: dict[str, list[Round]]) -> None:
    print(f"\n{title:<14}{'cached':>10}{'tokens/s':>10}{'rank busy s':>13}{'largest share':>15}")
    medians = {}
    for policy, all_rounds in rounds.items():
        rows = [(each.hit_rate, each.tokens_per_s, each.rank_busy_s, each.largest_share) for each in all_rounds]
        columns = list(zip(*rows, strict=True))
        medians[policy] = hits, rate, busy, share = tuple(statistics.median(column) for column in columns)
        print(f"{policy:<14}{hits:>10.1%}{rate:>10.0f}{busy:>13.2f}{share:>15.1%}")
    ours, theirs = (medians[policy] for policy in POLICIES)
    print(f"{'ratio':<14}{ours[0] / theirs[0]:>10.2f}{ours[1] / theirs[1]:>10.2f}{ours[2] / theirs[2]:>13.2f}")


async def main_async(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="tokamak-bench-") as name, contextlib.ExitStack() as open_until_end:
        directory = Path(name)
        (model := directory / "model").mkdir()
        (model / "config.json").write_bytes(orjson.dumps(CONFIG))
        engines = {}
        for policy in POLICIES:
            engines[policy] = Engine(policy, model, directory, options.concurrency)
            open_until_end.callback(engines[policy].close)
        for workload in options.workload or WORKLOADS:
            show(workload, await compare(engines, WORKLOADS[workload], options))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.replicas", description="Routing by prefix beside round robin.")
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=16)
    asyncio.run(main_async(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
