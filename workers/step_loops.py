"""Step loops: run each step when it arrives, or together with all ranks that share experts. Used by the actor."""

from __future__ import annotations

import time
from typing import Protocol

from engine.messages import Membership, Message, Step, decode
from engine.process.context import ActorContext
from shm.broadcast import BroadcastReader
from workers.rank_group.communicator import RankGroupBroken
from workers.rank_group.membership import RankGroupMember, SingleRank
from workers.rank_group.shared_step_queue import SharedStepQueue
from workers.step_runs import StepRuns
from workers.worker_metrics import WorkerMetrics


class Handler(Protocol):
    """The worker actor, as a step loop calls it."""

    def carry_out(self, message: Message) -> None:
        """Handle a message of the broadcast ring that is not a Step."""

    def send_hello(self) -> None:
        """Join the rank group's epoch and tell the scheduler."""


class StepLoop(Protocol):
    def do_work(self) -> int:
        """Handle new messages and run a step; return the number of things done."""

    def join(self) -> bool:
        """Join the rank group's present epoch. Return whether this rank sends a Hello in it: a rank that will be a member waits
        until it is one."""

    def wait(self, timeout_ns: int) -> None:
        """Sleep until a message arrives, at most `timeout_ns`."""

    def close(self) -> None: ...


class OwnStepLoop:
    """Runs each step when it arrives; results follow in order. For a single rank and for tensor ranks."""

    def __init__(
        self,
        context: ActorContext,
        reader: BroadcastReader,
        runs: StepRuns,
        group: SingleRank | RankGroupMember,
        handler: Handler,
    ) -> None:
        self._context = context
        self._reader = reader
        self._runs = runs
        self._group = group
        self._handler = handler

    def do_work(self) -> int:
        num_done = 0
        for payload in self._reader.receive(max_records=1):
            received_ns = time.monotonic_ns()
            message = decode(payload)
            if isinstance(message, Step):
                self._take(message, received_ns)
            else:
                self._handler.carry_out(message)
            num_done += 1
        if self._runs.num_started and not num_done:  # no step may start before the first result
            self._runs.finish()
            num_done += 1
        return num_done

    def join(self) -> bool:
        return self._group.join()

    def wait(self, timeout_ns: int) -> None:
        self._reader.wait(timeout_ns)

    def close(self) -> None:
        """Do nothing: the actor owns the reader."""

    def _take(self, step: Step, received_ns: int) -> None:
        """Run a step of this epoch. A step of another epoch is skipped, and one in which a rank dies is dropped; the scheduler
        sends both again after a Hello of every rank."""
        if not self._runs.weight_version:
            self._runs.refuse(step)
        elif step.rank_group_epoch == self._group.epoch:
            try:
                self._runs.start(step, received_ns)
                while self._runs.is_full:
                    self._runs.finish()
            except RankGroupBroken as broken:
                self._context.log.info("dropped step %d: %s", step.step_id, broken.args[0])
                self._handler.send_hello()


class SharedStepLoop:
    """Runs every step of a rank group that shares experts, with this replica's next Step or without rows."""

    def __init__(
        self,
        context: ActorContext,
        queue: SharedStepQueue,
        runs: StepRuns,
        group: SingleRank | RankGroupMember,
        metrics: WorkerMetrics,
        handler: Handler,
    ) -> None:
        self._context = context
        self._queue = queue
        self._runs = runs
        self._group = group
        self._metrics = metrics
        self._handler = handler
        self._takes_part = True  # in the rank group, as reported to the supervisor

    def do_work(self) -> int:
        if self._queue.can_sleep_on:
            return 0
        received_ns = time.monotonic_ns()
        num_done = self._queue.receive()
        for grammar in self._queue.take_grammars():
            self._handler.carry_out(grammar)
        message = self._queue.next_message()
        if message is not None:
            self._handler.carry_out(message)
            self._tell_membership()
            return num_done + 1
        if not self._queue.has_turn(self._runs.weight_version > 0):
            return num_done
        try:
            self._run_next(received_ns)
        except RankGroupBroken as broken:
            self._context.log.info("dropped an expert-parallel step: %s", broken.args[0])
            self._handler.send_hello()
        return num_done + 1

    def join(self) -> bool:
        self._tell_membership()
        is_member = self._group.join()
        self._queue.join()
        return is_member or not self._takes_part

    def wait(self, timeout_ns: int) -> None:
        self._queue.wait(timeout_ns)

    def close(self) -> None:
        self._queue.close()

    def _tell_membership(self) -> None:
        """Take part while there are weights. Without them the peers would wait for this rank, so they compute its experts."""
        has_weights = self._runs.weight_version > 0
        if has_weights != self._takes_part:
            self._takes_part = has_weights
            self._context.events.send(Membership(self._context.name, self._context.epoch, has_weights))

    def _run_next(self, received_ns: int) -> None:
        step = self._queue.begin_turn(self._runs.weight_version)
        if step is None:
            self._runs.run_without_rows(received_ns)
        else:
            self._runs.start(step, received_ns)
            result = self._runs.result()
        self._queue.end_turn()
        if step is None:
            self._metrics.empty_rank_group_steps.add(1)
        self._metrics.rank_group_steps.add(1)
        if step is not None:
            self._runs.send(result)
        self._runs.draft()
