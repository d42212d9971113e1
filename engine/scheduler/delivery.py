"""Messages to the tokenizers, in order, without waiting for any of them.

Used by the scheduler process alone. Outputs are collected during a turn and sent as one record per tokenizer. Records that do
not fit a full ring wait in the stream's backlog. Until they are sent the stream is slow and its sequences get no more tokens,
so the backlog is limited to the tokens in flight.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engine.messages import Output, Outputs, Rejected, encode
from engine.process.context import ActorContext
from engine.process.outbox import BackloggedOutbox, Outbox, earliest
from engine.process.topology import LINK


class Stream:
    """Outputs to one tokenizer."""

    __slots__ = ("_max_record_bytes", "_new", "_outbox", "is_slow")

    def __init__(self, outbox: Outbox) -> None:
        self.is_slow = False
        self._outbox = BackloggedOutbox(outbox.send_bytes)
        self._max_record_bytes = outbox.max_record_bytes
        self._new: list[Output] = []

    def add(self, output: Output) -> None:
        """Send an output with the next `flush`."""
        self._new.append(output)

    def reject(self, rejected: Rejected) -> None:
        """Send a rejection behind the outputs added before."""
        self._queue_new()
        self._outbox.post(rejected)

    def flush(self) -> int:
        """Send as much as fits; return the number of records sent."""
        self._queue_new()
        num_sent = self._outbox.flush()
        self.is_slow = len(self._outbox) > 0
        return num_sent

    def deadline_ns(self) -> int:
        """Return the time of the next flush; 0 if nothing waits."""
        return self._outbox.deadline_ns()

    def _queue_new(self) -> None:
        if self._new:
            self._outbox.post_records(pack(self._new, self._max_record_bytes))
            self._new = []


def pack(outputs: list[Output], max_record_bytes: int) -> Iterator[bytes]:
    """Yield records of at most `max_record_bytes`, in order."""
    record = encode(Outputs(outputs))
    if len(outputs) == 1 and len(outputs[0].prompt_logprobs) > 1:
        outputs = halves(outputs[0])
    if len(record) <= max_record_bytes or len(outputs) == 1:
        yield record
        return
    middle = len(outputs) // 2
    yield from pack(outputs[:middle], max_record_bytes)
    yield from pack(outputs[middle:], max_record_bytes)


def halves(output: Output) -> list[Output]:
    """Split an output that has only prompt log-probabilities into two."""
    middle = len(output.prompt_logprobs) // 2
    parts = output.prompt_logprobs[:middle], output.prompt_logprobs[middle:]
    return [msgspec.structs.replace(output, prompt_logprobs=part) for part in parts]


class Delivery:
    """The streams of all tokenizers."""

    def __init__(self, context: ActorContext) -> None:
        names = [f"tokenizer{index}" for index in range(context.config.tokenizer_processes)]
        names += [LINK] if context.config.has_link else []  # it speaks for the tokenizers of routers
        self._streams = {name: Stream(context.outbox(name)) for name in names}

    def stream(self, tokenizer: str) -> Stream:
        return self._streams[tokenizer]

    def deadline_ns(self) -> int:
        """Return the time of the next flush; 0 if nothing waits."""
        return earliest(*(stream.deadline_ns() for stream in self._streams.values()))

    def flush(self) -> int:
        """Send as much as fits."""
        return sum(stream.flush() for stream in self._streams.values())
