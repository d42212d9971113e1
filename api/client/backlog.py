"""The way from an api process to one tokenizer, whose ring may be full.

Lives in the event loop of the api process. Samples of one HTTP request leave together, as many as a record takes: what they
share travels once. What a full ring refuses waits here; requests take turns, a record each, so that a long one delays itself
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.messages import Abort, ChatPrompt, Detokenize, Message, Submission, Submit, Tokenize, encode
from engine.process.fair_queue import FairQueue
from engine.process.outbox import Outbox
from engine.process.shares import has_room

MAX_WAITING_BYTES = 64 << 20  # of prompts that wait for the ring
OWN_BYTES = 64  # of a sample in a record, besides its ids and tokens

Item = Submit | Abort | Tokenize | Detokenize


class Backlog:
    def __init__(self, outbox: Outbox, config: EngineConfig, is_stale: Callable[[Item], bool]) -> None:
        """`is_stale`: whether nobody waits for an item any more."""
        self._outbox = outbox
        self._is_stale = is_stale
        self._max_model_len = config.max_model_len
        self._max_waiting = config.max_waiting
        self._resume_bytes = 4 * config.max_model_len + 16  # by which a sample may grow when it is sent again
        self._max_gathered_bytes = outbox.max_record_bytes // 4  # beyond what a record cannot do without
        self._queue: FairQueue[Item] = FairQueue()
        self._waiting: dict[str, tuple[str, int]] = {}  # by key: whose it is, and the bytes of its prompts
        self._ready = b""  # the next record, taken from the queue, and what it carries
        self._gathered: list[Item] = []

    @property
    def max_record_bytes(self) -> int:
        """The longest message that the ring can ever take."""
        return self._outbox.max_record_bytes

    def check(self, items: Sequence[Submit] | Sequence[Tokenize | Detokenize]) -> None:
        """Whether these may be sent, all of one request: 400 for what no record can hold, 429 where too much waits already."""
        first = items[0]
        num_shared_bytes = len(encode(_message_of([first]))) - _prompt_bytes(first)
        num_bytes = 0
        previous: Item | None = None
        for item in items:
            if not (isinstance(item, Submit) and isinstance(previous, Submit) and item.prompt is previous.prompt):
                num_bytes += _prompt_bytes(item)
                growth = self._resume_bytes if isinstance(item, Submit) else 0
                self._check_size(num_shared_bytes + _prompt_bytes(item) + growth, item)
            previous = item
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if key in self._queue}
        if self._queue and not self._has_room(first.source, num_bytes):
            raise RequestError(
                (
                    f"the engine is overloaded: {self._queue.num_keys} requests wait for {self._outbox.receiver}; try "
                    "again later"
                ),
                status=429,
                code="queue_full",
                retry_after_s=1,
            )
        self._waiting[_key_of(first)] = first.source, num_bytes

    def _has_room(self, source: str, num_bytes: int) -> bool:
        all_bytes = [waiting for _, waiting in self._waiting.values()]
        own_bytes = [waiting for owner, waiting in self._waiting.values() if owner == source] if source else all_bytes
        num_all = self._queue.num_keys
        num_own = len(own_bytes) if source else num_all
        return has_room(num_own, num_all, self._max_waiting) and has_room(
            sum(own_bytes), sum(all_bytes), MAX_WAITING_BYTES, num_bytes
        )

    def push(self, key: str, item: Item) -> None:
        """Goes out with a `flush`, behind what waits of the same key."""
        self._queue.push(key, item)

    def flush(self) -> None:
        """Send what the ring takes."""
        while self._ready or self._queue:
            if not self._ready:
                self._gather()
            is_wanted = not all(map(self._is_stale, self._gathered))
            if is_wanted and not self._outbox.send_bytes(self._ready):
                return
            self._ready, self._gathered = b"", []

    def _gather(self) -> None:
        """Make the next record of what waits of the key whose turn it is."""
        queue = self._queue.front()
        items: list[Item] = []
        num_bytes = limit = 0
        while queue:
            item = queue[0]
            if not self._is_stale(item):
                last = items[-1] if items else None
                if last is None:
                    num_bytes = len(encode(_message_of([item])))
                    limit = min(self._outbox.max_record_bytes, num_bytes + self._max_gathered_bytes)
                elif isinstance(last, Submit) and isinstance(item, Submit):
                    num_bytes += OWN_BYTES + 2 * len(item.request_id) + len(item.resume_token_ids)
                    num_bytes += 0 if item.prompt is last.prompt else _prompt_bytes(item)
                    if num_bytes > limit:
                        break
                else:
                    break
                items.append(item)
            queue.popleft()
        self._queue.pass_on()
        self._gathered = items
        self._ready = encode(_message_of(items)) if items else b""

    def _check_size(self, num_bytes: int, item: Item) -> None:
        """400 for what no ring can ever take: it could only be too long for the model."""
        if num_bytes <= self._outbox.max_record_bytes:
            return
        is_chat = not isinstance(item, (Abort, Detokenize)) and isinstance(item.prompt, ChatPrompt)
        param = "tokens" if isinstance(item, Detokenize) else "messages" if is_chat else "prompt"
        raise RequestError(
            (
                f"{param}: the request takes {num_bytes} bytes, limit {self._outbox.max_record_bytes} (with "
                f"--max-model-len {self._max_model_len}); send less"
            ),
            code="context_length_exceeded",
            param=param,
        )


def _message_of(items: Sequence[Item]) -> Message:
    """Several items are samples of one request."""
    first = items[0]
    if not isinstance(first, Submit):
        return first
    return Submission.of([item for item in items if isinstance(item, Submit)])


def _key_of(item: Item) -> str:
    if isinstance(item, Submit):
        return item.key
    return item.request_id if isinstance(item, Abort) else item.call_id


def _prompt_bytes(item: Item) -> int:
    """What the prompt takes of a record."""
    return len(encode(Tokenize("", "", item.prompt))) if isinstance(item, Submit) else 0
