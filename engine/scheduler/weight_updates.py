"""Commands about the weights (pause, clear, wake, reload), and repairs of ranks that hold other weights than they should.

Used by the scheduler process alone; `commands.py` receives the commands. A command is a `Change` in two phases: first the
sequences are drained, according to its mode, until no step is in flight; then messages are sent to the ranks, and when all have
answered it is done. Then it is written to the run's record, and after that its Reply is sent. One change at a time; another
command meanwhile gets a 409.

All ranks must match the record: a rank with other weights (it or its scheduler died during a change) has to load those of the
record before the next step. So whichever process dies at whatever time, the engine is in the state before the command or in the
state after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

import msgspec
from msgspec.structs import replace

from engine.errors import RequestError
from engine.messages import (
    ClearWeights,
    Details,
    LoadWeights,
    Reply,
    WeightsChanged,
    WeightsState,
)
from engine.process.context import ActorContext
from engine.process.run_directory import WeightsRecord
from engine.scheduler.aborts import Aborts
from engine.scheduler.batch_state import BatchState
from engine.scheduler.block_events import BlockEvents
from engine.scheduler.dispatch import Dispatcher
from engine.scheduler.encoder_work import EncoderWork
from engine.scheduler.ranks import Ranks
from engine.scheduler.weight_state import WeightState, conflict


class Phase(Enum):
    DRAINING = "waiting for running sequences"
    AWAITING_RANKS = "waiting for the ranks"


class Change(msgspec.Struct):
    """A command about the weights in progress."""

    command_id: str  # as sent to the ranks
    name: str
    mode: str
    after: WeightsRecord | None  # the record when it is done; None: the current one, which the ranks are made to match
    messages: list[LoadWeights | ClearWeights] = []  # sent to the ranks
    phase: Phase = Phase.DRAINING
    unanswered: set[int] = set()
    errors: list[str] = []


class WeightUpdates:
    """Carries out the command in progress."""

    def __init__(
        self,
        context: ActorContext,
        weights: WeightState,
        batch: BatchState,
        dispatcher: Dispatcher,
        ranks: Ranks,
        aborts: Aborts,
        block_events: BlockEvents,
        show: Callable[[], None],
        encoder: EncoderWork | None = None,
    ) -> None:
        """`show`: updates the gauges, before the reply is sent."""
        self._context = context
        self._show = show
        self._weights = weights
        self._batch = batch
        self._dispatcher = dispatcher
        self._ranks = ranks
        self._aborts = aborts
        self._block_events = block_events
        self._encoder = encoder
        self._change: Change | None = None
        self._return: tuple[str, WeightsRecord] | None = None  # a command to roll back when nothing else is in progress
        self._num_repairs = 0
        self._unwritten = ""
        self._is_unwritten = context.counter("is_record_unwritten")
        self._set_unwritten("")

    @property
    def can_dispatch(self) -> bool:
        """Whether sequences may be computed: no change is in progress, or they may run to their end first."""
        if self._change is None:
            return self._weights.state is WeightsState.NORMAL and not self._unwritten
        return self._change.phase is Phase.DRAINING and self._change.mode == "wait"

    def advance(self) -> int:
        """Take the change in progress to its next phase if possible, or begin to repair a rank's weights. Return 1 if something
        was done."""
        change = self._change
        if change is None and self._return is not None:
            (command_id, record), self._return = self._return, None
            self.begin(command_id, "go back", "requeue", record)
            return 1
        if change is None:
            return self._repair()
        if change.phase is Phase.AWAITING_RANKS or not self._is_drained(change):
            return 0
        self._batch.waiting.let_in()
        change.phase = Phase.AWAITING_RANKS
        change.messages = [] if change.name == "pause" else self._messages_for(change)
        for message in change.messages:
            change.unanswered.update(message.ranks if isinstance(message, LoadWeights) else self._ranks.all)
            self._dispatcher.send(message)
        if not change.messages:
            self._succeed(change)
        return 1

    def rank_answered(self, answer: WeightsChanged) -> None:
        """Handle a rank's answer to LoadWeights or ClearWeights."""
        change = self._change
        if change is None or change.phase is not Phase.AWAITING_RANKS or answer.command_id != change.command_id:
            if not answer.error:  # sent by a scheduler that died: the rank now has weights that are not in use
                self._rank_is_wrong(answer.rank, answer.path, answer.version, answer.contents)
            return
        change.unanswered.discard(answer.rank)
        if answer.error:
            change.errors.append(f"{self._context.ranks[answer.rank]}: {answer.error}")
        else:
            self._ranks.changed(answer.rank, answer.path, answer.version, answer.contents)
        if change.unanswered:
            return
        if not change.errors:
            self._succeed(change)
        else:
            if change.name == "repair":
                self._give_up("; ".join(change.errors))
            self._fail(change, 400, "; ".join(change.errors))

    def rank_came_back(self, rank: int) -> None:
        """Note that a rank was restarted: it lost its messages, and holds the weights in use."""
        change = self._change
        if change is None or change.phase is not Phase.AWAITING_RANKS:
            return
        for message in change.messages:
            if isinstance(message, LoadWeights):
                self._fail(change, 503, f"{self._context.ranks[rank]} died while loading {message.path}")
                return
            self._dispatcher.send(message)
            change.unanswered.add(rank)

    def rank_has_no_weights(self, rank: int, error: str) -> None:
        """Note that a rank has no weights: a scheduler that died told it to clear them, and then it got a step of this one."""
        self._context.log.warning("%s: %s", self._context.ranks[rank], error)
        self._rank_is_wrong(rank, "", 0)

    def _rank_is_wrong(self, rank: int, path: str, version: int, contents: str = "") -> None:
        """Note that a rank holds other weights than it should; `_repair` follows."""
        self._ranks.changed(rank, path, version, contents)
        if self._change is None or self._change.phase is Phase.DRAINING:
            self._dispatcher.give_up_flight()
            self._batch.rollback_in_flight()

    def refuse_while_changing(self, name: str) -> None:
        if self._change is not None:
            raise conflict(
                f"cannot {name}: the engine is {self._weights.state.name}, and {self._change.name} is in progress "
                f"({self._change.phase.value}); try again when it has finished"
            )

    # --------------------------------------------------------------------------------------------- carrying them out

    def begin(self, command_id: str, name: str, mode: str, after: WeightsRecord | None) -> None:
        """Drain the sequences according to the mode; if the engine was not running, there is nothing to wait for."""
        before = self._weights.state
        self._weights.begin(name)
        if mode == "wait" and before is not WeightsState.NORMAL:
            mode = "keep"
        self._change = Change(command_id, name, mode, after)
        match mode:
            case "abort":
                self._aborts.abort_all()
            case "wait":
                self._batch.waiting.hold()
            case "requeue":
                self._batch.preempt_all()

    def return_to(self, command_id: str, record: WeightsRecord) -> None:
        """Restore the record from before a command that another replica did not carry out; no version number is used twice."""
        last_version = max(record.last_version, self._weights.record.last_version)
        self._return = command_id, replace(record, last_version=last_version)

    def _messages_for(self, change: Change) -> list[LoadWeights | ClearWeights]:
        """Return the messages that make the ranks match the record."""
        record = change.after or self._weights.record
        if record.state is WeightsState.CLEARED:
            return [ClearWeights(change.command_id)]
        ranks: dict[tuple[str, int], list[int]] = {}
        for rank, weights in enumerate(record.ranks):
            if self._ranks.weights_of(rank)[1] != weights[1]:
                ranks.setdefault(weights, []).append(rank)
        return [
            LoadWeights(change.command_id, path, version, some, record.contents.get(version, ""))
            for (path, version), some in ranks.items()
        ]

    def _is_drained(self, change: Change) -> bool:
        """Return whether nothing runs on the ranks, or will, and all of them can receive messages."""
        batch = self._batch
        if self._dispatcher.num_in_flight or self._dispatcher.has_unsent or batch.num_leaving:
            return False
        if change.mode == "wait" and (len(batch.running) or len(batch.waiting) or self._is_one_away()):
            return False
        return change.name == "pause" or self._ranks.are_complete

    def _is_one_away(self) -> bool:
        """Return whether a sequence that should run to its end lost its tokenizer and was not submitted again yet."""
        return self._batch.waiting.is_expecting(time.monotonic_ns())

    def _succeed(self, change: Change) -> None:
        record = self._ranks.with_contents(change.after or self._weights.record)
        changed = self._ranks.overwritten(record)
        if changed:
            self._fail(change, 400, f"{changed} was modified while the ranks were loading it; reload when it is complete")
            return
        try:
            self.write(record)
        except RequestError as error:
            self._fail(change, error.status, error.message)
            return
        if change.name != "pause":
            self._clear_caches()
        if record.state is WeightsState.CLEARED:
            message = "the weights were cleared"
        else:
            message = "paused" if change.name == "pause" else f"weight version {record.version} is in use"
        self._end(change, 200, message)

    def _fail(self, change: Change, status: int, cause: str) -> None:
        """Return to the state before; `_repair` handles ranks that did change."""
        self._weights.settle(self._weights.record)
        self._end(change, status, f"{cause}; version {self._weights.version} stays in use")

    def _end(self, change: Change, status: int, message: str) -> None:
        self._change = None
        if change.name != "repair":
            self._show()
            self._context.events.send(Reply(change.command_id, status, message, self.details()))

    def write(self, record: WeightsRecord) -> None:
        """Write the record, which is valid from here on whichever process dies. Raises RequestError if it cannot be written."""
        run = self._context.run
        try:
            if record != self._weights.record:
                run.write_weights(record, self._context.name)
        except OSError as error:
            raise RequestError(
                f"the command cannot be recorded in {run.weights_path(self._context.name)}: {error.strerror}; fix that "
                "directory and try again",
                status=503,
            ) from error
        self._weights.settle(record)

    def details(self) -> Details:
        return {"state": self._weights.state.name, "weight_version": self._weights.version, "path": self._weights.path}

    def _clear_caches(self) -> None:
        """Clear everything that other weights computed."""
        self.clear_prefix_cache()
        self.clear_encoder_cache()

    def clear_encoder_cache(self) -> None:
        if self._encoder is not None:
            self._encoder.clear()

    def clear_prefix_cache(self) -> None:
        self._batch.pool.clear()
        self._block_events.cleared()

    # -------------------------------------------------------------------------------------------------------- repair

    def _repair(self) -> int:
        """Make ranks with other weights than the record load the right ones."""
        record = self._weights.record
        if not self._ranks.are_complete or not self._ranks.have_wrong_weights(record):
            self._set_unwritten("")
            return 0
        try:
            known = self._ranks.with_contents(record)
            self.write(known)  # a version's contents, as found by the first rank that loads it, before its first step
            after = self._take_overwritten()
        except RequestError as error:
            self._set_unwritten(error.message)
            return 0
        self._set_unwritten("")
        if after is None and not self._ranks.have_wrong_weights(self._weights.record):
            return 1
        self._num_repairs += 1
        self.begin(f"{self._context.name}-{self._context.epoch}-{self._num_repairs}", "repair", "requeue", after)
        return 1

    def _take_overwritten(self) -> WeightsRecord | None:
        """Return a record for a rank that came back with other contents, because its checkpoint was overwritten and the old
        weights are gone: the contents get their own version, for all ranks that had the old ones. None: no such rank."""
        path = self._ranks.overwritten(self._weights.record)
        if not path or self._weights.record.state is WeightsState.CLEARED:  # then the rank is only made to release its weights
            return None
        holders = [rank for rank, (held, _) in enumerate(self._weights.record.ranks) if held == path]
        self.write(self._weights.with_next_version())
        after = self._weights.loaded(path, holders)
        text = f"{path} was overwritten while in use: its content is now version {after.version}"
        self._context.log.error("%s", text)
        self._context.counters.errors.record(self._context.name, text)
        return after

    def _give_up(self, cause: str) -> None:
        """Continue without weights, because the weights in use cannot be loaded by all ranks any more; report it."""
        path = self._weights.path
        self._context.counters.errors.record(self._context.name, f"weights {path} cannot be reloaded: {cause}")
        record = self._weights.in_state(WeightsState.CLEARED)
        try:
            self.write(record)
        except RequestError as error:  # the next scheduler reaches the same end
            self._context.log.error("%s", error.message)
            self._weights.settle(record)
        self._clear_caches()

    def _set_unwritten(self, cause: str) -> None:
        """Set the reason why the state cannot be recorded; empty: it can. Until then no step is dispatched."""
        if cause and cause != self._unwritten:
            self._context.log.error("%s", cause)
            self._context.counters.errors.record(self._context.name, cause)
        self._unwritten = cause
        self._is_unwritten.set(1 if cause else 0)
