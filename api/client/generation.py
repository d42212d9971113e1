"""One HTTP request in the api process: its open sequences, and the wait for their tokens.

Lives in the event loop of the api process. Created by `client.EngineClient.open`; route handlers wait on it.
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

DROPPED_HEADER = "x-tokamak-dropped"

STALLED_CLIENT_NS = 60_000_000_000
MAX_HELD_LOGPROBS = 1 << 21  # of one request, until its end: hundreds of bytes each
MAX_PENDING = 1 << 16  # tokens and log-probabilities of a stream that wait for its reader; then its sequences are paused
MAX_PENDING_DELTAS = 256  # per sequence; then they are joined into one


T = TypeVar("T")


def num_logprobs(entries: Sequence[DecodedLogprobs]) -> int:
    return sum(1 + len(entry.top_logprobs) for entry in entries)


class ClientGone(TokamakError):
    """The client disconnected before its answer ended."""


async def unless_gone(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ClientGone. `receive`: of the HTTP
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
    """One sequence of a request: its parameters, its tokens so far, and those that its response has not taken yet."""

    __slots__ = (
        "_has_parts",
        "cumulative_logprob",
        "delivered",
        "finish_reason",
        "first_prompt_token",
        "first_token_ns",
        "generation",
        "interrupted_ns",
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
        self.num_pending = 0  # pending tokens and log-probabilities
        self.is_paused = False  # not in the engine, which would produce more than its reader takes
        self.interrupted_ns = 0  # when a crash was noticed after which no token has come; 0: none
        self.prompt_token_ids: list[int] = []
        self.prompt_logprobs: list[DecodedLogprobs] = []
        self.first_prompt_token = b""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_calls = 0
        self.num_reasoning_tokens = 0
        self.num_computed_tokens = 0  # prompt tokens, if progress was requested
        self.num_accepted_prediction_tokens = 0  # set when it has ended
        self.num_rejected_prediction_tokens = 0
        self.weight_versions: list[int] = []
        self.pooled = b""  # float32, if the engine pools
        self.replica = -1  # replica that answers the current attempt; -1: not known yet
        self.made_by = -1  # replica of the latest tokens; -1: there are none
        self.cumulative_logprob = 0.0
        self._has_parts = False  # it has parts other than text
        self.finish_reason = ""
        self.stop_reason: int | str | None = None
        self.first_token_ns = 0
        self.last_token_ns = 0

    @property
    def is_finished(self) -> bool:
        return bool(self.finish_reason)

    @property
    def weight_version(self) -> str:
        """Weight versions that produced it, in order: "1", or "1,2" if they changed meanwhile."""
        return ",".join(map(str, self.weight_versions))

    def accept(self, delta: Delta) -> None:
        """Add a delta of the current attempt."""
        if not self.num_prompt_tokens:  # a later attempt finds its own prompt in the cache, which is not shown to the user
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
        if delta.token_ids or delta.text or delta.finish_reason:  # otherwise it only reported the length of the prompt
            self.pending.append(delta)
            self.num_pending += len(delta.token_ids) + num_logprobs(delta.logprobs)
            if len(self.pending) > MAX_PENDING_DELTAS:
                self.pending = [self._joined()]

    def take(self) -> Delta:
        """Return everything since the last `take` as one delta: a piece of a stream, or a whole answer."""
        joined = self.pending[0] if len(self.pending) == 1 else self._joined()
        self.pending, self.num_pending = [], 0
        self.generation.num_writing += num_logprobs(joined.logprobs)
        return joined

    def _joined(self) -> Delta:
        """Join all pending deltas into one."""
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
            weight_version=self.weight_versions[-1] if self.weight_versions else 0,
        )
        self.replica = -1  # it may go to another replica, and die there before its first answer
        return self.own


def _joined(deltas: list[Delta], num_delivered: int) -> list[Part]:
    """Return the joined parts of deltas. `num_delivered`: the sequence's tokens, including theirs."""
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
        """`resume`: resumes its paused sequences. `release`: called when its last sequence has ended; may be called again.
        `held`: the log-probabilities held by all requests."""
        self.shared = shared
        self.request = request  # submitted, and again after a crash
        self.key = shared.key  # unique in the run
        self.sequences: list[OpenSequence] = []
        self.sequences_per_prompt = sequences_per_prompt
        self.num_unfinished = 0
        self.writing_since_ns = 0  # not 0 during a write to the client
        self.num_writing = 0  # log-probabilities that were taken but may not be written yet
        self.num_held_logprobs = 0  # by this process
        self.num_kept_logprobs = 0  # those that stay until the end
        self.source = shared.source
        self._held = held or HeldLogprobs()
        self._is_streaming = is_streaming
        self.keeps_logprobs = not is_streaming  # until the end; otherwise until they are written
        self._abort_connection = abort_connection
        self._close = close
        self._resume = resume
        self.release = release
        self.dropped: list[str] = []  # parts of the request that the model does not see, in ASCII
        self._has_changed = False
        self._waiting: asyncio.Future[None] | None = None  # of the handler that waits
        self._has_progressed = False
        self._error: TokamakError | None = None

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    @property
    def weight_version(self) -> str:
        """Weight versions that produced any of its sequences, ascending: "1", or "1,2" if they changed meanwhile."""
        return ",".join(map(str, sorted({version for sequence in self.sequences for version in sequence.weight_versions})))

    @property
    def adapter(self) -> AdapterUse | None:
        return self.shared.options.adapter

    @property
    def headers(self) -> dict[str, str]:
        """Return headers that name the weights and replicas that produced the answer."""
        replicas = sorted({sequence.made_by for sequence in self.sequences if sequence.made_by >= 0})
        dropped = {DROPPED_HEADER: ", ".join(self.dropped)} if self.dropped else {}
        return {"x-tokamak-weight-version": self.weight_version, "x-tokamak-replica": ",".join(map(str, replicas)), **dropped}

    async def wait(self) -> None:
        """Wait until a stream has something to take, or every sequence has ended; only one caller may wait at a time. Raises
        the error of a failed request."""
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
        """Whether too much waits for a slow reader."""
        return self.writing_since_ns > 0 and sum(sequence.num_pending for sequence in self.sequences) > MAX_PENDING

    @property
    def is_large(self) -> bool:
        """Whether it holds more for its client than the free amount."""
        return self.num_held_logprobs > FREE and (self.keeps_logprobs or self.writing_since_ns > 0)

    @property
    def is_paused(self) -> bool:
        return any(sequence.is_paused for sequence in self.sequences)

    def wrote(self) -> None:
        """Note that the reader has taken what was written; paused sequences continue."""
        self.writing_since_ns = 0
        if not self.keeps_logprobs:
            self._release(self.num_writing)
        self.num_writing = 0
        if self.is_paused:
            self._resume(self)

    def hold(self, delta: Delta) -> None:
        """Count the contents of a delta. Log-probabilities of a prompt stay until the end."""
        number = num_logprobs(delta.prompt_logprobs)
        self.num_kept_logprobs += number + (num_logprobs(delta.logprobs) if self.keeps_logprobs else 0)
        number += num_logprobs(delta.logprobs)
        self.num_held_logprobs += number
        self._held.add(self.source, number)

    def _release(self, number: int) -> None:
        self.num_held_logprobs -= number
        self._held.add(self.source, -number)

    def answered(self) -> None:
        """Note that the answer was written, or its client disconnected: nothing of it is held any more."""
        self._release(self.num_held_logprobs)

    def check_held(self) -> None:
        """Fail a request that needs to hold too much."""
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
        """Wake a stream that was silent for long, even if there is nothing to take."""
        self._has_changed = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def has_progressed(self) -> None:
        """Note that more of a prompt is computed."""
        self._has_progressed = True
        self.wake()

    def take_progress(self) -> bool:
        """Return whether more was computed since the last call."""
        has_progressed, self._has_progressed = self._has_progressed, False
        return has_progressed

    def fail(self, error: TokamakError) -> None:
        """End the request with an error, and abort it in the engine."""
        if self._error is None and not self.is_finished:
            self._error = error
            self.stir()
            self.close()

    def leave(self) -> None:
        """Note that the client disconnected."""
        self.fail(ClientGone(f"request {self.key}: the client disconnected"))

    def close(self) -> None:
        """Abort what has not finished. Does nothing if everything has."""
        self._close(self)

    def drop_stalled_client(self, now_ns: int) -> None:
        """Disconnect a client that has not read for a minute, so that its data does not grow without limit."""
        if self.writing_since_ns and now_ns - self.writing_since_ns > STALLED_CLIENT_NS:
            self._abort_connection()
