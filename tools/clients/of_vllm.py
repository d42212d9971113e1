"""`vllm bench serve`, beside our own: the same load, by turns."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from tools.clients.checks import Server, check, main, run

ROUNDS = 3
NUM_PROMPTS, CONCURRENCY, INPUT_LEN, OUTPUT_LEN = "48", "8", "128", "64"
# `vllm` itself asks for the version of a distribution `vllm`, which its build for CPUs is not called
BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
TOLERANCE = 0.1  # of the medians' ratio, where the rounds of one do not lie among those of the other


def theirs(server: Server, backend: str, path: str, place: Path, seed: int) -> float:
    """Output tokens a second. Prompts are of the seed, so that no prefix cache knows them."""
    run(
        *(sys.executable, "-c", BENCH_SERVE, "--backend", backend, "--base-url", server.url, "--endpoint", path),
        *("--model", server.model, "--tokenizer", server.tokenizer, "--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", INPUT_LEN, "--random-output-len", OUTPUT_LEN, "--num-prompts", NUM_PROMPTS),
        *("--max-concurrency", CONCURRENCY, "--temperature", "0", "--seed", str(seed)),
        *("--save-result", "--result-dir", str(place.parent), "--result-filename", place.name),
    )
    found = json.loads(place.read_text())
    assert found["completed"] == int(NUM_PROMPTS), found
    return float(found["output_throughput"])


def ours(server: Server, place: Path) -> float:
    run(
        *(*server.ours, "bench", "serve", "--url", server.url, "--model", server.model, "--ignore-eos", "--output", str(place)),
        *("--num-prompts", NUM_PROMPTS, "--concurrency", CONCURRENCY, "--input-len", INPUT_LEN, "--output-len", OUTPUT_LEN),
    )
    found = json.loads(place.read_text())
    return float(found["output_tokens_per_s"])


@check("bench serve, chat (openai-chat), streamed")
def chat(server: Server) -> None:
    theirs(server, "openai-chat", "/v1/chat/completions", Path(server.place) / "chat.json", ROUNDS)


@check("bench serve agrees with tokamak bench serve (output tokens/s)")
def agree(server: Server) -> str:
    place = Path(server.place)
    pairs = [
        (
            theirs(server, "openai", "/v1/completions", place / f"theirs{turn}.json", turn),
            ours(server, place / f"ours{turn}.json"),
        )
        for turn in range(ROUNDS)
    ]
    sides = [sorted(side) for side in zip(*pairs, strict=True)]
    ratio = statistics.median(sides[0]) / statistics.median(sides[1])
    said = ", ".join(
        f"{name} {statistics.median(side):.0f} ({side[0]:.0f} to {side[-1]:.0f})"
        for name, side in zip(("theirs", "ours"), sides, strict=True)
    )
    overlap = sides[0][0] <= sides[1][-1] and sides[1][0] <= sides[0][-1]
    assert overlap or abs(ratio - 1) <= TOLERANCE, said
    return said


if __name__ == "__main__":
    main()
