"""Operators' commands to the scheduler: pause, resume, reload, clear, reset the caches, abort.

Used by the scheduler process alone. A command is checked here, and either answered at once or passed to `weight_updates.py`,
which replies when it is done.
"""

from __future__ import annotations

from engine.errors import RequestError
from engine.messages import (
    AbortRequest,
    Command,
    DropWeights,
    Order,
    Pause,
    ReloadWeights,
    Reply,
    ResetEncoderCache,
    ResetPrefixCache,
    Resume,
    ReturnToWeights,
    WeightsState,
)
from engine.messages.control import WEIGHT_MODES
from engine.scheduler.aborts import Aborts
from engine.scheduler.ranks import Ranks
from engine.scheduler.weight_state import WeightState
from engine.scheduler.weight_updates import WeightUpdates

LEVELS = ("pause", "sleep")


class SchedulerCommands:
    """Checks commands and carries them out."""

    def __init__(self, weights: WeightState, ranks: Ranks, aborts: Aborts, updates: WeightUpdates) -> None:
        self._weights = weights
        self._ranks = ranks
        self._aborts = aborts
        self._updates = updates

    def handle(self, command: Command) -> Reply | None:
        """Reply to a command, or begin it and return None: its Reply is sent when it is done."""
        try:
            return self._begin_order(command.command_id, command.order)
        except RequestError as error:
            return Reply(command.command_id, error.status, error.message)

    def _begin_order(self, command_id: str, order: Order) -> Reply | None:
        match order:
            case AbortRequest(request_id):
                num_aborted = self._aborts.abort_request(request_id)
                if not num_aborted:
                    raise RequestError(f"no running or waiting request has the id {request_id!r}", status=404)
                return Reply(command_id, 200, f"aborted {num_aborted} sequences", {"num_aborted": num_aborted})
            case ResetPrefixCache():
                self._updates.clear_prefix_cache()
                return Reply(command_id, 200, "cleared the prefix cache")
            case ResetEncoderCache():
                self._updates.clear_encoder_cache()
                return Reply(command_id, 200, "cleared the encoder cache")
            case Resume():
                return self._resume(command_id)
            case Pause(mode, level):
                _check(mode, WEIGHT_MODES, "mode")
                _check(level, LEVELS, "level")
                self._pause(command_id, mode, clears=level == "sleep")
            case DropWeights(mode):
                _check(mode, WEIGHT_MODES, "mode")
                self._pause(command_id, mode, clears=True)
            case ReloadWeights(mode=mode):
                _check(mode, WEIGHT_MODES, "mode")
                self._reload(command_id, order)
            case ReturnToWeights(record):
                self._updates.return_to(command_id, record)
            case _:
                raise RequestError(f"the scheduler does not support the command {type(order).__name__}")
        return None

    def _pause(self, command_id: str, mode: str, clears: bool) -> None:
        name = "clear the weights" if clears else "pause"
        self._updates.refuse_while_changing(name)
        after = self._weights.in_state(WeightsState.CLEARED if clears else WeightsState.PAUSED)
        self._updates.begin(command_id, name, mode, after)

    def _resume(self, command_id: str) -> Reply | None:
        self._updates.refuse_while_changing("resume")
        after = self._weights.in_state(WeightsState.NORMAL)
        if self._weights.state is WeightsState.CLEARED:
            self._updates.begin(command_id, "resume", "keep", after)
            return None
        self._weights.check("resume")
        self._updates.write(after)
        return Reply(command_id, 200, "resumed", self._updates.details())

    def _reload(self, command_id: str, order: ReloadWeights) -> None:
        self._updates.refuse_while_changing("load weights")
        unknown = [rank for rank in order.ranks if rank not in self._ranks.all]
        if unknown:
            raise RequestError(
                f"rank {unknown[0]} does not exist; the engine has ranks 0 to {len(self._ranks.all) - 1}", param="ranks"
            )
        self._updates.write(self._weights.with_next_version(order.version))
        after = self._weights.loaded(order.path or self._weights.path, order.ranks or self._ranks.all, order.contents)
        self._updates.begin(command_id, "load weights", order.mode, after)


def _check(value: str, allowed: tuple[str, ...], param: str) -> None:
    if value not in allowed:
        raise RequestError(f"{param} is {value!r}, must be one of {', '.join(allowed)}", param=param)
