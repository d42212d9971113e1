"""Sequences for the tests of the scheduler's pure parts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine.messages import Output, Rejected, SamplingParams
from engine.scheduler.limits import Limits
from engine.scheduler.queues import place_in_line
from engine.scheduler.sequence import Sequence
from tests.requests import sequence_request


@dataclass(slots=True)
class ListReader:
    """Reader that records its outputs."""

    is_slow: bool = False
    outputs: list[Output] = field(default_factory=list)
    rejected: Rejected | None = None

    def add(self, output: Output) -> None:
        self.outputs.append(output)

    def reject(self, rejected: Rejected) -> None:
        self.rejected = rejected


def make_limits(max_tokens: int = 16, max_running: int = 4, block_size: int = 4, has_prefix_cache: bool = True) -> Limits:
    return Limits(max_tokens, max_running, 1 << 20, 1 << 20, block_size, has_prefix_cache)


def make_sample(
    name: str,
    prompt: list[int],
    max_tokens: int = 8,
    priority: int = 0,
    arrival_ns: int = 0,
    order: int = 0,
    group_id: str = "",
    num_prompt_logprobs: int = -1,
    max_wait_ns: int = 30_000_000_000,
) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, num_prompt_logprobs=num_prompt_logprobs)
    tokens = array("i", prompt)
    rank = (place_in_line(priority, arrival_ns, max_wait_ns), priority, order)
    request = sequence_request(
        tokens.tobytes(), name, sampling=sampling, group_id=group_id, priority=priority, arrival_ns=arrival_ns, key=name
    )
    return Sequence(request, ListReader(), tokens, len(prompt), len(prompt) + max_tokens, rank)
