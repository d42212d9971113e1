"""Detection of a hanging child: a pure decision of the supervisor, one `HangWatch` per life of a child.

A work loop writes its heartbeat at least every 100 ms, idle or not; within a worker's step, which may take long, it is written
after each op and each task of an op. A heartbeat that does not change for longer than the limit of the child's state means a
hang. Then, with a grace period between them: stacks are dumped to the child's log, SIGTERM, SIGKILL. Time counts only while the
supervisor itself was running: a gap after it was stopped (Ctrl+Z of the whole group, a suspended machine) is no hang.

    heartbeat unchanged for:  0 ........ limit ........ + DUMP_GRACE ........ + TERM_GRACE
                                         DUMP           TERMINATE             KILL
"""

from __future__ import annotations

from enum import Enum

import msgspec

DUMP_GRACE_NS = 500_000_000  # for writing the stacks
TERM_GRACE_NS = 2_000_000_000  # for a loop that is just returning
MAX_GAP_NS = 1_000_000_000  # the supervisor checks every 100 ms; a longer gap was its own pause


class HangAction(Enum):
    NONE = "none"
    DUMP = "dump"
    TERMINATE = "terminate"
    KILL = "kill"


class HangWatch(msgspec.Struct):
    """Observed heartbeat of one child. `still_ns`: how long it has not changed while observed."""

    last_look_ns: int
    last_heartbeat_ns: int = 0
    still_ns: int = 0
    stage: HangAction = HangAction.NONE

    def look(self, now_ns: int, heartbeat_ns: int, limit_ns: int) -> HangAction:
        """Observe the heartbeat at `now_ns`; return the action that is due now, each one once."""
        gap_ns = now_ns - self.last_look_ns
        self.last_look_ns = now_ns
        if heartbeat_ns != self.last_heartbeat_ns:
            self.last_heartbeat_ns = heartbeat_ns
            self.still_ns = 0
            self.stage = HangAction.NONE
            return HangAction.NONE
        self.still_ns += min(gap_ns, MAX_GAP_NS)
        return self._advance(limit_ns)

    def _advance(self, limit_ns: int) -> HangAction:
        if self.stage is HangAction.NONE and self.still_ns > limit_ns:
            self.stage = HangAction.DUMP
        elif self.stage is HangAction.DUMP and self.still_ns > limit_ns + DUMP_GRACE_NS:
            self.stage = HangAction.TERMINATE
        elif self.stage is HangAction.TERMINATE and self.still_ns > limit_ns + DUMP_GRACE_NS + TERM_GRACE_NS:
            self.stage = HangAction.KILL
        else:
            return HangAction.NONE
        return self.stage
