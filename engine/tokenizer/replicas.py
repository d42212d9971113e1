"""The ways from a tokenizer to the schedulers of all replicas, and which of them a sample takes.

Used by the tokenizer's loop.
"""

from __future__ import annotations

from zlib import crc32

from engine.messages import Abort, Request
from engine.process.context import ActorContext
from engine.tokenizer.scheduler_channel import SchedulerChannel

UNKNOWN = -1  # where an earlier tokenizer, or nobody yet, has sent a sample


class Replicas:
    """A channel to each scheduler."""

    def __init__(self, context: ActorContext) -> None:
        self._channels = [SchedulerChannel(context.outbox(scheduler)) for scheduler in context.schedulers]
        self._indexes = {scheduler: index for index, scheduler in enumerate(context.schedulers)}

    @property
    def is_waiting(self) -> bool:
        return any(channel.is_waiting for channel in self._channels)

    @property
    def num_waiting(self) -> int:
        """Records that found no room, of the scheduler that keeps up best."""
        return min(channel.num_waiting for channel in self._channels)

    def index_of(self, scheduler: str) -> int:
        return self._indexes[scheduler]

    def choose(self, request: Request) -> int:
        """The replica that a sample is to go to."""
        return crc32((request.group_id or request.request_id).encode()) % len(self._channels)

    def request(self, replica: int, key: str, request: Request) -> None:
        """Goes out with the next `flush`. RequestError where no ring record can hold it."""
        self._channels[replica].request(key, request)

    def abort(self, replica: int, key: str, abort: Abort) -> None:
        """Goes out behind what waits of the same request; to every scheduler where it is not known which one has it."""
        for channel in self._channels if replica == UNKNOWN else [self._channels[replica]]:
            channel.abort(key, abort)

    def flush(self) -> int:
        """Send what the rings take. The number of records sent."""
        return sum(channel.flush() for channel in self._channels)
