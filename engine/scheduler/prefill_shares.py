"""Shares of a step's prompts in its tokens and its time. Pure decisions.

Used by `policy.py`. Sources have equal shares; what one does not need goes to the others. Within the share of one source, its
oldest prompt gets a quarter, or more if the others leave it, so that a long prompt always makes progress. The others share the
rest, shortest first, so that a short prompt does not wait for a long one.
"""

from __future__ import annotations

import math

import msgspec

from engine.scheduler.step_cost import StepCost

HEAD_PART = 4  # the oldest prompt of a source gets 1 / HEAD_PART of its share
MIN_TOKENS = 8  # least tokens for the oldest prompt of a source, however long they take: they cost a step next to nothing


class Prefill(msgspec.Struct, eq=False):
    """Prompt tokens [start, start + num_due) left to compute; `num_tokens` of them in this step."""

    source: str
    start: int
    num_due: int
    max_tokens: int = 1 << 31  # limit for one step
    num_tokens: int = 0

    @property
    def num_left(self) -> int:
        return min(self.num_due, self.max_tokens) - self.num_tokens


class _Room(msgspec.Struct):
    """Remaining tokens and time."""

    num_tokens: int
    time_ns: float

    def part(self, count: int) -> _Room:
        return _Room(-(-self.num_tokens // count), self.time_ns / count)

    def without(self, part: _Room) -> _Room:
        time_ns = self.time_ns if math.isinf(self.time_ns) else self.time_ns - part.time_ns
        return _Room(self.num_tokens - part.num_tokens, time_ns)

    def give(self, prefill: Prefill, room: _Room, cost: StepCost, num_least: int = 0) -> None:
        """Give `prefill` as many tokens as `room` allows, at least `num_least`."""
        begin = prefill.start + prefill.num_tokens
        most = max(cost.num_tokens_within(begin, max(0.0, min(room.time_ns, self.time_ns))), num_least)
        count = max(0, min(prefill.num_left, room.num_tokens, self.num_tokens, most))
        prefill.num_tokens += count
        taken_ns = cost.prompt_ns(begin, count) if count and not math.isinf(self.time_ns) else 0.0
        for each in {id(self): self, id(room): room}.values():
            each.num_tokens -= count
            each.time_ns -= taken_ns


def share(prefills: list[Prefill], num_tokens: int, time_ns: float, cost: StepCost) -> None:
    """Set `num_tokens` of each prefill (oldest first): together at most `num_tokens`, and about as many as take `time_ns`."""
    sources: dict[str, list[Prefill]] = {}
    for prefill in prefills:
        sources.setdefault(prefill.source, []).append(prefill)
    left = _Room(num_tokens, time_ns)
    # the source that needs least goes first
    ordered = sorted(sources.values(), key=lambda own: sum(prefill.num_left for prefill in own))
    for number, own in enumerate(ordered):
        _share_source(own, left, left.part(len(ordered) - number), cost)
    for prefill in prefills:  # distribute what rounding and short heads left over
        left.give(prefill, left, cost)


def _share_source(own: list[Prefill], left: _Room, room: _Room, cost: StepCost) -> None:
    head, *others = own
    others.sort(key=lambda prefill: prefill.num_left)
    reserved = room.part(HEAD_PART)
    rest = room.without(reserved)
    for prefill in others:
        left.give(prefill, rest, cost)
    rest = _Room(reserved.num_tokens + rest.num_tokens, reserved.time_ns + rest.time_ns)
    left.give(head, rest, cost, MIN_TOKENS)
