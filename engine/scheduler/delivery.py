"""What the scheduler tells each tokenizer, in order, without ever waiting for one.

Used by the scheduler process alone. Outputs gather while a turn lasts and leave as one record per tokenizer. What a full ring
refuses waits in that stream's backlog; as long as it does the stream is slow, its sequences are given no more tokens, and so
the backlog cannot grow beyond what is already under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine.messages import Output, Outputs, Rejected, encode
from engine.process.context import ActorContext
from engine.process.outbox import Outbox

RETRY_INTERVAL_NS = 2_000_000  # a ring that empties wakes nobody


class Stream:
    """The way to one tokenizer."""

    __slots__ = ("_backlog", "_new", "_outbox", "is_slow")

    def __init__(self, outbox: Outbox) -> None:
        self.is_slow = False
        self._outbox = outbox
        self._new: list[Output] = []
        self._backlog: deque[bytes] = deque()

    @property
    def max_record_bytes(self) -> int:
        return self._outbox.max_record_bytes

    def add(self, output: Output) -> None:
        """Goes out with the next `flush`."""
        self._new.append(output)

    def reject(self, rejected: Rejected) -> None:
        """Goes out after what was added before."""
        self._queue_new()
        self._backlog.append(encode(rejected))

    def flush(self) -> int:
        """Send what there is room for. The number of records sent."""
        if not self._new and not self._backlog:
            return 0
        self._queue_new()
        num_sent = 0
        while self._backlog and self._outbox.send_bytes(self._backlog[0]):
            self._backlog.popleft()
            num_sent += 1
        self.is_slow = bool(self._backlog)
        return num_sent

    def _queue_new(self) -> None:
        if self._new:
            self._backlog.extend(pack(self._new, self._outbox.max_record_bytes))
            self._new = []


def pack(outputs: list[Output], max_record_bytes: int) -> Iterator[bytes]:
    """Records of at most `max_record_bytes`, in order; the intake admits nothing whose single output could be longer."""
    record = encode(Outputs(outputs))
    if len(record) <= max_record_bytes or len(outputs) == 1:
        yield record
        return
    middle = len(outputs) // 2
    yield from pack(outputs[:middle], max_record_bytes)
    yield from pack(outputs[middle:], max_record_bytes)


class Delivery:
    """The streams of all tokenizers."""

    def __init__(self, context: ActorContext) -> None:
        names = [f"tokenizer{index}" for index in range(context.config.tokenizer_processes)]
        self._streams = {name: Stream(context.outbox(name)) for name in names}

    def stream(self, tokenizer: str) -> Stream:
        return self._streams[tokenizer]

    @property
    def has_slow_streams(self) -> bool:
        return any(stream.is_slow for stream in self._streams.values())

    def flush(self) -> int:
        """Send everything that there is room for."""
        return sum(stream.flush() for stream in self._streams.values())
