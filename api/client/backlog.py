"""Messages from an api process to one tokenizer; the ring may be full.

Lives in the event loop of the api process. Sequences of one HTTP request are sent together, as many as fit a record; their
shared parts are encoded once, for all records and attempts. Messages that do not fit a full ring wait here; requests take
turns, one record each, so that a long one delays only itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.messages import (
    Abort,
    ChatPrompt,
    Detokenize,
    Message,
    Prompt,
    SequencePart,
    SharedPart,
    Submit,
    Tokenize,
    encode,
    encoded_part,
)
from engine.messages.request import MESSAGE_BYTES, with_prompts
from engine.process.fair_queue import FairQueue
from engine.process.outbox import Outbox
from engine.process.shares import has_room

MAX_WAITING_BYTES = 64 << 20  # of prompts that wait for the ring


class EncodedRequest(msgspec.Struct, frozen=True, eq=False):
    """Encoded parts of a request that its sequences share."""

    source: str
    shared: SharedPart
    num_shared_bytes: int
    prompts: list[Prompt]
    num_prompt_bytes: list[int]
    param: str  # the request field of the prompts

    @staticmethod
    def of(shared: SharedPart, prompts: Sequence[Prompt]) -> EncodedRequest:
        encoded = [encoded_part(prompt) for prompt in prompts]
        return EncodedRequest(
            shared.source,
            *encoded_part(shared),
            [prompt for prompt, _ in encoded],
            [num_bytes for _, num_bytes in encoded],
            _param_of(prompts[0]) if prompts else "",
        )

    def submit(self, sequences: Sequence[SequencePart]) -> Submit:
        """Return the message with these of its sequences, and only their prompts."""
        return Submit(self.shared, *with_prompts((own, self.prompts[own.prompt_index]) for own in sequences))


class SequenceSubmit(msgspec.Struct, frozen=True, eq=False):
    """A sequence to submit."""

    request: EncodedRequest
    own: SequencePart


Item = SequenceSubmit | Abort | Tokenize | Detokenize


class Backlog:
    def __init__(self, outbox: Outbox, config: EngineConfig, is_stale: Callable[[Item], bool]) -> None:
        """`is_stale`: whether an item need no longer be sent."""
        self._outbox = outbox
        self._is_stale = is_stale
        self._max_model_len = config.max_model_len
        self._max_waiting = config.max_waiting
        self._resume_bytes = 4 * config.max_model_len + 16  # how much a sequence may grow when it is sent again
        self._max_gathered_bytes = outbox.max_record_bytes // 4  # limit for optional parts of a record
        self._queue: FairQueue[str, Item] = FairQueue()
        self._waiting: dict[str, tuple[str, int]] = {}  # by key: its source, and the bytes of its prompts
        self._ready = b""  # the next record, taken from the queue, and its items
        self._gathered: list[Item] = []

    @property
    def max_record_bytes(self) -> int:
        """Size of the largest message that fits the empty ring."""
        return self._outbox.max_record_bytes

    def check(self, request: EncodedRequest, key: str, sequences: Sequence[SequencePart]) -> None:
        """Raise RequestError if these sequences of a request cannot be sent: 400 if no record can hold them, 429 if too much is
        waiting."""
        longest_own = max(own.max_bytes for own in sequences)
        num_prompt_bytes = {own.prompt_index: request.num_prompt_bytes[own.prompt_index] for own in sequences}
        num_other_bytes = MESSAGE_BYTES + request.num_shared_bytes + longest_own + self._resume_bytes
        self._check_size(num_other_bytes + max(num_prompt_bytes.values()), request.param)
        self._check_room(key, request.source, sum(num_prompt_bytes.values()))

    def check_call(self, call: Tokenize | Detokenize) -> None:
        """Check a call like `check`."""
        param = "tokens" if isinstance(call, Detokenize) else _param_of(call.prompt)
        self._check_size(len(encode(call)), param)
        self._check_room(call.call_id, call.source, 0)

    def _check_room(self, key: str, source: str, num_bytes: int) -> None:
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if key in self._queue}
        if self._queue and not self._has_room(source, num_bytes):
            raise RequestError(
                (
                    f"the engine is overloaded: {self._queue.num_keys} requests wait for {self._outbox.receiver}; try "
                    "again later"
                ),
                status=429,
                code="queue_full",
                retry_after_s=1,
            )
        self._waiting[key] = source, num_bytes

    def _has_room(self, source: str, num_bytes: int) -> bool:
        all_bytes = [waiting for _, waiting in self._waiting.values()]
        own_bytes = [waiting for owner, waiting in self._waiting.values() if owner == source] if source else all_bytes
        num_all = self._queue.num_keys
        num_own = len(own_bytes) if source else num_all
        return has_room(num_own, num_all, self._max_waiting) and has_room(
            sum(own_bytes), sum(all_bytes), MAX_WAITING_BYTES, num_bytes
        )

    def push(self, key: str, item: Item) -> None:
        """Send an item with a `flush`, after waiting items of the same key."""
        self._queue.push(key, item)

    def flush(self) -> None:
        """Send as much as fits."""
        while self._ready or self._queue:
            if not self._ready:
                self._gather()
            is_wanted = not all(map(self._is_stale, self._gathered))
            if is_wanted and not self._outbox.send_bytes(self._ready):
                return
            self._ready, self._gathered = b"", []

    def _gather(self) -> None:
        """Build the next record from waiting items of the key that has its turn."""
        queue = self._queue.front()
        while queue and self._is_stale(queue[0]):
            queue.popleft()
        items: list[Item] = []
        if queue and isinstance(queue[0], SequenceSubmit):
            items += self._sequences(queue)
        elif queue:
            items.append(queue.popleft())
        self._queue.pass_on()
        self._gathered = items
        self._ready = encode(_message_of(items)) if items else b""

    def _sequences(self, queue: deque[Item]) -> Iterator[SequenceSubmit]:
        """Take the sequences for one record."""
        num_bytes = limit = 0
        last_index = -1
        while queue and isinstance(item := queue[0], SequenceSubmit):
            if not self._is_stale(item):
                request, index = item.request, item.own.prompt_index
                num_more = item.own.max_bytes + (request.num_prompt_bytes[index] if index != last_index else 0)
                if not limit:
                    num_more += MESSAGE_BYTES + request.num_shared_bytes
                    limit = min(self._outbox.max_record_bytes, num_more + self._max_gathered_bytes)
                elif num_bytes + num_more > limit:
                    break
                num_bytes += num_more
                last_index = index
                yield item
            queue.popleft()

    def _check_size(self, num_bytes: int, param: str) -> None:
        """Raise 400 for a message that no ring can hold: it would be too long for the model anyway."""
        if num_bytes <= self._outbox.max_record_bytes:
            return
        raise RequestError(
            (
                f"{param}: the request takes {num_bytes} bytes, limit {self._outbox.max_record_bytes} (with "
                f"--max-model-len {self._max_model_len}); send less"
            ),
            code="context_length_exceeded",
            param=param,
        )


def _message_of(items: Sequence[Item]) -> Message:
    """Return the message with these items; several items are sequences of one request."""
    first = items[0]
    if not isinstance(first, SequenceSubmit):
        return first
    return first.request.submit([item.own for item in items if isinstance(item, SequenceSubmit)])


def _param_of(prompt: Prompt) -> str:
    """Return the request field of a prompt."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"
