"""Operators' orders at the scheduler: pause, resume, reload, clear, reset the prefix cache, abort.

Used by the scheduler process alone. An order about the weights is a `Change` in two phases: first the sequences come to rest,
as its mode says and until no step is in flight; then the ranks are told, and when all have answered it is done. Only then is
its Reply sent. One change at a time; another order meanwhile is a 409.

The scheduler's `WeightState` are the truth that all ranks are held to: a rank that shows up with others (it died in the middle
of a change, or its scheduler did) is made to load those in use before the next step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engine.errors import RequestError
from engine.messages import (
    AbortRequest,
    ClearWeights,
    Command,
    DropWeights,
    LoadWeights,
    Order,
    Pause,
    ReloadWeights,
    Reply,
    ResetPrefixCache,
    Resume,
    WeightsChanged,
    WeightsInUse,
    WeightsState,
)
from engine.messages.control import WEIGHT_MODES
from engine.process.context import ActorContext
from engine.scheduler.aborts import Aborts
from engine.scheduler.batch_state import BatchState
from engine.scheduler.block_events import BlockEvents
from engine.scheduler.dispatch import Dispatcher
from engine.scheduler.ranks import Ranks
from engine.scheduler.weight_state import WeightState, conflict

Details = dict[str, int | float | str | list[dict[str, int | float | str | None]] | None]  # of a Reply

LEVELS = ("pause", "sleep")


class Phase(Enum):
    RESTING = "waiting for the sequences to come to rest"
    TELLING = "waiting for the ranks"


@dataclass(slots=True)
class Change:
    """An order about the weights that is being carried out. `tell` is what the ranks must do; None: nothing."""

    command_id: str  # as the ranks hear it
    name: str
    mode: str
    tell: LoadWeights | ClearWeights | None = None
    phase: Phase = Phase.RESTING
    is_ordered: bool = True  # False: the scheduler's own, nobody waits for a Reply
    unanswered: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)


class WeightUpdates:
    """Takes orders and carries out the one about the weights that is under way."""

    def __init__(
        self,
        context: ActorContext,
        weights: WeightState,
        batch: BatchState,
        dispatcher: Dispatcher,
        ranks: Ranks,
        aborts: Aborts,
        block_events: BlockEvents,
    ) -> None:
        self._context = context
        self._weights = weights
        self._batch = batch
        self._dispatcher = dispatcher
        self._ranks = ranks
        self._aborts = aborts
        self._block_events = block_events
        self._change: Change | None = None
        self._num_repairs = 0

    @property
    def can_dispatch(self) -> bool:
        """Samples may be given tokens: nothing is going on, or they may run to their end first."""
        if self._change is None:
            return self._is_normal
        return self._change.phase is Phase.RESTING and self._change.mode == "wait"

    @property
    def _is_normal(self) -> bool:
        return self._weights.state is WeightsState.NORMAL

    def handle(self, command: Command) -> Reply | None:
        """Answer an order, or begin it: then None, and its Reply is sent when it is done."""
        try:
            return self._begin_order(command.command_id, command.order)
        except RequestError as error:
            return Reply(command.command_id, error.status, error.message)

    def advance(self) -> int:
        """Take the change under way to its next phase if it can, or begin to repair a rank's weights. 1 where something was
        done."""
        change = self._change
        if change is None:
            return self._repair()
        if change.phase is Phase.TELLING or not self._is_at_rest(change):
            return 0
        self._batch.waiting.let_in()
        if change.tell is None:
            self._end(change, 200, "paused")
            return 1
        change.phase = Phase.TELLING
        change.unanswered = set(self._ranks.all)
        if isinstance(change.tell, LoadWeights) and change.tell.ranks:
            change.unanswered = set(change.tell.ranks)
        self._dispatcher.send(change.tell)
        return 1

    def rank_answered(self, answer: WeightsChanged) -> None:
        """A rank has carried out LoadWeights or ClearWeights, or says why not."""
        change = self._change
        if change is None or change.phase is not Phase.TELLING or answer.command_id != change.command_id:
            if not answer.error:  # told by a scheduler that died: what it computes now is not what is in use
                self._ranks.changed(answer.rank, answer.path, answer.version)
                self._dispatcher.give_up_flight()
                self._batch.rollback_in_flight()
            return
        change.unanswered.discard(answer.rank)
        if answer.error:
            change.errors.append(f"worker{answer.rank}: {answer.error}")
        else:
            self._ranks.changed(answer.rank, answer.path, answer.version)
        if change.unanswered:
            return
        if not change.errors:
            self._succeed(change)
        else:
            self._fail(change, 400 if isinstance(change.tell, LoadWeights) else 500, "; ".join(change.errors))

    def rank_came_back(self, rank: int) -> None:
        """A rank was started again: what it was told is lost, and it holds what was in use before."""
        change = self._change
        if change is None or change.phase is not Phase.TELLING:
            return
        if isinstance(change.tell, ClearWeights):
            self._dispatcher.send(change.tell)
            change.unanswered.add(rank)
        elif change.tell is not None:
            self._fail(change, 503, f"worker{rank} died while it loaded {change.tell.path}")

    # ------------------------------------------------------------------------------------------------- taking orders

    def _begin_order(self, command_id: str, order: Order) -> Reply | None:
        match order:
            case AbortRequest(request_id):
                num_aborted = self._aborts.abort_request(request_id)
                if not num_aborted:
                    raise RequestError(f"no running or waiting request has the id {request_id!r}", status=404)
                return Reply(command_id, 200, f"{num_aborted} sequences aborted", {"num_aborted": num_aborted})
            case ResetPrefixCache():
                self._clear_prefix_cache()
                return Reply(command_id, 200, "the prefix cache is empty")
            case Resume():
                return self._resume(command_id)
            case Pause(mode, level):
                _check(mode, WEIGHT_MODES, "mode")
                _check(level, LEVELS, "level")
                self._pause(command_id, mode, clears=level == "sleep")
            case DropWeights(mode):
                _check(mode, WEIGHT_MODES, "mode")
                self._pause(command_id, mode, clears=True)
            case ReloadWeights(path, mode, ranks):
                _check(mode, WEIGHT_MODES, "mode")
                self._reload(command_id, path, mode, ranks)
            case _:
                raise RequestError(f"the scheduler does not take {type(order).__name__}")
        return None

    def _pause(self, command_id: str, mode: str, clears: bool) -> None:
        name = "clear the weights" if clears else "pause"
        self._refuse_while_changing(name)
        was_normal = self._is_normal
        if was_normal or not clears or self._weights.state is WeightsState.CLEARED:
            self._weights.pause()
        self._begin(Change(command_id, name, mode, ClearWeights(command_id) if clears else None), was_normal)

    def _resume(self, command_id: str) -> Reply | None:
        self._refuse_while_changing("resume")
        if self._weights.state is not WeightsState.CLEARED:
            self._weights.resume()
            return Reply(command_id, 200, "resumed", self._details())
        self._weights.begin_load()
        tell = LoadWeights(command_id, self._weights.path, self._weights.version, [])
        self._begin(Change(command_id, "wake", "keep", tell), was_normal=False)
        return None

    def _reload(self, command_id: str, path: str, mode: str, ranks: list[int]) -> None:
        self._refuse_while_changing("load weights")
        unknown = [rank for rank in ranks if rank not in self._ranks.all]
        if unknown:
            raise RequestError(
                f"there is no rank {unknown[0]}; the engine has ranks 0 to {len(self._ranks.all) - 1}", param="ranks"
            )
        was_normal = self._is_normal
        self._weights.begin_load()
        tell = LoadWeights(command_id, path or self._weights.path, self._weights.version + 1, ranks)
        self._begin(Change(command_id, "load weights", mode, tell), was_normal)

    def _refuse_while_changing(self, name: str) -> None:
        if self._change is not None:
            raise conflict(
                f"cannot {name}: the engine is {self._weights.state.name}, an order to {self._change.name} is under way "
                f"({self._change.phase.value}); ask again when it is answered"
            )

    # --------------------------------------------------------------------------------------------- carrying them out

    def _begin(self, change: Change, was_normal: bool) -> None:
        """Bring the sequences to rest as the mode says; where the engine did not run, there is nothing to wait for."""
        if change.mode == "wait" and not was_normal:
            change.mode = "keep"
        self._change = change
        match change.mode:
            case "abort":
                self._aborts.abort_all()
            case "wait":
                self._batch.waiting.hold()
            case "requeue":
                self._batch.preempt_all()

    def _is_at_rest(self, change: Change) -> bool:
        """Nothing runs on the ranks, or will, and all of them would hear what they are told."""
        batch = self._batch
        if self._dispatcher.num_in_flight or self._dispatcher.has_unsent or batch.num_leaving:
            return False
        if change.mode == "wait" and (len(batch.running) or len(batch.waiting)):
            return False
        return change.tell is None or self._ranks.are_complete

    def _succeed(self, change: Change) -> None:
        weights = self._weights
        if isinstance(change.tell, LoadWeights):
            if change.is_ordered:
                self._ranks.expect(change.tell.ranks, change.tell.path, change.tell.version)
                weights.finish_load(change.tell.path, change.tell.version)
                self._context.events.send(WeightsInUse(weights.path, weights.version))
            else:
                weights.finish_load(weights.path, weights.version)
            message = f"version {weights.version} of the weights is in use"
        else:
            if weights.state is not WeightsState.CLEARED:
                weights.clear()
            message = "the weights are cleared"
        self._clear_prefix_cache()
        self._end(change, 200, message)

    def _fail(self, change: Change, status: int, cause: str) -> None:
        """Back to what was; `_repair` sees to ranks that did change."""
        if isinstance(change.tell, LoadWeights):
            self._weights.fail_load()
        if not change.is_ordered:
            self._adopt(cause)
        self._end(change, status, f"{cause}; version {self._weights.version} stays in use")

    def _end(self, change: Change, status: int, message: str) -> None:
        self._change = None
        if change.is_ordered:
            self._context.events.send(Reply(change.command_id, status, message, self._details()))

    def _details(self) -> Details:
        return {"state": self._weights.state.name, "weight_version": self._weights.version, "path": self._weights.path}

    def _clear_prefix_cache(self) -> None:
        self._batch.pool.clear()
        self._block_events.cleared()

    # -------------------------------------------------------------------------------------------------------- repair

    def _repair(self) -> int:
        """Where ranks hold other weights than they should, make them load those."""
        weights = self._weights
        is_cleared = weights.state is WeightsState.CLEARED
        wrong = self._ranks.with_wrong_weights(is_cleared)
        if not wrong or not self._ranks.are_complete:
            return 0
        if not is_cleared and self._ranks.are_cleared:  # by order of a scheduler that died
            if self._is_normal:
                weights.pause()
            weights.clear()
            return 1
        self._num_repairs += 1
        command_id = f"{self._context.name}-{self._context.epoch}-{self._num_repairs}"
        tell: LoadWeights | ClearWeights = ClearWeights(command_id)
        if not is_cleared:
            weights.begin_load()
            path, version = self._ranks.expected_of(wrong[0])
            tell = LoadWeights(
                command_id, path, version, [rank for rank in wrong if self._ranks.expected_of(rank)[1] == version]
            )
        self._begin(Change(command_id, "repair a rank's weights", "requeue", tell, is_ordered=False), was_normal=False)
        return 1

    def _adopt(self, cause: str) -> None:
        """The weights in use cannot be had any more: go on with what rank 0 holds, and say so."""
        path, version = self._ranks.weights_of(0)
        self._context.counters.errors.record(
            self._context.name, f"weights {self._weights.path} cannot be loaded again: {cause}"
        )
        if version:
            self._weights.path, self._weights.version = path, version
            self._ranks.expect([], path, version)
            self._context.events.send(WeightsInUse(path, version))
            self._clear_prefix_cache()


def _check(value: str, allowed: tuple[str, ...], param: str) -> None:
    if value not in allowed:
        raise RequestError(f"{param} is {value!r}, must be one of {', '.join(allowed)}", param=param)
