"""Admission of new requests where ranks share experts, and which chunks go together in a step. Decisions only.

Used by `policy.py`. All ranks of a rank group run every step together, so a prompt in one replica delays the decode of all. New
requests are therefore held until they fill a step together: until tokens, slots or blocks are used up, or until the first of
them was held for `timeout_ns` (later ones do not extend this). Held requests use nothing and count against no limit. No request
is held while the rank group is idle or computes prompts anyway, nor is a sequence that was admitted before or waited for
another one of its group.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from enum import Enum

import msgspec

from engine.scheduler.sequence import Sequence


class StepKind(Enum):
    """Kind of chunks that a step may have. A decode chunk continues with one token, the newest."""

    MIXED = "all"
    PREFILL = "prefill alone"
    DECODE = "decode alone"

    @property
    def next(self) -> StepKind:
        """Return the next kind: prefill and decode alternate, so that neither starves."""
        return {StepKind.PREFILL: StepKind.DECODE, StepKind.DECODE: StepKind.PREFILL}[self]

    def takes(self, *, is_prefill: bool) -> bool:
        return self is StepKind.MIXED or is_prefill == (self is StepKind.PREFILL)


class Intake(msgspec.Struct, frozen=True):
    """The time at which new requests ask for admission. `is_idle`: no rank of the group is computing."""

    timeout_ns: int
    now_ns: int
    is_idle: bool

    def held_until_ns(self, admissible: Iterable[Sequence], open_groups: Container[str]) -> int:
        """Return the time until which new requests that fit the next step, and leave room in it, wait for others to join them;
        0: they are admitted now. `open_groups`: groups with an admitted sequence."""
        first_ns = self.now_ns
        for sequence in admissible:
            if not sequence.held_since_ns or sequence.request.own.group_id in open_groups:
                return 0
            first_ns = min(first_ns, sequence.held_since_ns)
        until_ns = first_ns + self.timeout_ns
        return 0 if self.is_idle or until_ns <= self.now_ns else until_ns
