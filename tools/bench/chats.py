"""Compares servers of the embedded model (tools/demo) on its held-out questions, streamed and greedy.

    python -m tools.bench.chats --concurrency 1,4,16 --rounds 9 \
        'off=tools/serve --speculative-config {} --port {port}' 'mtp=tools/serve --port {port}'

Rounds are those of rounds.py; each has its own questions, a few per stream, sent without pause. Answers have 5 to 60 tokens.
`stream tok/s` is the rate of a stream after its first token.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import orjson
import uvloop
from rich.console import Console

from tools.bench import rounds
from tools.bench.connection import Client
from tools.bench.processes import ServerProcess
from tools.bench.serve import first_model
from tools.demo.data import ARITHMETIC_TASKS, Question, held_out_questions
from tools.target import Target

PATH = "/v1/chat/completions"
TASKS = (*ARITHMETIC_TASKS, "reverse", "sort", "uppercase", "count", "json")  # more questions than needed
MAX_TOKENS = 96
FIGURES = {"stream tok/s": rounds.STREAM_RATE, "out tok/s": "output_tokens_per_s", "TTFT ms": "ttft_ms"}


def _request(question: Question, model: str) -> bytes:
    body = {"model": model, "messages": question.messages(), "max_tokens": MAX_TOKENS, "temperature": 0.0}
    return orjson.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})


async def _model_of(url: str) -> str:
    client = Client(Target.parse(url), rounds.TIMEOUT_S)
    try:
        return await first_model(client)
    finally:
        client.close()


def _ask(requests: list[bytes], count: int, concurrency: int, server: ServerProcess, number: int) -> dict[str, Any]:
    return rounds.measure(server.url, PATH, requests[number * count : (number + 1) * count], concurrency)


def _rows(options: argparse.Namespace, servers: list[ServerProcess], console: Console) -> list[str]:
    lines, model = [], uvloop.run(_model_of(servers[0].url))
    for concurrency in options.concurrency:
        count = options.questions * concurrency
        questions = held_out_questions(TASKS, count * (options.rounds + 1), options.seed)
        requests = [_request(question, model) for question in questions]
        ask = partial(_ask, requests, count, concurrency)
        for server in servers:
            ask(server, options.rounds)  # warm-up is not measured
        lines += rounds.compare(servers, f"c={concurrency}", options.rounds, ask, console, FIGURES)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.chats", description=__doc__.splitlines()[0])
    rounds.add_options(parser)
    parser.add_argument("--questions", type=int, default=8, metavar="N", help="of each stream in a round; default: %(default)s")
    options = parser.parse_args()
    rounds.run(options, lambda servers, console: _rows(options, servers, console))


if __name__ == "__main__":
    main()
