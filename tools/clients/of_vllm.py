"""`vllm bench serve` beside our own benchmark: the same load on the larger model, in turn.

The program `vllm` looks up the version of the distribution `vllm`, which has another name in the CPU build, so its module is
called instead; and only once, since importing it takes 10 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from vllm.benchmarks import serve

from tools.clients.checks import Server, check, main, run

ROUNDS = 3
NUM_PROMPTS, CONCURRENCY, INPUT_LEN, OUTPUT_LEN = "48", "8", "128", "64"
TOLERANCE = 0.1  # limit of the ratio of medians, unless the rounds overlap
RATE, TTFT, TPOT = "output tokens/s", "ms to the first token", "ms a token"


def theirs(server: Server, backend: str, path: str, seed: int) -> dict[str, float]:
    """Prompts are drawn from the seed, so that they are in no prefix cache."""
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    arguments = [
        *("--backend", backend, "--base-url", server.larger_url, "--endpoint", path, "--model", server.larger),
        *("--tokenizer", server.tokenizer, "--dataset-name", "random", "--ignore-eos", "--disable-tqdm"),
        *("--random-input-len", INPUT_LEN, "--random-output-len", OUTPUT_LEN, "--num-prompts", NUM_PROMPTS),
        *("--max-concurrency", CONCURRENCY, "--temperature", "0", "--seed", str(seed)),
    ]
    found: dict[str, Any] = serve.main(parser.parse_args(arguments))
    assert found["completed"] == int(NUM_PROMPTS), found
    return {RATE: found["output_throughput"], TTFT: found["median_ttft_ms"], TPOT: found["median_tpot_ms"]}


def ours(server: Server, place: Path) -> dict[str, float]:
    run(
        *(*server.ours, "bench", "serve", "--url", server.larger_url, "--model", server.larger, "--ignore-eos"),
        *("--num-prompts", NUM_PROMPTS, "--concurrency", CONCURRENCY, "--input-len", INPUT_LEN, "--output-len", OUTPUT_LEN),
        *("--output", str(place)),
    )
    found = json.loads(place.read_text())["result"]
    assert found["num_succeeded"] == int(NUM_PROMPTS), found
    return {RATE: found["output_tokens_per_s"], TTFT: found["ttft_ms"]["p50"], TPOT: found["tpot_ms"]["p50"]}


@check("bench serve, chat (openai-chat), streamed")
def chat(server: Server) -> str:
    return f"{theirs(server, 'openai-chat', '/v1/chat/completions', ROUNDS)[RATE]:.0f} {RATE}"


@check("bench serve agrees with tokamak bench serve, medians of rounds by turns")
def agree(server: Server) -> str:
    place = Path(server.place) / "ours.json"
    rounds = [(theirs(server, "openai", "/v1/completions", turn), ours(server, place)) for turn in range(ROUNDS)]
    said, differ = [], []
    for figure in (RATE, TTFT, TPOT):
        sides = [sorted(side[figure] for side in both) for both in zip(*rounds, strict=True)]
        medians = [statistics.median(side) for side in sides]
        is_among = sides[0][0] <= sides[1][-1] and sides[1][0] <= sides[0][-1]
        if not is_among and abs(medians[0] / medians[1] - 1) > TOLERANCE:
            differ.append(figure)
        shown = (
            f"{name} {median:.4g} ({side[0]:.4g} to {side[-1]:.4g})"
            for name, median, side in zip(("theirs", "ours"), medians, sides, strict=True)
        )
        said.append(f"{figure}: {', '.join(shown)}")
    assert not differ, f"{', '.join(differ)} differ; {'; '.join(said)}"
    return "; ".join(said)


if __name__ == "__main__":
    main()
