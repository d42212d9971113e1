"""One HTTP request at the api process: its open sequences, and the wait for what they bring.

Lives in the event loop of the api process. Made by `client.EngineClient.open`, waited on by the route handlers.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from starlette.types import Receive

from api.client.backlog import EncodedRequest
from api.client.held import FREE, HeldLogprobs
from engine.errors import RequestError, TokamakError
from engine.messages import AdapterUse, DecodedLogprobs, Delta, Part, SequencePart, SharedPart

STALLED_CLIENT_NS = 60_000_000_000
MAX_HELD_LOGPROBS = 1 << 21  # of one request, until its end: hundreds of bytes each
MAX_PENDING = 1 << 16  # tokens and log-probabilities of a stream that wait for its reader; then its sequences are paused
MAX_PENDING_DELTAS = 256  # of a sequence; then they become one


T = TypeVar("T")


def num_logprobs(entries: Sequence[DecodedLogprobs]) -> int:
    return sum(1 + len(entry.top_logprobs) for entry in entries)


class ClientGone(TokamakError):
    """The client closed its connection before its answer ended."""


async def unless_gone(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of `work`. ClientGone, and `work` is cancelled, if the client leaves first. `receive`: of the HTTP
    request, after its body was read."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client disconnected")
        return task.result()
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class OpenSequence:
    """One sequence of a request: what was asked, what came, and what of that its response has not taken yet."""

    __slots__ = (
        "_has_parts",
        "cumulative_logprob",
        "delivered",
        "finish_reason",
        "first_prompt_token",
        "first_token_ns",
        "generation",
        "is_paused",
        "last_token_ns",
        "made_by",
        "num_accepted_prediction_tokens",
        "num_cached_tokens",
        "num_calls",
        "num_computed_tokens",
        "num_pending",
        "num_prompt_tokens",
        "num_reasoning_tokens",
        "num_rejected_prediction_tokens",
        "own",
        "pending",
        "pooled",
        "prompt_logprobs",
        "prompt_token_ids",
        "replica",
        "stop_reason",
        "tokenizer",
        "weight_versions",
    )

    def __init__(self, own: SequencePart, tokenizer: str, generation: Generation) -> None:
        self.own = own
        self.tokenizer = tokenizer
        self.generation = generation
        self.delivered = array("i")
        self.pending: list[Delta] = []
        self.num_pending = 0  # tokens and log-probabilities in there
        self.is_paused = False  # not in the engine, which would make more than its reader takes
        self.prompt_token_ids: list[int] = []
        self.prompt_logprobs: list[DecodedLogprobs] = []
        self.first_prompt_token = b""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_calls = 0
        self.num_reasoning_tokens = 0
        self.num_computed_tokens = 0  # of the prompt, where its progress was asked for
        self.num_accepted_prediction_tokens = 0  # once it has ended
        self.num_rejected_prediction_tokens = 0
        self.weight_versions: list[int] = []
        self.pooled = b""  # float32, of an engine that pools
        self.replica = -1  # that answers its present attempt; -1: none has yet
        self.made_by = -1  # the replica that made the last of it; -1: there is nothing yet
        self.cumulative_logprob = 0.0
        self._has_parts = False  # some of it is more than text
        self.finish_reason = ""
        self.stop_reason: int | str | None = None
        self.first_token_ns = 0
        self.last_token_ns = 0

    @property
    def is_finished(self) -> bool:
        return bool(self.finish_reason)

    @property
    def weight_version(self) -> str:
        """The weight versions that made it, in order: "1", or "1,2" where they changed meanwhile."""
        return ",".join(map(str, self.weight_versions))

    def accept(self, delta: Delta) -> None:
        """Take in what one delta of the present attempt brings."""
        if not self.num_prompt_tokens:  # a later attempt finds its own prompt in the cache, which the user need not know
            self.num_prompt_tokens, self.num_cached_tokens = delta.num_prompt_tokens, delta.num_cached_tokens
        if delta.prompt_token_ids and not self.prompt_token_ids:
            self.prompt_token_ids = array("i", delta.prompt_token_ids).tolist()
        if delta.num_computed_tokens > self.num_computed_tokens:  # after a crash they are computed again
            self.num_computed_tokens = delta.num_computed_tokens
            self.generation.has_progressed()
        self.first_prompt_token = self.first_prompt_token or delta.first_prompt_token
        if delta.logprobs or delta.prompt_logprobs:
            self.prompt_logprobs += delta.prompt_logprobs
            self.cumulative_logprob += sum(logprobs.logprob for logprobs in delta.logprobs)
            self.generation.hold(delta)
        if delta.weight_version and delta.weight_version not in self.weight_versions[-1:]:
            self.weight_versions.append(delta.weight_version)
        if delta.replica >= 0:
            self.replica = self.made_by = delta.replica
        self.delivered.extend(delta.token_ids)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.parts:
            self._has_parts = True
            self.num_calls += sum(part.kind == "call" for part in delta.parts)
        if delta.num_reasoning_tokens > self.num_reasoning_tokens:
            self.num_reasoning_tokens = delta.num_reasoning_tokens
        self.pooled = delta.pooled
        self.num_accepted_prediction_tokens = delta.num_accepted_prediction_tokens
        self.num_rejected_prediction_tokens = delta.num_rejected_prediction_tokens
        if delta.token_ids or delta.text or delta.finish_reason:  # otherwise it told the length of the prompt alone
            self.pending.append(delta)
            self.num_pending += len(delta.token_ids) + num_logprobs(delta.logprobs)
            if len(self.pending) > MAX_PENDING_DELTAS:
                self.pending = [self._joined()]

    def take(self) -> Delta:
        """Everything since the last `take` as one delta: a piece of a stream, or a whole answer."""
        joined = self.pending[0] if len(self.pending) == 1 else self._joined()
        self.pending, self.num_pending = [], 0
        self.generation.num_writing += num_logprobs(joined.logprobs)
        return joined

    def _joined(self) -> Delta:
        """All pending deltas as one."""
        pending = self.pending
        return Delta(
            self.own.request_id,
            self.own.attempt,
            token_ids=[token_id for delta in pending for token_id in delta.token_ids],
            text="".join(delta.text for delta in pending),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=[logprobs for delta in pending for logprobs in delta.logprobs],
            parts=_joined(pending, len(self.delivered)) if self._has_parts and any(delta.parts for delta in pending) else [],
        )

    def next_attempt(self) -> SequencePart:
        """Return the part to submit after a crash. A new object: an older one may still wait in a backlog."""
        self.own = msgspec.structs.replace(
            self.own,
            attempt=self.own.attempt + 1,
            resume_token_ids=self.delivered.tobytes(),
            num_scored_prompt_tokens=len(self.prompt_logprobs),
            replica=self.replica,
        )
        self.replica = -1  # it may go to another one, and die there before that one has said a word
        return self.own


def _joined(deltas: list[Delta], num_delivered: int) -> list[Part]:
    """Their parts, those that belong together as one. `num_delivered`: the sequence's tokens, theirs included."""
    joined: list[tuple[Part, list[str]]] = []
    num_tokens = num_known = num_delivered - sum(len(delta.token_ids) for delta in deltas)
    for delta in deltas:
        num_tokens += len(delta.token_ids)
        for part in delta.all_parts:
            begin, num_known = (num_known, num_tokens) if part.end < 0 else (part.begin, part.end)
            if joined and part.kind != "call" and _are_one(part, joined[-1][0]):
                begin = joined[-1][0].begin
                joined[-1][1].append(part.text)
            else:
                joined.append((part, [part.text]))
            joined[-1] = msgspec.structs.replace(joined[-1][0], begin=begin, end=num_known), joined[-1][1]
    return [msgspec.structs.replace(part, text="".join(texts)) for part, texts in joined]


