"""A rank's steps in a rank group that shares experts: which step of the clock it runs next, and which of its replica's Steps
belongs to it.

Used by the worker. Messages of the broadcast ring wait here in order. A Step waits for a step of the rank group: tensor rank 0
begins one for it, or joins one that another replica began; its tensor peers follow. Other messages are handled between two
steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from engine.messages import CompileGrammar, Message, Step, decode
from shm import rank_group as arena
from shm.broadcast import BroadcastReader, ReaderBells
from workers.rank_group.balancer import Balancer, FixedPlacement
from workers.rank_group.clock import RankGroupClock
from workers.rank_group.communicator import Communicator
from workers.rank_group.experts import ExpertRank

_NO_STEP = -1
_SLICE_NS = 100_000_000  # of a wait for a Step, between two heartbeats


class SharedStepQueue:
    """`tensor`: the ranks with the same rows. `bells`: of all readers of all replicas' rings. `beat` reports progress of the
    rank."""

    def __init__(
        self,
        experts: ExpertRank,
        tensor: Communicator,
        reader: BroadcastReader,
        bells: Sequence[ReaderBells],
        beat: Callable[[], None],
        balancer: Balancer | FixedPlacement,
    ) -> None:
        self._experts = experts
        self._balancer = balancer
        self._tensor = tensor
        self._reader = reader
        self._bells = bells
        self._beat = beat
        self._clock = RankGroupClock(experts.communicator)
        self._waiting: deque[Message] = deque()
        self._grammars: list[CompileGrammar] = []
        self._has_weights = True
        self._has_slept = False  # the last wait ended without an event

    def join(self) -> None:
        """Join the rank group's epoch, after the communicator of `tensor`."""
        self._has_slept = False
        self._clock.join(self._experts.join())
        self._balancer.join()

    @property
    def can_sleep_on(self) -> bool:
        """Return whether nothing has happened since the last wait. An idle rank checks only ten times a second."""
        return self._has_slept and self._balancer.is_settled

    def receive(self) -> int:
        """Receive messages, and return how many."""
        self._balancer.advance(time.monotonic())
        messages = [decode(payload) for payload in self._reader.receive()]
        self._waiting += [message for message in messages if not isinstance(message, CompileGrammar)]
        self._grammars += [message for message in messages if isinstance(message, CompileGrammar)]
        return len(messages)

    def take_grammars(self) -> list[CompileGrammar]:
        """Take the grammars, which need no step."""
        grammars, self._grammars = self._grammars, []
        return grammars

    def next_message(self) -> Message | None:
        """Return the next message that is not a Step and need not wait for one. Steps of another epoch are dropped."""
        while self._waiting:
            message = self._waiting[0]
            if not isinstance(message, Step):
                return self._waiting.popleft()
            if message.rank_group_epoch == self._tensor.epoch:
                break
            self._waiting.popleft()
        return None

    def has_turn(self, has_weights: bool) -> bool:
        """Return whether this rank should run a step now. If it has rows and no earlier step, it begins one. Without weights it
        runs none, and soon stops being a member."""
        self._has_weights = has_weights
        if not has_weights:
            return False
        has_rows = bool(self._waiting) and self._tensor.place == 0 and self._tensor.is_whole
        wants_step = has_rows or self._balancer.wants_step
        if wants_step and not self._clock.is_ahead and self._clock.begin():
            for bells in self._bells:
                bells.ring()
        return self._clock.is_ahead

    def begin_turn(self, weight_version: int) -> Step | None:
        """Return the Step of this step of the rank group; None: this rank has no rows in it. Raises RankGroupBroken."""
        number = self._clock.num_done + 1
        self._balancer.begin_step(number)
        self._experts.begin_step(number, weight_version)
        if not self._tensor.is_whole:  # its replica has no rows, others have
            return None
        step_id = self._waiting[0].step_id if self._waiting and isinstance(self._waiting[0], Step) else _NO_STEP
        if self._tensor.count > 1:
            self._tensor.begin_step(number)
            step_id = int(self._tensor.broadcast(np.array([step_id], np.int64))[0])
        return None if step_id == _NO_STEP else self._awaited(step_id)

    def end_turn(self) -> None:
        self._clock.end_step()

    def wait(self, timeout_ns: int) -> None:
        """Wait for a message or another step of the rank group."""
        if not self._has_slept:
            header = self._experts.communicator.header
            clock = header.clock
            if self._clock.is_beyond(clock) and self._has_weights:
                return
            self._reader.watch(header.memory, arena.CLOCK, clock)
        self._has_slept = not self._reader.wait(timeout_ns)

    def close(self) -> None:
        self._balancer.close()
        for bells in self._bells:
            bells.close()

    def _awaited(self, step_id: int) -> Step:
        """Return that Step, which tensor rank 0 has received, so every peer will. No other message precedes it, because a rank
        with one to handle names no Step."""
        while True:
            message = self.next_message()
            assert message is None, (
                f"{type(message).__name__} is queued before step {step_id}, which rank {self._tensor.rank} must run"
            )
            if self._waiting:
                step = self._waiting.popleft()
                assert isinstance(step, Step)
                if step.step_id == step_id:
                    return step
                continue
            self._reader.wait(_SLICE_NS)
            self._beat()
            self._tensor.native.check_epoch()
            self.receive()
