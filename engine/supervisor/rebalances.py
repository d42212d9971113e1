"""The command to rebalance experts, in the supervisor: sent to the leading rank and answered once, whichever process dies.

Owned by `SupervisorCommands`. The ranks decide where experts are (`workers/rank_group/balancer.py`): a death leaves the old or
the new placement. While weights are changed or cleared, ranks cannot run the steps that a switch needs, so these commands
exclude each other.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.messages import Command, Reply
from engine.process.topology import names_of


class Rebalances:
    """At most one rebalance in progress. `tell` puts a command on an actor's control ring; it returns why that failed, or an
    empty string."""

    def __init__(self, tell: Callable[[str, Command], str], answer: Callable[[Reply], None]) -> None:
        self._tell = tell
        self._answer = answer
        self._command_id = ""
        self._leader = ""

    @property
    def is_under_way(self) -> bool:
        return bool(self._command_id)

    def begin(self, command: Command, members: tuple[int, ...], num_ranks: int) -> None:
        """Send the command to the leader: the lowest of `members` of the rank group."""
        if self.is_under_way:
            self._answer(Reply(command.command_id, 409, "a rebalancing is in progress; try again when it has finished"))
            return
        leader = names_of("worker", num_ranks)[members[0]] if members else ""
        trouble = self._tell(leader, command) if leader else "no rank is ready; try again in a moment"
        if trouble:
            self._answer(Reply(command.command_id, 503, trouble))
        else:
            self._command_id, self._leader = command.command_id, leader

    def take(self, reply: Reply) -> bool:
        """Handle a rank's reply. Return False if it is for another command."""
        if not self.is_under_way or reply.command_id != self._command_id:
            return False
        self._end(reply)
        return True

    def actor_died(self, name: str, cause: str) -> None:
        if self.is_under_way and name == self._leader:
            text = f"the rebalancing was interrupted: {cause}; check the placement and try again"
            self._end(Reply(self._command_id, 503, text))

    def refuse_open(self, cause: str) -> None:
        """Answer an open command with 503: the engine is stopping."""
        if self.is_under_way:
            self._end(Reply(self._command_id, 503, f"the engine is stopping: {cause}"))

    def _end(self, reply: Reply) -> None:
        self._command_id = self._leader = ""
        self._answer(reply)
