"""The worker actor: one rank. Takes Steps from the scheduler's broadcast ring, runs them, sends the results back.

Run by `engine.process.main` as `worker<rank>`. Owns the rank's weights, slots and plan; the KV arena that it maps outlives it.
Its life: load the weights (LOADING, with progress), join the broadcast ring at its tail, say Hello to the scheduler, then one
record a turn, so that the control ring and SIGTERM are seen between two steps. What the scheduler's ring has no room for waits
here, in order.

Imports the runner late: what it needs (Paddle, with reference ops) takes a while, and the actor says so meanwhile.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from engine.checkpoint.record import ModelRecord
from engine.errors import CheckpointError, ContentsError
from engine.messages import (
    ActorState,
    ClearWeights,
    Hello,
    LoadWeights,
    Message,
    Step,
    StepResult,
    WeightsChanged,
    decode,
)
from engine.metrics import WEIGHT_CACHE_OUTCOMES
from engine.process.actor import Actor
from engine.process.context import ActorContext
from engine.process.outbox import BackloggedOutbox
from shm.broadcast import BroadcastReader
from shm.counters import State

if TYPE_CHECKING:
    from workers.runner import ModelRunner

_PROGRESS_PARTS = 20
_MIB = 1 << 20


class WorkerActor(Actor):
    """One rank of the engine."""

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._to_scheduler = BackloggedOutbox(context.outbox(context.scheduler).send_bytes)
        self._last_end_ns = 0
        self._steps = context.counter("worker_steps_total")
        self._tokens = context.counter("worker_tokens_total")
        self._busy_seconds = context.counter("worker_busy_seconds_total")
        self._idle_seconds = context.counter("worker_idle_seconds_total")
        self._weights_bytes = context.counter("weights_bytes")
        self._weights_version = context.counter("weights_version")
        self._load_seconds = context.counter("weights_load_seconds")
        self._cache_loads = {found: context.counter("weight_cache_loads_total", found=found) for found in WEIGHT_CACHE_OUTCOMES}

    # ---------------------------------------------------------------------------------------------------------- life

    def on_start(self) -> None:
        config = self.context.config
        self._tell_progress("starting" if config.ops == "native" else "starting Paddle")
        self._runner = self._make_runner()
        self._load_what_there_is()
        self._reader = BroadcastReader.attach(
            self.context.run.run_id, self.context.scheduler, self.context.tensor_rank, self.context.epoch
        )
        self._say_hello()

    def on_stop(self) -> None:
        self._reader.leave()
        self._reader.close()

    def on_peer(self, name: str, epoch: int) -> None:
        if name == self.context.scheduler:
            self._to_scheduler.clear()  # meant for the one before
            self._say_hello()

    def step(self) -> int:
        num_done = self._to_scheduler.flush()
        for payload in self._reader.receive(max_records=1):
            self._take(decode(payload), time.monotonic_ns())
            num_done += 1
        return num_done

    def wait(self, timeout_ns: int) -> None:
        """The doorbell is the broadcast ring's; the loop looks at the control ring at least every 100 ms."""
        self._reader.wait(timeout_ns)

    def deadline_ns(self) -> int:
        return self._to_scheduler.deadline_ns()

    # ---------------------------------------------------------------------------------------------------------- work

    def _take(self, message: Message, received_ns: int) -> None:
        match message:
            case Step():
                self._send(self._run(message, received_ns) if self._runner.weights.version else self._refusal(message))
            case LoadWeights():
                if not message.ranks or self.context.tensor_rank in message.ranks:
                    self._send(self._change_weights(message))
            case ClearWeights():
                self._runner.clear()
                self._show_weights()
                self._send(self._weights_changed(message.command_id))
            case _:
                raise AssertionError(f"{type(message).__name__} has no business on the broadcast ring")

    def _run(self, step: Step, received_ns: int) -> StepResult:
        result = self._runner.run(step)
        result.received_ns = received_ns
        end_ns = time.monotonic_ns()
        if self._last_end_ns and _continues(step):
            result.idle_ns = received_ns - self._last_end_ns
            self._idle_seconds.add(result.idle_ns / 1e9)
        self._last_end_ns = end_ns
        self._steps.add(1)
        self._tokens.add(result.num_tokens)
        self._busy_seconds.add((end_ns - received_ns) / 1e9)
        return result

    def _refusal(self, step: Step) -> StepResult:
        """The answer to a step after ClearWeights: the order of a scheduler that died may lie before a step of the next."""
        error = f"step {step.step_id} came while the weights are cleared"
        return StepResult(step.step_id, self.context.tensor_rank, 0, b"", b"", b"", error=error)

    def _change_weights(self, message: LoadWeights) -> WeightsChanged:
        before = self.context.row.state
        self.context.row.set_state(State.LOADING)
        error_text = ""
        try:
            self._load(message.path, message.version, message.contents)
        except Exception as error:  # whatever is wrong with them, the present ones serve on
            error_text = str(error) if isinstance(error, CheckpointError) else f"{message.path} cannot be loaded: {error!r}"
            self.context.log.error("weights %s were not loaded: %s", message.path, error_text)
        self.context.row.set_state(before)
        return self._weights_changed(message.command_id, error_text)

    def _weights_changed(self, command_id: str, error: str = "") -> WeightsChanged:
        weights = self._runner.weights
        return WeightsChanged(command_id, self.context.tensor_rank, weights.version, weights.path, error, weights.contents)

    # ------------------------------------------------------------------------------------------------------- loading

    def _make_runner(self) -> ModelRunner:
        config = self.context.config
        from ops.cpu.progress import report_progress_to
        from workers.runner import ModelRunner

        self.context.row.beat(time.monotonic_ns())
        if config.cpu_kernels:
            self.context.log.info("kernels: %s", config.kernels_text)
        self._arena = self.context.arena()
        report_progress_to(self.context.row.heartbeat_word)
        model = ModelRecord.of_run(self.context.run.model_path).config
        return ModelRunner(config, model, self._arena.buffer, self.context.index, self._beat)

    def _load_what_there_is(self) -> None:
        """What is in use. Where that cannot be had any more, what its checkpoint holds now, else the weights of the start, else
        none: by version and contents the scheduler sees that this is not what is in use. CheckpointError at a first start."""
        tries = list(dict.fromkeys((self.context.weights_in_use(), self.context.weights_of_start())))
        while tries:
            path, version, contents = tries.pop(0)
            try:
                self._load(path, version, contents)
                return
            except CheckpointError as error:
                self.context.log.error("weights %s cannot be loaded again: %s", path, error)
                self.context.counters.errors.record(self.context.name, str(error))
                if isinstance(error, ContentsError):
                    tries.insert(0, (path, version, ""))
                elif not tries and self.context.epoch == 1:
                    raise

    def _load(self, path: str, version: int, contents: str = "") -> None:
        """Load weights, those of these contents where some are named; CheckpointError leaves the present ones."""
        begin_ns = time.monotonic_ns()
        shown_part = -1

        def on_progress(num_done: int, num_bytes: int) -> None:
            nonlocal shown_part
            self.context.row.beat(time.monotonic_ns())
            part = num_done * _PROGRESS_PARTS // max(num_bytes, 1)
            if part != shown_part:
                shown_part = part
                bar = "#" * part + "." * (_PROGRESS_PARTS - part)
                self._tell_progress(f"weights [{bar}] {num_done / _MIB:.0f} of {num_bytes / _MIB:.0f} MiB")

        self._runner.load(path, version, on_progress, contents)
        self._load_seconds.set((time.monotonic_ns() - begin_ns) / 1e9)
        if self._runner.weights.cache in self._cache_loads:
            self._cache_loads[self._runner.weights.cache].add(1)
        self._show_weights()

    def _show_weights(self) -> None:
        self._weights_bytes.set(self._runner.weights.num_bytes)
        self._weights_version.set(self._runner.weights.version)

    def _beat(self) -> None:
        """Between two ops of a step: it may take long, but it gets on."""
        self.context.row.beat(time.monotonic_ns())

    def _tell_progress(self, text: str) -> None:
        """The supervisor shows it on the terminal, beside this actor."""
        self.context.row.beat(time.monotonic_ns())
        self.context.events.send(ActorState(self.context.name, self.context.epoch, State.LOADING.name, text))

    # ------------------------------------------------------------------------------------------------------- sending

    def _say_hello(self) -> None:
        weights = self._runner.weights
        self._send(Hello(self.context.name, self.context.epoch, weights.version, weights.path, weights.contents))

    def _send(self, message: Message) -> None:
        self._to_scheduler.post(message)
        self._to_scheduler.flush()


def _continues(step: Step) -> bool:
    """Whether the step has a row of a sequence that ran before. If so the rank's idle time before it was lost to that sequence;
    else there was nothing to do."""
    started = {start.slot for start in step.starts}
    return any(slot not in started for slot in np.frombuffer(step.slots, np.int32).tolist())
