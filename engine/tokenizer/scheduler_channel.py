"""The way from a tokenizer to the scheduler, whose ring may be full.

Used by the tokenizer's loop. Samples of one request that come one behind the other leave as one record; what a full ring
refuses waits here, and requests take turns: one that brings much delays itself.
"""

from __future__ import annotations

from collections import deque

import msgspec

from engine.errors import RequestError
from engine.messages import Abort, Request, Requests, encode
from engine.process.fair_queue import FairQueue
from engine.process.outbox import Outbox

MAX_SENT = 1024  # then what was received is forgotten, also where nobody asks
OWN_BYTES = 64  # of a sample in a record, besides its ids and tokens


class _Record(msgspec.Struct, frozen=True):
    payload: bytes
    num_samples: int = 0
    num_tokens: int = 0
    source: str = ""


class SchedulerChannel:
    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._max_gathered_bytes = outbox.max_record_bytes // 4
        self._gathered: list[Request] = []
        self._gathered_key = ""
        self._num_gathered_bytes = 0
        self._num_gathered_tokens = 0
        self._records: FairQueue[_Record] = FairQueue()
        self._sent: deque[tuple[int, _Record]] = deque()  # with where they end in the ring, until they are received
        self._num_samples = self._num_tokens = 0  # of all that is gathered, waits or was sent, until it is received

    @property
    def is_waiting(self) -> bool:
        return bool(self._records or self._gathered)

    def num_waiting(self, source: str) -> tuple[int, int]:
        """Records that found no room: all, and those of a source (of none: all, since nobody can tell)."""
        num_all = len(self._records)
        return num_all, sum(record.source == source for record in self._records) if source else num_all

    def unacknowledged(self) -> tuple[int, int]:
        """Samples that the scheduler has not taken yet, and the tokens that they have to compute."""
        received = self._outbox.received_position
        while self._sent and self._sent[0][0] <= received:
            _, record = self._sent.popleft()
            self._num_samples -= record.num_samples
            self._num_tokens -= record.num_tokens
        return self._num_samples, self._num_tokens

    def request(self, key: str, request: Request, num_tokens: int = 0) -> None:
        """Goes out with the next `flush`; it has `num_tokens` to compute. RequestError where no ring record can hold it."""
        num_own_bytes = len(request.resume_token_ids) + 2 * len(request.request_id) + OWN_BYTES
        last = self._gathered[-1] if self._gathered else None
        is_shared = last is not None and key == self._gathered_key and last.prompt_token_ids is request.prompt_token_ids
        if is_shared and self._num_gathered_bytes + num_own_bytes <= self._max_gathered_bytes:
            self._num_gathered_bytes += num_own_bytes
        else:
            num_bytes = len(encode(Requests.of([request])))
            self._check_size(num_bytes)
            if key != self._gathered_key or self._num_gathered_bytes + num_bytes > self._max_gathered_bytes:
                self._pack()
            self._num_gathered_bytes += num_bytes
        self._gathered_key = key
        self._gathered.append(request)
        self._num_gathered_tokens += num_tokens
        self._num_samples += 1
        self._num_tokens += num_tokens

    def abort(self, key: str, abort: Abort) -> None:
        """Goes out behind what waits of the same request."""
        self._pack()
        self._records.push(key, _Record(encode(abort)))

    def flush(self) -> int:
        """Send what the ring takes. The number of records sent."""
        self._pack()
        num_sent = 0
        while self._records and self._outbox.send_bytes(self._records.front()[0].payload):
            record = self._records.pop()
            num_sent += 1
            if record.num_samples:
                self._sent.append((self._outbox.sent_position, msgspec.structs.replace(record, payload=b"")))
        if len(self._sent) > MAX_SENT:
            self.unacknowledged()
        return num_sent

    def _pack(self) -> None:
        if self._gathered:
            payload, source = encode(Requests.of(self._gathered)), self._gathered[0].source
            record = _Record(payload, len(self._gathered), self._num_gathered_tokens, source)
            self._records.push(self._gathered_key, record)
            self._gathered = []
            self._num_gathered_bytes = self._num_gathered_tokens = 0

    def _check_size(self, num_bytes: int) -> None:
        limit = self._outbox.max_record_bytes
        if num_bytes > limit:
            raise RequestError(
                f"the tokenized request takes {num_bytes} bytes, the limit is {limit}; shorten logit_bias, allowed_token_ids "
                "or bad_words"
            )