def _are_one(part: Part, before: Part) -> bool:
    return (part.kind, part.call_index) == (before.kind, before.call_index)


class Generation:
    """The sequences of one HTTP request, prompt by prompt, and the wait for them."""

    def __init__(
        self,
        shared: SharedPart,
        request: EncodedRequest,
        *,
        sequences_per_prompt: int,
        is_streaming: bool,
        abort_connection: Callable[[], None],
        close: Callable[[Generation], None],
        resume: Callable[[Generation], None] = lambda generation: None,
        release: Callable[[], None] = lambda: None,
        held: HeldLogprobs | None = None,
    ) -> None:
        """`resume`: its sequences, which were paused. `release`: of what its sequences needed, once the last has ended; may be
        called again. `held`: what all requests hold."""
        self.shared = shared
        self.request = request  # what is submitted, and again after a crash
        self.key = shared.key  # unique in the run
        self.sequences: list[OpenSequence] = []
        self.sequences_per_prompt = sequences_per_prompt
        self.num_unfinished = 0
        self.writing_since_ns = 0  # not 0 while a write to the client is under way
        self.num_writing = 0  # log-probabilities that were taken and may not be written yet
        self.num_held_logprobs = 0  # by this process
        self.num_kept_logprobs = 0  # those that stay until the end
        self.source = shared.source
        self._held = held or HeldLogprobs()
        self._is_streaming = is_streaming
        self.keeps_logprobs = not is_streaming  # until the end; else until they are written
        self._abort_connection = abort_connection
        self._close = close
        self._resume = resume
        self.release = release
        self._has_changed = False
        self._waiting: asyncio.Future[None] | None = None  # of the one who waits
        self._has_progressed = False
        self._error: TokamakError | None = None

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    @property
    def weight_version(self) -> str:
        """The weight versions that made any of its sequences, ascending: "1", or "1,2" where they changed meanwhile."""
        return ",".join(map(str, sorted({version for sequence in self.sequences for version in sequence.weight_versions})))

    @property
    def adapter(self) -> AdapterUse | None:
        return self.shared.options.adapter

    @property
    def headers(self) -> dict[str, str]:
        """Headers that name the weights and replicas that made the answer."""
        replicas = sorted({sequence.made_by for sequence in self.sequences if sequence.made_by >= 0})
        return {"x-tokamak-weight-version": self.weight_version, "x-tokamak-replica": ",".join(map(str, replicas))}

    async def wait(self) -> None:
        """Until a stream has something to take, or every sequence has ended; only one may wait at a time. Raises why the
        request failed."""
        if not self._has_changed:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        self._has_changed = False
        if self._error is not None:
            raise self._error

    @property
    def is_overfull(self) -> bool:
        """Whether more waits for a slow reader than may."""
        return self.writing_since_ns > 0 and sum(sequence.num_pending for sequence in self.sequences) > MAX_PENDING

    @property
    def is_large(self) -> bool:
        """Whether it holds more for its client than is free."""
        return self.num_held_logprobs > FREE and (self.keeps_logprobs or self.writing_since_ns > 0)

    @property
    def is_paused(self) -> bool:
        return any(sequence.is_paused for sequence in self.sequences)

    def wrote(self) -> None:
        """The reader has taken what was written: the sequences that waited for that go on."""
        self.writing_since_ns = 0
        if not self.keeps_logprobs:
            self._release(self.num_writing)
        self.num_writing = 0
        if self.is_paused:
            self._resume(self)

    def hold(self, delta: Delta) -> None:
        """Count what a delta brings. Log-probabilities of a prompt stay until the end."""
        number = num_logprobs(delta.prompt_logprobs)
        self.num_kept_logprobs += number + (num_logprobs(delta.logprobs) if self.keeps_logprobs else 0)
        number += num_logprobs(delta.logprobs)
        self.num_held_logprobs += number
        self._held.add(self.source, number)

    def _release(self, number: int) -> None:
        self.num_held_logprobs -= number
        self._held.add(self.source, -number)

    def answered(self) -> None:
        """The answer was written, or its client left: nothing of it is held any more."""
        self._release(self.num_held_logprobs)

    def check_held(self) -> None:
        """A request that wants too much to be held fails."""
        if self.num_kept_logprobs > MAX_HELD_LOGPROBS:
            self.fail(
                RequestError(
                    (
                        f"the answer has more than {MAX_HELD_LOGPROBS} log-probabilities, the limit; send fewer prompts, or "
                        "ask for fewer answers or log-probabilities"
                    ),
                    code="answer_too_large",
                )
            )

    def wake(self) -> None:
        if self._is_streaming or self.is_finished:
            self.stir()

    def stir(self) -> None:
        """Wake a stream though it may have nothing to take: it has been silent for long."""
        self._has_changed = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def has_progressed(self) -> None:
        """More of a prompt is computed."""
        self._has_progressed = True
        self.wake()

    def take_progress(self) -> bool:
        """Whether that was the case since the last call."""
        has_progressed, self._has_progressed = self._has_progressed, False
        return has_progressed

    def fail(self, error: TokamakError) -> None:
        """End the request with an error; what the engine still does for it is aborted."""
        if self._error is None and not self.is_finished:
            self._error = error
            self.stir()
            self.close()

    def leave(self) -> None:
        """The client closed its connection."""
        self.fail(ClientGone(f"request {self.key}: the client disconnected"))

    def close(self) -> None:
        """Abort what has not finished. Does nothing where all has."""
        self._close(self)

    def drop_stalled_client(self, now_ns: int) -> None:
        """Cut a client that has not read for a minute: what waits for it must not grow for ever."""
        if self.writing_since_ns and now_ns - self.writing_since_ns > STALLED_CLIENT_NS:
            self._abort_connection()
