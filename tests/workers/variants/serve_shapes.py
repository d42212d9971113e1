"""Serves the checkpoints that random_shapes.py made over HTTP, each in several ways, and compares the answers with those of
transformers:

python -m tests.workers.variants.serve_shapes OUT [--family NAME ...] [--way NAME ...] [--count N]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.workers.variants.check_shapes import TOLERANCE, checkpoints

WAYS = {
    "plain": (),
    "chunks": ("--max-num-batched-tokens", "16", "--max-num-seqs", "8"),
    "ranks": ("--tensor-parallel-size", "2", "--threads", "1"),
    "drafts": ("--speculative-config", '{"method": "ngram,suffix", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'),
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def problem(place: Path, way: str) -> str:
    """Return what differs, or nothing. The second answer comes from the cache."""
    expected = json.loads((place / "expected.json").read_text())
    for name in TOKENIZER:
        shutil.copyfile(GOLDEN / "llama" / name, place / name)
    options = ("--dtype", "float32", "--kv-cache-memory", "16MiB", "--no-weight-cache", *WAYS[way])
    body = {
        "prompt": expected["prompt_token_ids"],
        "max_tokens": len(expected["greedy_token_ids"]),
        **{"temperature": 0, "ignore_eos": True, "logprobs": 3, "return_token_ids": True},
    }
    try:
        with EngineProcess(place, *options) as engine:
            answers = [httpx.post(f"{engine.url}/v1/completions", json=body, timeout=120) for _ in range(2)]
    except AssertionError as error:
        return str(error).strip().rpartition("\n")[2]
    for answer in answers:
        if answer.status_code != 200:
            return f"status {answer.status_code}: {answer.text}"
        if found := _difference(answer.json()["choices"][0], expected):
            return found
    return "" if answers[0].json()["choices"] == answers[1].json()["choices"] else "the cache changes the answer"


def _difference(choice: dict[str, Any], expected: dict[str, Any]) -> str:
    if choice["token_ids"] != expected["greedy_token_ids"]:
        return f"tokens {choice['token_ids']}, expected {expected['greedy_token_ids']}"
    wanted = np.array([tops[0][1] for tops in expected["top_logprobs"]])
    largest = float(np.abs(np.array(choice["logprobs"]["token_logprobs"]) - wanted).max())
    return f"log-probabilities differ by {largest:.2g}" if largest > TOLERANCE else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", nargs="+", default=[])
    parser.add_argument("--way", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--count", type=int, default=1000, help="checkpoints of each family")
    options = parser.parse_args()
    num_served = num_failed = 0
    for place in checkpoints(options.out, options.family, options.count):
        for way in options.way:
            found = problem(place, way)
            num_served, num_failed = num_served + 1, num_failed + bool(found)
            if found:
                print(f"{place.name} {way}: {found}", flush=True)
    print(f"{num_served} engines, {num_failed} differ")
    return bool(num_failed)


if __name__ == "__main__":
    sys.exit(main())
