"""Messages from a tokenizer to one HTTP process, which may read slowly.

Used by the tokenizer processes. The messages of one turn are sent as one ring record. Records that do not fit a full ring wait
here, in order, without blocking others. Their number is limited: they belong to sequences that the HTTP process opened, with at
most the model's context length each; it opens no more while it does not read, and the supervisor ends it if it hangs.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.messages import Delta, Deltas, Detokenized, Rejected, Tokenized, encode
from engine.process.outbox import BackloggedOutbox, Outbox


class ApiChannel:
    def __init__(self, outbox: Outbox, epoch: int) -> None:
        self.epoch = epoch  # of the HTTP process that gets the messages
        self.too_large: list[str] = []  # ids of requests with a Delta that fits no ring record; the api process was informed
        self._outbox = outbox
        self._deltas: list[Delta] = []
        self._records = BackloggedOutbox(outbox.send_bytes)

    @property
    def is_waiting(self) -> bool:
        """Whether something could not be sent yet."""
        return bool(self._records or self._deltas)

    def add(self, delta: Delta) -> None:
        """Send a delta with the next `flush`."""
        self._deltas.append(delta)

    def post(self, message: Rejected | Tokenized | Detokenized) -> None:
        """Send a message with the next `flush`, after those added before."""
        self._pack_deltas()
        record = encode(message)
        if len(record) <= self._outbox.max_record_bytes:
            self._records.post_records([record])
        elif isinstance(message, Rejected):
            self._records.post_records([self._refusal(message.request_id, message.attempt, len(record))])
        else:
            self._records.post_records([self._refusal(message.call_id, 0, len(record))])

    def flush(self) -> int:
        """Send as much as fits; return the number of records sent."""
        num_sent = self._records.flush()
        if not self._records:  # otherwise more may be collected until there is room
            self._pack_deltas()
            num_sent += self._records.flush()
        return num_sent

    def forget(self, epoch: int) -> None:
        """Drop everything for an earlier life of the HTTP process."""
        self.epoch = epoch
        self._deltas.clear()
        self._records.clear()

    def _pack_deltas(self) -> None:
        if self._deltas:
            self._records.post_records(self._packed(self._deltas))
            self._deltas = []

    def _packed(self, deltas: list[Delta]) -> Iterator[bytes]:
        """Yield one record, or more if needed."""
        record = encode(Deltas(deltas))
        if len(record) <= self._outbox.max_record_bytes:
            yield record
        elif len(deltas) == 1:
            self.too_large.append(deltas[0].request_id)
            yield self._refusal(deltas[0].request_id, deltas[0].attempt, len(record))
        else:
            middle = len(deltas) // 2
            yield from self._packed(deltas[:middle])
            yield from self._packed(deltas[middle:])

    def _refusal(self, request_id: str, attempt: int, num_bytes: int) -> bytes:
        limit = self._outbox.max_record_bytes
        message = (
            f"a message of the answer has {num_bytes} bytes, the limit is {limit}; request fewer log-probabilities or send a "
            "shorter text"
        )
        return encode(Rejected(request_id, attempt, self._outbox.receiver, 400, message))
