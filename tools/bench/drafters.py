"""Cost of drafters without a model, by text and length.

    python -m tools.bench.drafters [--tokens 1024,8192,32768] [--slots 1,16] [--steps 400] [--json]

Microseconds per slot and step: its new tokens are indexed, and the next ones are drafted. Medians of steps with one token, and
with five, after the prompts are indexed; and the longest step before that.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import msgspec
import numpy as np

from engine.config import SpeculativeConfig
from engine.messages import SamplingParams, SlotStart
from workers.engine.batch_slots import BatchSlots
from workers.extensions.drafts.drafting import METHODS

_K = 8
_ROOM = 4096  # tokens after a prompt
_VOCABULARY = 150_000
_KINDS = ("drawn", "words", "one token", "a few", "repeated")


class Cost(msgspec.Struct, frozen=True):
    """Cost of one method, in microseconds per slot and step."""

    method: str
    text: str
    num_tokens: int
    num_slots: int
    by_step: float  # steps with one token
    by_row: float  # steps with five tokens
    longest: float  # longest step while the prompts are indexed, all slots together


def text_of(kind: str, num_tokens: int, seed: int) -> np.ndarray:
    """Return int32 [num_tokens]: `drawn` from all tokens; `words` with the frequencies of words, of 5000; one token; three
    tokens; a repeated paragraph of 1000."""
    rng = np.random.default_rng(seed)
    if kind == "words":
        return np.minimum(rng.zipf(1.2, num_tokens), 5000).astype(np.int32)
    if kind == "repeated":
        return np.resize(rng.integers(0, _VOCABULARY, 1000), num_tokens).astype(np.int32)
    most = {"drawn": _VOCABULARY, "one token": 1, "a few": 3}[kind]
    drawn: np.ndarray = rng.integers(0, most, num_tokens).astype(np.int32)
    return drawn


def measure(method: str, kind: str, num_tokens: int, num_slots: int, num_steps: int) -> Cost:
    config = SpeculativeConfig(method=method, num_speculative_tokens=_K)
    slots = BatchSlots(np.zeros((1, num_slots + 1, 1), np.int32), num_tokens + _ROOM, _VOCABULARY, _K)
    drafter = METHODS[method](config, slots)
    texts = [text_of(kind, num_tokens + 5 * num_steps, slot) for slot in range(num_slots)]
    for slot, text in enumerate(texts):
        slots.start(SlotStart(slot, "", text[:num_tokens].tobytes(), num_tokens, SamplingParams(), b""))
        drafter.start(slot, text[:num_tokens], num_tokens, np.zeros(0, np.int32))
    which, limits = np.arange(num_slots, dtype=np.int32), np.full(num_slots, _K, np.int32)

    def step(num_new: int) -> float:
        for slot, text in enumerate(texts):
            begin = slots.num_tokens[slot]
            slots.token_ids[slot, begin : begin + num_new] = text[begin : begin + num_new]
            slots.num_tokens[slot] += num_new
        begin_ns = time.perf_counter_ns()
        drafter.known(which, np.full(num_slots, num_new, np.int32))
        drafter.propose(which, limits)
        return (time.perf_counter_ns() - begin_ns) / 1000

    longest = max(step(0) for _ in range(2 + num_slots * num_tokens // 256))
    by_step, by_row = (float(np.median([step(num_new) for _ in range(num_steps // 2)])) / num_slots for num_new in (1, 5))
    return Cost(method, kind, num_tokens, num_slots, by_step, by_row, longest)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.drafters", description=(__doc__ or "").splitlines()[0])
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--tokens", type=numbers, default=[1024, 8192, 32768], metavar="N,...", help="that a slot has")
    parser.add_argument("--slots", type=numbers, default=[1, 16], metavar="N,...", help="of a step")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="that are measured of each; default: 400")
    parser.add_argument("--json", action="store_true", help="the numbers, for programs")
    options = parser.parse_args(arguments)
    if options.steps < 2 or 5 * options.steps > _ROOM:
        parser.error(f"--steps {options.steps}: from 2 to {_ROOM // 5} are possible")
    if least := [number for number in (*options.tokens, *options.slots) if number < 1]:
        parser.error(f"{least[0]} is no number of tokens or slots; give 1 at least")
    costs = [
        measure(method, kind, num_tokens, num_slots, options.steps)
        for method in METHODS
        for kind in _KINDS
        for num_slots in options.slots
        for num_tokens in options.tokens
    ]
    if options.json:
        print(json.dumps([msgspec.to_builtins(cost) for cost in costs]))
        return 0
    print(f"{'method':8}{'text':12}{'slots':>6}{'tokens':>8}{'us a slot':>11}{'of five':>9}{'longest us':>12}")
    for each in costs:
        row = f"{each.method:8}{each.text:12}{each.num_slots:6}{each.num_tokens:8}"
        print(f"{row}{each.by_step:11.1f}{each.by_row:9.1f}{each.longest:12.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
