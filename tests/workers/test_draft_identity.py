"""Answers are the same bytes with drafts and without, for all pairs of settings: methods, adaptive or fixed lengths, plans,
precisions, and disturbances of the sequences.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest

from engine.config import SpeculativeConfig
from engine.messages import SamplingParams
from tests.workers.serving import GOLDEN, ServedSequence, Serving, make_runner
from tests.workers.test_drafts import sequences

PLANS: dict[str, dict[str, Any]] = {
    "tape": {},
    "captured": {"plan": "captured", "cudagraph_capture_sizes": (16, 8), "max_cudagraph_capture_size": 16},
    "eager": {"plan": "eager"},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
    "int8": {"quantization": "wint8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "wint4"},
}
METHODS = ("ngram", "suffix", "mtp", "ngram,suffix,mtp")
FATES = ("together", "chunked", "preempted", "warm")


def covering(*factors: tuple[str, ...]) -> list[Any]:
    """Return few cases that cover each pair of values of different factors."""

    def pairs(case: tuple[str, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2))

    cases = list(itertools.product(*factors))
    left, chosen = set().union(*map(pairs, cases)), []
    while left:
        chosen.append(max(cases, key=lambda case: len(left & pairs(case))))
        left -= pairs(chosen[-1])
    return chosen


def batch_of_all() -> list[ServedSequence]:
    """Return sequences of all kinds; the last one repeats one token, which is drafted rightly."""
    return [
        *sequences(),
        ServedSequence([9, 4, 4, 4], SamplingParams(temperature=0.0, logit_bias={4: 90.0}, num_logprobs=1), 21),
    ]


def answers(precision: str, plan: str, fate: str, drafts: SpeculativeConfig) -> tuple[list[object], int]:
    """Return the outcome of all sequences in one batch, and how many draft tokens were accepted."""
    options = {**PRECISIONS[precision], **PLANS[plan], "speculative_config": drafts}
    runner = make_runner(GOLDEN / "deepseek_v3", max_model_len=256, num_kv_blocks=120, max_num_seqs=8, **options)
    serving, batch = Serving(runner, chunk=7 if fate == "chunked" else 512), batch_of_all()
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    if fate == "preempted":
        for _ in range(4):
            serving.step(batch)
        serving.place(batch[1], 6)
    serving.run(batch)
    if fate == "warm":
        before, batch = batch, batch_of_all()
        for slot, (sequence, first) in enumerate(zip(batch, before, strict=True)):
            serving.place(sequence, slot, first.block_ids[: (len(sequence.prompt) - 1) // serving.block_size])
        serving.run(batch)
    return [sequence.answer() for sequence in batch], sum(max(count - 1, 0) for count in serving.num_tokens_of_rows)


@cache
def without_drafts(precision: str) -> list[object]:
    return answers(precision, "tape", "together", SpeculativeConfig())[0]


@pytest.mark.parametrize(
    ("method", "length", "plan", "precision", "fate"),
    covering(METHODS, ("adaptive", "fixed"), tuple(PLANS), tuple(PRECISIONS), FATES),
)
def test_drafts_do_not_change_the_bytes(method: str, length: str, plan: str, precision: str, fate: str) -> None:
    is_adaptive = length == "adaptive"
    drafts = SpeculativeConfig(method=method, num_speculative_tokens=3, prompt_lookup_min=1, adaptive=is_adaptive)
    found, num_accepted = answers(precision, plan, fate, drafts)
    assert found == without_drafts(precision)
    assert num_accepted > 9 or is_adaptive or method == "mtp", "of which the layers are drawn"
