"""Messages from a tokenizer to a scheduler; the ring may be full.

Used by the tokenizer's loop. Consecutive sequences of one request are sent as one record. Records that do not fit a full ring
wait here, and requests take turns: a large one delays only itself.
"""

from __future__ import annotations

from collections import deque

import msgspec

from engine.errors import RequestError
from engine.messages import Abort, encode
from engine.messages.request import MESSAGE_BYTES
from engine.process.fair_queue import FairQueue
from engine.process.outbox import Outbox
from engine.tokenizer.ready import ReadySequence, request_of

MAX_SENT = 1024  # then received records are forgotten, even if no call asks


class _Record(msgspec.Struct, frozen=True):
    payload: bytes
    num_sequences: int = 0
    num_tokens: int = 0
    source: str = ""


class SchedulerChannel:
    def __init__(self, outbox: Outbox, tokenizer: str) -> None:
        """`tokenizer`: the sending actor."""
        self._outbox = outbox
        self._tokenizer = tokenizer
        self._max_gathered_bytes = outbox.max_record_bytes // 4
        self._gathered: list[ReadySequence] = []
        self._num_gathered_bytes = 0
        self._num_gathered_tokens = 0
        self._records: FairQueue[str, _Record] = FairQueue()
        self._sent: deque[tuple[int, _Record]] = deque()  # with their end in the ring, until they are received
        self._num_sequences = self._num_tokens = 0  # of all that is collected, waiting or sent, until it is received

    @property
    def is_waiting(self) -> bool:
        return bool(self._records or self._gathered)

    def num_waiting(self, source: str) -> tuple[int, int]:
        """Return the records that did not fit: all, and those of a source (all, if there is no source)."""
        num_all = len(self._records)
        return num_all, sum(record.source == source for record in self._records) if source else num_all

    def unacknowledged(self) -> tuple[int, int]:
        """Sequences that the scheduler has not taken yet, and their tokens to compute."""
        received = self._outbox.received_position
        while self._sent and self._sent[0][0] <= received:
            _, record = self._sent.popleft()
            self._num_sequences -= record.num_sequences
            self._num_tokens -= record.num_tokens
        return self._num_sequences, self._num_tokens

    def add(self, sequence: ReadySequence, num_tokens: int = 0) -> None:
        """Send a sequence, with `num_tokens` to compute, with the next `flush`. Raises RequestError if it fits no ring
        record."""
        num_bytes = sequence.prompt.num_bytes + sequence.own.max_bytes
        self._check_size(MESSAGE_BYTES + sequence.request.num_bytes + num_bytes)
        last = self._gathered[-1] if self._gathered else None
        if last is not None and last.prompt is sequence.prompt:
            num_bytes = sequence.own.max_bytes
        if last is not None and (last.key != sequence.key or self._num_gathered_bytes + num_bytes > self._max_gathered_bytes):
            self._pack()
            last = None
        if last is None:
            num_bytes = MESSAGE_BYTES + sequence.request.num_bytes + sequence.prompt.num_bytes + sequence.own.max_bytes
        self._num_gathered_bytes += num_bytes
        self._gathered.append(sequence)
        self._num_gathered_tokens += num_tokens
        self._num_sequences += 1
        self._num_tokens += num_tokens

    def abort(self, key: str, abort: Abort) -> None:
        """Send an abort after waiting messages of the same request."""
        self._pack()
        self._records.push(key, _Record(encode(abort)))

    def flush(self) -> int:
        """Send as much as fits; return the number of records sent."""
        self._pack()
        num_sent = 0
        while self._records and self._outbox.send_bytes(self._records.front()[0].payload):
            record = self._records.pop()
            num_sent += 1
            if record.num_sequences:
                self._sent.append((self._outbox.sent_position, msgspec.structs.replace(record, payload=b"")))
        if len(self._sent) > MAX_SENT:
            self.unacknowledged()
        return num_sent

    def _pack(self) -> None:
        if self._gathered:
            first = self._gathered[0]
            payload = encode(request_of(self._tokenizer, self._gathered))
            record = _Record(payload, len(self._gathered), self._num_gathered_tokens, first.request.shared.source)
            self._records.push(first.key, record)
            self._gathered = []
            self._num_gathered_bytes = self._num_gathered_tokens = 0

    def _check_size(self, num_bytes: int) -> None:
        limit = self._outbox.max_record_bytes
        if num_bytes > limit:
            raise RequestError(
                f"the tokenized request takes {num_bytes} bytes, the limit is {limit}; shorten logit_bias, allowed_token_ids "
                "or bad_words"
            )
