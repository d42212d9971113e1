"""Weights of a rank: loaded at the start, changed while the API stays up, cleared. Owned by the worker actor.

Progress goes to the supervisor, which shows it on the terminal beside the actor; it also counts as a heartbeat.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engine.errors import CheckpointError, ContentsError, TokamakError, sayable
from engine.messages import ActorState, LoadWeights, WeightsChanged
from engine.process.context import ActorContext
from shm.counters import State
from workers.worker_metrics import WorkerMetrics

if TYPE_CHECKING:
    from workers.runners import Runner

_PROGRESS_PARTS = 20
_MIB = 1 << 20


def tell_progress(context: ActorContext, text: str) -> None:
    """Show `text` beside this actor until it is ready."""
    context.row.beat(time.monotonic_ns())
    context.events.send(ActorState(context.name, context.epoch, State.LOADING.name, text))


class WeightLoader:
    """Loads weights into a runner."""

    def __init__(self, context: ActorContext, runner: Runner, metrics: WorkerMetrics) -> None:
        self._context = context
        self._runner = runner
        self._metrics = metrics

    def load_in_use(self, *, only_exact: bool) -> None:
        """Load the weights that the engine uses now.

        If their contents are gone from the disk, load what the checkpoint has instead, or nothing; version and contents tell
        the scheduler that these are not the ones in use. `only_exact`: never load other contents under the same version,
        because this rank computes other replicas' rows. Raises CheckpointError at a first start.
        """
        path, version, contents = self._context.weights_in_use()
        try:
            try:
                self._load(path, version, contents)
            except ContentsError as error:
                if only_exact:
                    raise
                self._record_lost(path, error)
                self._load(path, version)
        except CheckpointError as error:
            if self._context.epoch == 1:
                raise
            self._record_lost(path, error)

    def change(self, message: LoadWeights) -> WeightsChanged:
        """Load other weights beside the present ones, which stay in use if that fails. Return the weights in use afterwards."""
        before = self._context.row.state
        self._context.row.set_state(State.LOADING)
        text = ""
        try:
            self._load(message.path, message.version, message.contents)
        except Exception as error:  # any error: the present weights stay in use
            cause = str(error) if isinstance(error, TokamakError) else repr(error)
            is_known = isinstance(error, CheckpointError)
            text = cause if is_known else sayable(f"{message.path} cannot be loaded: {cause}")
            self._context.log.error("weights %s were not loaded: %s", message.path, text)
        self._context.row.set_state(before)
        return self._changed(message.command_id, text)

    def clear(self, command_id: str) -> WeightsChanged:
        """Drop the weights."""
        self._runner.core.clear()
        self._metrics.show_weights(self._runner.core)
        return self._changed(command_id)

    def _changed(self, command_id: str, error: str = "") -> WeightsChanged:
        weights = self._runner.core.weights
        return WeightsChanged(command_id, self._context.tensor_rank, weights.version, weights.path, error, weights.contents)

    def _record_lost(self, path: str, error: CheckpointError) -> None:
        self._context.log.error("weights %s cannot be reloaded: %s", path, error)
        self._context.counters.errors.record(self._context.name, str(error))

    def _load(self, path: str, version: int, contents: str = "") -> None:
        """Load weights, with these contents if given. Raises CheckpointError; the present ones then stay in use."""
        begin_ns = time.monotonic_ns()
        shown_part = -1

        def on_progress(num_done: int, num_bytes: int) -> None:
            nonlocal shown_part
            self._context.row.beat(time.monotonic_ns())
            part = num_done * _PROGRESS_PARTS // max(num_bytes, 1)
            if part != shown_part:
                shown_part = part
                bar = "#" * part + "." * (_PROGRESS_PARTS - part)
                tell_progress(self._context, f"weights [{bar}] {num_done / _MIB:.0f} of {num_bytes / _MIB:.0f} MiB")

        self._runner.core.load(path, version, on_progress, contents)
        self._metrics.loaded(self._runner.core, time.monotonic_ns() - begin_ns)
