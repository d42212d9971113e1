"""A command to the schedulers: carried out in every replica, answered once, and rolled back if one of them fails.

Owned by `SupervisorCommands`. The command is sent to all schedulers at once, but weights are reloaded in one replica after the
other, so that the others keep serving; the next ones must load the first one's version number and contents. If a replica
refuses, fails or dies, those that are done return to their earlier records (`weights.<k>.json`), and the command is answered
with the failure. The record of a scheduler that died is restored before its next life starts and reads it. Replicas may differ,
if one of them alone could not get its weights again: a command is sent to those that it changes.

With one replica nothing is rolled back: its record describes the state before the command or after it.

`Undo` takes the last command back that changed weights, in all replicas: a router orders it when another engine failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from engine.errors import RequestError, TokamakError
from engine.messages import (
    AbortRequest,
    Command,
    Details,
    DropWeights,
    Order,
    Pause,
    ReloadWeights,
    Reply,
    ResetEncoderCache,
    ResetPrefixCache,
    Resume,
    ReturnToWeights,
    Undo,
    WeightsState,
)
from engine.process.run_directory import Run, WeightsRecord

_BACK = "/back"  # suffix of the id of a roll-back


class _OpenCommand(msgspec.Struct):
    """A command that some scheduler still has to carry out or roll back."""

    command: Command
    before: dict[str, WeightsRecord]  # each scheduler's record when it began, if a roll-back may be needed
    untold: list[str]  # in their order
    unanswered: set[str] = set()
    done: dict[str, Reply] = {}
    failures: dict[str, Reply] = {}
    is_going_back: bool = False
    notes: list[str] = []  # failed roll-backs
    origin: dict[str, WeightsRecord] = {}  # each scheduler's record when it began, if it changes weights

    @property
    def changes_weights(self) -> bool:
        """Whether replicas that have done it differ from those that have not."""
        return changes_weights(self.command.order)


class ReplicaCommands:
    """The commands in progress. `tell` puts one on a scheduler's control ring; it returns why that failed, or an empty
    string."""

    def __init__(
        self, run: Run, schedulers: Sequence[str], tell: Callable[[str, Command], str], answer: Callable[[Reply], None]
    ) -> None:
        self._run = run
        self._schedulers = tuple(schedulers)
        self._tell = tell
        self._answer = answer
        self._open: dict[str, _OpenCommand] = {}  # by command id
        self._last = "", dict[str, WeightsRecord]()  # the last command that changed weights: id, and the records before it

    def begin(self, command: Command, tensor_parallel_size: int, *, shares_experts: bool = False) -> None:
        """Carry out a command. Raises RequestError if it makes no sense here, or another one is in progress."""
        schedulers = self._schedulers
        order = command.order
        if isinstance(order, ReloadWeights):
            schedulers = self._replicas_of(order.ranks, tensor_parallel_size)
        if isinstance(order, Undo):
            self._check_last(order)
        if shares_experts and len(self._schedulers) > 1:
            self._check_shared(order, schedulers)
        opened = _OpenCommand(command, {}, self._with_something_to_do(order, schedulers))
        if len(self._schedulers) > 1 and opened.changes_weights:
            self._prepare(opened)
        opened.origin = opened.before or self._records() if opened.changes_weights else {}
        self._open[command.command_id] = opened
        self._tell_next(opened)
        self._advance(opened)

    def take(self, reply: Reply) -> None:
        """Handle a scheduler's reply."""
        command_id, _, scheduler = reply.command_id.removesuffix(_BACK).rpartition("/")
        opened = self._open.get(command_id)
        if opened is None or scheduler not in opened.unanswered:
            return
        opened.unanswered.discard(scheduler)
        if opened.is_going_back:
            if reply.status >= 400:
                opened.notes.append(f"{scheduler} could not roll back: {reply.message}")
        elif reply.status >= 400:
            opened.failures[scheduler] = reply
        else:
            opened.done[scheduler] = reply
            self._tell_next(opened)
        self._advance(opened)

    def scheduler_died(self, scheduler: str, cause: str) -> None:
        """Fail a dead scheduler's commands, which its next life does not carry out, and restore the record it may have
        written."""
        for opened in list(self._open.values()):
            if scheduler not in opened.unanswered:
                continue
            opened.unanswered.discard(scheduler)
            if not opened.is_going_back:
                message = f"the command was interrupted: {cause}; check the state and try again"
                opened.failures[scheduler] = Reply(opened.command.command_id, 503, message)
            self._write_back(opened, scheduler)
            self._advance(opened)

    def scheduler_ready(self, scheduler: str) -> None:
        """Send the roll-back to a scheduler that died before it got it."""
        for opened in list(self._open.values()):
            if opened.is_going_back and scheduler in opened.unanswered:
                self._send_back(opened, scheduler)

    def refuse_open(self, cause: str) -> None:
        """Answer the open commands with 503: the engine is stopping."""
        for command_id in self._open:
            self._answer(Reply(command_id, 503, f"the engine is stopping: {cause}"))
        self._open.clear()

    def why_no_weights(self) -> RequestError | None:
        """Return why some ranks have no weights, or may soon have none."""
        try:
            is_cleared = any(self._state_of(scheduler) is WeightsState.CLEARED for scheduler in self._schedulers)
        except RequestError as error:
            return error
        if is_cleared or any(opened.changes_weights for opened in self._open.values()):
            return RequestError("the weights are cleared or being changed; try again when all ranks have weights", status=409)
        return None

    # ------------------------------------------------------------------------------------------------------ inside

    def _with_something_to_do(self, order: Order, schedulers: Sequence[str]) -> list[str]:
        """Return the schedulers that the command changes, in their order; all if it changes none, and each says why. Paused
        ones continue before lost weights are looked for. Ones without weights serve as soon as they have some, so others get
        theirs first."""
        if len(schedulers) == 1 or not changes_weights(order) or isinstance(order, Undo):
            return list(schedulers)
        states = {name: self._state_of(name) for name in schedulers}
        if isinstance(order, ReloadWeights):
            return sorted(schedulers, key=lambda name: states[name] is WeightsState.CLEARED)
        before: tuple[WeightsState, ...] = (WeightsState.NORMAL, WeightsState.PAUSED)
        if isinstance(order, Resume):
            before = (WeightsState.PAUSED,) if WeightsState.PAUSED in states.values() else (WeightsState.CLEARED,)
        elif isinstance(order, Pause) and order.level == "pause":
            before = (WeightsState.NORMAL,)
        return [name for name in schedulers if states[name] in before] or list(schedulers)

    def _replicas_of(self, ranks: Sequence[int], tensor_parallel_size: int) -> tuple[str, ...]:
        """Return the schedulers of the replicas of `ranks`. Replicas must be named completely."""
        num_ranks = tensor_parallel_size * len(self._schedulers)
        unknown = [rank for rank in ranks if not 0 <= rank < num_ranks]
        if unknown:
            raise RequestError(f"rank {unknown[0]} does not exist; the engine has ranks 0 to {num_ranks - 1}", param="ranks")
        replicas = sorted({rank // tensor_parallel_size for rank in ranks}) or range(len(self._schedulers))
        for replica in replicas if ranks else ():
            own = range(replica * tensor_parallel_size, (replica + 1) * tensor_parallel_size)
            if not set(own) <= set(ranks):
                raise RequestError(
                    f"ranks {', '.join(map(str, own))} compute together and must have the same weights; name all of them",
                    param="ranks",
                )
        return tuple(self._schedulers[replica] for replica in replicas)

    def _check_shared(self, order: Order, schedulers: Sequence[str]) -> None:
        """Raise an error unless replicas that share experts are all paused: they compute each other's rows, so none may run
        while weights change."""
        is_change = isinstance(order, (ReloadWeights, DropWeights)) or (isinstance(order, Pause) and order.level == "sleep")
        if is_change and len(schedulers) < len(self._schedulers):
            raise RequestError(
                "replicas share their experts and must have the same weights; name all ranks, or none", param="ranks"
            )
        running = [name for name in self._schedulers if is_change and self._state_of(name) is WeightsState.NORMAL]
        if running:
            raise RequestError(
                f"replicas share their experts, so all must be paused while weights change, but {running[0]} is NORMAL; pause "
                "the engine first and resume it afterwards",
                status=409,
                code="engine_state",
            )

    def _check_last(self, order: Undo) -> None:
        if order.command_id in self._open:
            raise RequestError(f"command {order.command_id} is in progress; try again when it has finished", status=409)
        if order.command_id != self._last[0]:
            raise RequestError(f"command {order.command_id} is not the last that changed the weights", status=404)

    def _records(self) -> dict[str, WeightsRecord]:
        try:
            return {scheduler: self._run.weights(scheduler) for scheduler in self._schedulers}
        except TokamakError:  # it cannot be taken back
            return {}

    def _state_of(self, scheduler: str) -> WeightsState:
        try:
            return self._run.weights(scheduler).state
        except TokamakError as error:
            raise RequestError(str(error), status=503) from error

    def _prepare(self, opened: _OpenCommand) -> None:
        """Remember the current records, and choose a version number that no replica has used."""
        busy = next((other for other in self._open.values() if other.changes_weights), None)
        if busy is not None:
            raise RequestError(
                f"{type(busy.command.order).__name__} is in progress in {', '.join(sorted(busy.unanswered))}; try again when "
                "it has finished",
                status=409,
            )
        try:
            opened.before = {scheduler: self._run.weights(scheduler) for scheduler in self._schedulers}
        except TokamakError as error:
            raise RequestError(str(error), status=503) from error
        order = opened.command.order
        if isinstance(order, ReloadWeights):
            version = 1 + max(record.last_version for record in opened.before.values())
            opened.command.order = replace(order, ranks=[], version=version)

    def _tell_next(self, opened: _OpenCommand) -> None:
        """Send the command to the next scheduler, or to all."""
        is_one_by_one = isinstance(opened.command.order, ReloadWeights)
        while opened.untold and not opened.failures:
            scheduler = opened.untold.pop(0)
            self._send(opened, scheduler, self._order_for(opened, scheduler))
            if is_one_by_one:
                return

    def _order_for(self, opened: _OpenCommand, scheduler: str) -> Order:
        """Return the command for a scheduler; if another replica has loaded the weights already, with the contents found
        there."""
        order = opened.command.order
        if isinstance(order, Undo):
            return ReturnToWeights(self._last[1][scheduler])
        if isinstance(order, ReloadWeights) and opened.done:
            found = self._run.weights(next(iter(opened.done))).contents.get(order.version, "")
            return replace(order, contents=found)
        return order

    def _send(self, opened: _OpenCommand, scheduler: str, order: Order, suffix: str = "") -> None:
        trouble = self._tell(scheduler, Command(f"{opened.command.command_id}/{scheduler}{suffix}", order))
        if not trouble:
            opened.unanswered.add(scheduler)
        elif suffix:
            opened.notes.append(f"{scheduler} could not roll back: {trouble}")
        else:
            opened.failures[scheduler] = Reply(opened.command.command_id, 503, trouble)

    def _advance(self, opened: _OpenCommand) -> None:
        """When all have answered, roll back what only some have done, and answer."""
        if opened.unanswered:
            return
        if opened.failures and opened.done and opened.before and not opened.is_going_back:
            opened.is_going_back = True
            for scheduler in opened.done:
                self._send_back(opened, scheduler)
            if opened.unanswered:
                return
        if self._open.pop(opened.command.command_id, None) is not None:
            if opened.origin and opened.done and not opened.failures:
                self._last = ("", {}) if isinstance(opened.command.order, Undo) else (opened.command.command_id, opened.origin)
            self._answer(_answer_of(opened))

    def _send_back(self, opened: _OpenCommand, scheduler: str) -> None:
        """Send a roll-back to a scheduler, or when it is ready again if it is dead."""
        opened.unanswered.add(scheduler)
        before = opened.before[scheduler]
        self._tell(scheduler, Command(f"{opened.command.command_id}/{scheduler}{_BACK}", ReturnToWeights(before)))

    def _write_back(self, opened: _OpenCommand, scheduler: str) -> None:
        """Restore the record of a dead scheduler from before the command. Its next life reads it."""
        if scheduler not in opened.before:
            return
        before = opened.before[scheduler]
        try:
            last_version = max(before.last_version, self._run.weights(scheduler).last_version)
            self._run.write_weights(replace(before, last_version=last_version), scheduler)
        except (OSError, TokamakError) as error:
            opened.notes.append(f"{scheduler} could not roll back: {error}")


def changes_weights(order: Order) -> bool:
    """Return whether a command changes weights, or whether the engine generates."""
    return not isinstance(order, (AbortRequest, ResetPrefixCache, ResetEncoderCache))


def _answer_of(opened: _OpenCommand) -> Reply:
    """Combine the replies of all replicas."""
    command_id = opened.command.command_id
    is_abort = isinstance(opened.command.order, AbortRequest)
    if opened.failures and not (is_abort and opened.done):  # an abort is done once the replica with the request has done it
        scheduler, failure = next(iter(opened.failures.items()))
        parts = [failure.message]
        if opened.before and scheduler not in failure.message:
            parts[0] = f"{scheduler}: {failure.message}"
        if opened.is_going_back:
            parts.append(f"{', '.join(opened.done)} rolled back")
        return Reply(command_id, failure.status, "; ".join([*parts, *opened.notes]), failure.details)
    replies = list(opened.done.values())
    if len(replies) == 1:
        return Reply(command_id, replies[0].status, replies[0].message, replies[0].details)
    if is_abort:
        num_aborted = sum(int(str(reply.details["num_aborted"])) for reply in replies)
        return Reply(command_id, 200, f"aborted {num_aborted} sequences", {"num_aborted": num_aborted})
    details: Details = {
        key: value for key, value in replies[0].details.items() if all(reply.details.get(key) == value for reply in replies)
    }
    if details != replies[0].details:
        details["replicas"] = [{"scheduler": name, **reply.details} for name, reply in opened.done.items()]  # type: ignore[dict-item]
    return Reply(command_id, 200, replies[0].message, details)


def spoken(scheduler: str) -> str:
    """Return the name of a scheduler for an operator; empty if there is only one."""
    return "the scheduler" if scheduler == "scheduler" else scheduler
