"""When a rank runs which step: as soon as it comes, or in turn with all ranks that share the experts. Used by the actor."""

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


class Orders(Protocol):
    """The worker actor, as a step loop calls it."""

    def carry_out(self, message: Message) -> None:
        """Carry out a message of the broadcast ring that is no Step."""

    def send_hello(self) -> None:
        """Join the rank group's epoch and tell the scheduler."""


class StepLoop(Protocol):
    def do_work(self) -> int:
        """Take what came and run a step; return how many things were done."""

    def join(self) -> bool:
        """Join the rank group's present epoch. Return whether this rank says hello in it: a rank that is to be a member waits
        until it is one."""

    def wait(self, timeout_ns: int) -> None:
        """Sleep until something comes, at most `timeout_ns`."""

    def close(self) -> None: ...


class OwnStepLoop:
    """Runs each step as soon as it comes; results follow in order. For a single rank and for tensor ranks."""

    def __init__(
        self,
        context: ActorContext,
        reader: BroadcastReader,
        runs: StepRuns,
        group: SingleRank | RankGroupMember,
        orders: Orders,
    ) -> None:
        self._context = context
        self._reader = reader
        self._runs = runs
        self._group = group
        self._orders = orders

    def do_work(self) -> int:
        num_done = 0
        for payload in self._reader.receive(max_records=1):
            received_ns = time.monotonic_ns()
            message = decode(payload)
            if isinstance(message, Step):
                self._take(message, received_ns)
            else:
                self._orders.carry_out(message)
            num_done += 1
        if self._runs.num_started and not num_done:  # there is no step to start before the first one's result
            self._runs.finish()
            num_done += 1
        return num_done

    def join(self) -> bool:
        return self._group.join()

    def wait(self, timeout_ns: int) -> None:
        self._reader.wait(timeout_ns)

    def close(self) -> None:
        """The reader is the actor's."""

    def _take(self, step: Step, received_ns: int) -> None:
        """Run a step of this epoch. A step of another epoch is left alone, and one in which a rank dies is dropped: the
        scheduler sends both again once all ranks have said hello."""
        if not self._runs.weight_version:
            self._runs.refuse(step)
        elif step.rank_group_epoch == self._group.epoch:
            try:
                self._runs.start(step, received_ns)
                while self._runs.is_full:
                    self._runs.finish()
            except RankGroupBroken as broken:
                self._context.log.info("dropped step %d: %s", step.step_id, broken.args[0])
                self._orders.send_hello()


class SharedStepLoop:
    """Runs every step of a rank group that shares experts, with this replica's next Step or without rows."""

    def __init__(
        self,
        context: ActorContext,
        queue: SharedStepQueue,
        runs: StepRuns,
        group: SingleRank | RankGroupMember,
        metrics: WorkerMetrics,
        orders: Orders,
    ) -> None:
        self._context = context
        self._queue = queue
        self._runs = runs
        self._group = group
        self._metrics = metrics
        self._orders = orders
        self._takes_part = True  # in the rank group, as the supervisor knows it

    def do_work(self) -> int:
        if self._queue.can_sleep_on:
            return 0
        received_ns = time.monotonic_ns()
        num_done = self._queue.receive()
        for grammar in self._queue.take_grammars():
            self._orders.carry_out(grammar)
        order = self._queue.next_order()
        if order is not None:
            self._orders.carry_out(order)
            self._tell_membership()
            return num_done + 1
        if not self._queue.has_turn(self._runs.weight_version > 0):
            return num_done
        try:
            self._run_next(received_ns)
        except RankGroupBroken as broken:
            self._context.log.info("dropped an expert-parallel step: %s", broken.args[0])
            self._orders.send_hello()
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
        """Take part while there are weights. Without them the peers would wait for this rank; so they compute its experts."""
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
