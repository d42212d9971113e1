"""Admission of new requests where ranks share experts, and which chunks go together in a step. Decisions only.

Used by `policy.py`. All ranks of a rank group run each of its steps together, so a prompt that one replica begins holds up the
decode of all. New requests are therefore held until they fill a step together: until tokens, slots or blocks last for no more
of them, or the first of them was held for `timeout_ns`, which no later one prolongs. Held requests get nothing and count
against nothing. Where no rank of the group computes, or prompts are computed anyway, none is held; nor is a sequence that was
admitted before or waited for another one of its group.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from enum import Enum

import msgspec

from engine.scheduler.sequence import Sequence


class StepKind(Enum):
    """Kind of chunks that a step may have. A chunk of decode goes on with one token, the newest."""

    MIXED = "all"
    PREFILL = "prefill alone"
    DECODE = "decode alone"

    @property
    def next(self) -> StepKind:
        """Prefill and decode take turns, so that neither starves."""
        return {StepKind.PREFILL: StepKind.DECODE, StepKind.DECODE: StepKind.PREFILL}[self]

    def takes(self, *, is_prefill: bool) -> bool:
        return self is StepKind.MIXED or is_prefill == (self is StepKind.PREFILL)


class Intake(msgspec.Struct, frozen=True):
    """The moment at which new requests ask to be admitted. `is_idle`: no rank of the group computes anything."""

    timeout_ns: int
    now_ns: int
    is_idle: bool

    def held_until_ns(self, admissible: Iterable[Sequence], open_groups: Container[str]) -> int:
        """Return the time until which requests that have room in the next step, and leave some, wait for others to join them;
        0: they go in now. `open_groups`: those with an admitted sequence."""
        first_ns = self.now_ns
        for sequence in admissible:
            if not sequence.held_since_ns or sequence.request.own.group_id in open_groups:
                return 0
            first_ns = min(first_ns, sequence.held_since_ns)
        until_ns = first_ns + self.timeout_ns
        return 0 if self.is_idle or until_ns <= self.now_ns else until_ns
