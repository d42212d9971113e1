"""Shares of the prompts of a step in its tokens and its time. Decisions only.

Used by `policy.py`. Sources have equal shares: what one does not need goes to the others. Within one source's share

- its oldest prompt gets a quarter, or more where the others leave it: a long prompt always makes progress; - the others share
the rest in the order of their remaining tokens: a short prompt waits for no long one.
"""

from __future__ import annotations

import math

import msgspec

from engine.scheduler.step_cost import StepCost

HEAD_PART = 4  # of a source's share its oldest prompt has one part of so many
MIN_TOKENS = 8  # that the oldest prompt of a source gets, however long they take: a step has so many at nearly no price


class Prefill(msgspec.Struct, eq=False):
    """Prompt tokens [start, start + num_due) that are to be computed; `num_tokens` of them in this step."""

    source: str
    start: int
    num_due: int
    max_tokens: int = 1 << 31  # of one step
    num_tokens: int = 0

    @property
    def num_left(self) -> int:
        return min(self.num_due, self.max_tokens) - self.num_tokens


class _Room(msgspec.Struct):
    """Tokens and time that are left to give."""

    num_tokens: int
    time_ns: float

    def part(self, count: int) -> _Room:
        return _Room(-(-self.num_tokens // count), self.time_ns / count)

    def without(self, part: _Room) -> _Room:
        time_ns = self.time_ns if math.isinf(self.time_ns) else self.time_ns - part.time_ns
        return _Room(self.num_tokens - part.num_tokens, time_ns)

    def give(self, prefill: Prefill, room: _Room, cost: StepCost, num_least: int = 0) -> None:
        """Give `prefill` as many tokens as the part `room` allows, at least `num_least`."""
        begin = prefill.start + prefill.num_tokens
        most = max(cost.num_tokens_within(begin, max(0.0, min(room.time_ns, self.time_ns))), num_least)
        count = max(0, min(prefill.num_left, room.num_tokens, self.num_tokens, most))
        prefill.num_tokens += count
        taken_ns = cost.prompt_ns(begin, count) if count and not math.isinf(self.time_ns) else 0.0
        for each in {id(self): self, id(room): room}.values():
            each.num_tokens -= count
            each.time_ns -= taken_ns


def share(prefills: list[Prefill], num_tokens: int, time_ns: float, cost: StepCost) -> None:
    """Give each of the `prefills`, oldest first, its `num_tokens`: no more than `num_tokens` of them all together, and about as
    many as take `time_ns`."""
    sources: dict[str, list[Prefill]] = {}
    for prefill in prefills:
        sources.setdefault(prefill.source, []).append(prefill)
    left = _Room(num_tokens, time_ns)
    ordered = sorted(sources.values(), key=lambda own: sum(prefill.num_left for prefill in own))  # who needs least goes first
    for number, own in enumerate(ordered):
        _share_source(own, left, left.part(len(ordered) - number), cost)
    for prefill in prefills:  # what rounding and short heads have left
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
