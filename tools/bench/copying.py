"""Compares the decode speed of servers of a copying model (copying_model.py) on prompts with much or nothing to copy.

    python -m tools.bench.copying MODEL --load edit --concurrency 1,4 --rounds 3 \
        'off=tokamak serve --model MODEL --port {port}' \
        'ngram=tokamak serve --model MODEL --speculative-config {"method":"ngram"} --port {port}'

Rounds are those of rounds.py. Prompts are token ids, and the first answer of each server is checked against the walk. In the
load `again` every prompt, which contains nothing of the answer, was answered once before the measurement.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvloop
from rich.console import Console

from engine.errors import TokamakError
from tools.bench import rounds
from tools.bench.connection import Client
from tools.bench.copying_model import WALK
from tools.bench.processes import ServerProcess
from tools.target import Target

LOADS = ("edit", "quote", "trap", "random", "again")
PATH = "/v1/completions"
EDIT_EVERY, QUOTED = 16, 32  # in tokens; QUOTED: length of a quoted run, and of one that is not


def prompt_of(kind: str, walk: np.ndarray, length: int, rng: np.random.Generator) -> list[int]:
    """Return a prompt of about `length` tokens that ends where the answer begins. edit: the answer, with one token in 16
    replaced; quote: half of it, in runs; trap: all its pairs of tokens, followed by another token; random: nothing of it."""
    first = int(rng.integers(len(walk)))
    ahead = np.roll(walk, -first)
    tokens = ahead[:length].copy()
    if kind == "edit":
        places = np.arange(EDIT_EVERY // 2, length, EDIT_EVERY)
        tokens[places] = rng.choice(walk, len(places))
    elif kind == "quote":
        tokens = ahead[: 2 * length][np.arange(2 * length) // QUOTED % 2 == 0][:length]
    elif kind == "trap":
        pairs = np.stack([ahead[: length // 3], ahead[1 : length // 3 + 1]], 1)
        tokens = np.concatenate([pairs, rng.choice(walk, (len(pairs), 1))], 1)[rng.permutation(len(pairs))].ravel()
    elif kind in ("random", "again"):
        tokens = rng.choice(walk, length)
    return [*tokens.tolist(), int(ahead[0])]


def _request(prompt: list[int], output_len: int) -> bytes:
    body = {"model": "model", "prompt": prompt, "max_tokens": output_len, "temperature": 0.0, "ignore_eos": True}
    return orjson.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})


async def _check(url: str, prompt: list[int], walk: np.ndarray, output_len: int) -> None:
    """Check that the server copies as intended, if it returns token ids."""
    client = Client(Target.parse(url), rounds.TIMEOUT_S)
    body = {"model": "model", "prompt": prompt, "max_tokens": output_len, "temperature": 0.0, "ignore_eos": True}
    try:
        status, reply = await client.post(PATH, orjson.dumps(body | {"return_token_ids": True}))
    finally:
        client.close()
    if status != 200:
        raise TokamakError(f"{url} answers {status}: {reply[:300]!r}")
    found = orjson.loads(reply)["choices"][0].get("token_ids")
    first = int(np.flatnonzero(walk == prompt[-1])[0]) + 1
    if found is not None and found != np.roll(walk, -first)[:output_len].tolist():
        raise TokamakError(f"{url} does not copy: {found[:8]} for {np.roll(walk, -first)[:8].tolist()}")


def _ask(requests: list[bytes], count: int, num_times: int, server: ServerProcess, number: int) -> dict[str, Any]:
    """Send the requests `num_times` times; the last time counts."""
    of_round = requests[number * count : (number + 1) * count]
    return [rounds.measure(server.url, PATH, of_round, count) for _ in range(num_times)][-1]


def _rows(options: argparse.Namespace, servers: list[ServerProcess], console: Console) -> list[str]:
    walk = np.load(options.model / WALK)
    rng = np.random.default_rng(options.seed)
    for server in servers:
        uvloop.run(_check(server.url, prompt_of("edit", walk, 64, rng), walk, 32))
    lines = []
    for kind in options.load:
        for concurrency in options.concurrency:
            num_prompts = concurrency * options.rounds
            prompts = [prompt_of(kind, walk, options.input_len, rng) for _ in range(num_prompts)]
            requests = [_request(prompt, options.output_len) for prompt in prompts]
            ask = partial(_ask, requests, concurrency, 1 + (kind == "again"))
            lines += rounds.compare(servers, f"{kind} c={concurrency}", options.rounds, ask, console)
    return lines


def _loads(text: str) -> list[str]:
    if unknown := [name for name in text.split(",") if name not in LOADS]:
        raise argparse.ArgumentTypeError(f"unknown loads {', '.join(unknown)}; there are {', '.join(LOADS)}")
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.copying", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    rounds.add_options(parser)
    parser.add_argument("--load", type=_loads, default=list(LOADS), metavar="NAMES", help=", ".join(LOADS))
    parser.add_argument("--input-len", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="default: %(default)s")
    options = parser.parse_args()
    rounds.run(options, lambda servers, console: _rows(options, servers, console))


if __name__ == "__main__":
    main()
