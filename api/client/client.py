"""The state of all open requests: every open sequence as its `Submit` plus the tokens delivered so far.

Runs in the api process, on its event loop only. Route handlers open a `Generation` and wait on it; the actor passes messages
(`on_message`), new epochs of other actors (`on_peer`) and the time (`on_tick`). Owns the open sequences, the calls in progress
and the backlog of messages that did not fit a ring.

An open sequence survives any crash of another actor: `on_peer` submits it again with `attempt + 1` and the tokens it has, and
late answers of older attempts are dropped. All sequences of one prompt go to one tokenizer, `tokenizer{crc32(group_id) % M}`;
only the api process needs to know this rule.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from zlib import crc32

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from api.access import source_of
from api.client.backlog import Backlog, EncodedRequest, Item, SequenceSubmit
from api.client.generation import Generation, OpenSequence, unless_gone
from api.client.held import FREE, HeldLogprobs
from api.client.stats import Resubmissions, SequenceMeasures
from engine.errors import RequestError
from engine.messages import (
    Abort,
    AdapterUse,
    Delta,
    Deltas,
    Detokenize,
    Detokenized,
    MediaItem,
    Message,
    Prompt,
    Rejected,
    SequencePart,
    SharedPart,
    Tokenize,
    Tokenized,
)
from engine.process.adapters import AdapterGauge, AdapterRegistry
from engine.process.context import ActorContext
from engine.process.shares import has_room
from engine.process.topology import SCHEDULER, index_of, role_of

CALL_TIMEOUT_S = 30.0
MAX_CALLS = 256  # in progress per source in one api process
DEADLINE_GRACE_NS = 1_000_000_000  # the scheduler enforces deadlines; the api process only does if nothing arrived
REMEMBER_ABORTS_NS = 10_000_000_000
RETRY_NS = 200_000_000


class _Call:
    """A call to a tokenizer, kept until it is answered."""

    __slots__ = ("answer", "message", "tokenizer")

    def __init__(self, message: Tokenize | Detokenize, tokenizer: str, answer: asyncio.Future[Tokenized | Detokenized]) -> None:
        self.message = message
        self.tokenizer = tokenizer
        self.answer = answer

    def next_attempt(self) -> Tokenize | Detokenize:
        """Return the message to send again after a crash. A new object: an older one may still wait in a backlog."""
        self.message = msgspec.structs.replace(self.message, attempt=self.message.attempt + 1)
        return self.message


class EngineClient:
    """Everything that this api process has open with the engine."""

    def __init__(self, context: ActorContext) -> None:
        self._name = context.name
        self._config = context.config
        self._epoch = context.epoch
        self._tracer = context.tracer
        self._tokenizers = [f"tokenizer{index}" for index in range(context.config.tokenizer_processes)]
        self._sequences: dict[str, OpenSequence] = {}
        self._generations: dict[str, Generation] = {}  # by key
        self._calls: dict[str, _Call] = {}
        self._call_ids = itertools.count()
        self._backlogs = {
            tokenizer: Backlog(context.outbox(tokenizer), context.config, self._is_stale) for tokenizer in self._tokenizers
        }
        self._recent_aborts: deque[tuple[int, str, Abort]] = deque()
        self._retries: deque[tuple[int, OpenSequence, int]] = (
            deque()
        )  # due time, sequence, and the attempt that a full queue rejected
        self._held = HeldLogprobs()
        self._is_stopping = False

        self.adapters = AdapterRegistry(context) if context.config.max_loras else None
        self._adapter_gauge = AdapterGauge(context, "adapter_open_requests")
        self._open_requests = context.counter("open_requests")
        self._resubmissions = Resubmissions(context)
        self._num_pauses = context.counter("stream_pauses_total")
        self._dropped = context.counter("messages_dropped_total")
        self._num_held_logprobs = context.counter("held_logprobs")
        self._num_open_calls = context.counter("open_calls")
        self._num_cancelled_calls = context.counter("cancelled_calls_total")
        self._measures = SequenceMeasures(context)

    # ------------------------------------------------------------------------------------------- for route handlers

    def open(
        self,
        shared: SharedPart,
        prompts: Sequence[Prompt],
        sequences: Sequence[SequencePart],
        *,
        sequences_per_prompt: int,
        is_streaming: bool,
        abort_connection: Callable[[], None],
        release: Callable[[], None] = lambda: None,
    ) -> Generation:
        """Submit the sequences of one HTTP request, in the order of its choices. Raises 400 if one fits no ring, 429 if too
        many wait for a ring; nothing is open then. `release` is called when the sequences have ended. A request may be longer
        than a ring: it is sent as room becomes available, in turn with others."""
        if self._is_stopping:
            raise stopping()
        begin_ns = time.monotonic_ns()
        request = EncodedRequest.of(shared, prompts)
        by_tokenizer: dict[str, list[SequencePart]] = {}
        for own in sequences:
            by_tokenizer.setdefault(self._tokenizer_of(own.group_id), []).append(own)
        for tokenizer, parts in by_tokenizer.items():
            self._backlogs[tokenizer].check(request, shared.key, parts)
        if self.adapters is not None:
            self._take_adapter(self.adapters, shared.options.adapter, len(sequences))
        generation = Generation(
            shared,
            request,
            sequences_per_prompt=sequences_per_prompt,
            is_streaming=is_streaming,
            abort_connection=abort_connection,
            close=self.close,
            resume=self._resume,
            release=release,
            held=self._held,
        )
        self._generations[shared.key] = generation
        generation.num_unfinished = len(sequences)
        for own in sequences:
            sequence = self._sequences[own.request_id] = OpenSequence(own, self._tokenizer_of(own.group_id), generation)
            generation.sequences.append(sequence)
        for tokenizer, parts in by_tokenizer.items():
            self._send(tokenizer, shared.key, *(SequenceSubmit(request, own) for own in parts))
        self._open_requests.set(len(self._sequences))
        self._measures.on_opened(generation)
        if self._tracer.is_on:
            for own in sequences:
                self._tracer.span("submit", begin_ns, label=own.request_id)
        return generation

    def close(self, generation: Generation) -> None:
        """Forget a request and abort its unfinished sequences."""
        self._generations.pop(generation.key, None)
        generation.release()
        if generation.is_finished:
            return
        for sequence in generation.sequences:
            if not sequence.is_finished:
                self._abort(sequence, "abort")
                self._finish(sequence, "abort")
        self._open_requests.set(len(self._sequences))

    def abort(self, request_id: str) -> bool:
        """Abort a request for an operator, by the id that its client got: its answer ends with finish reason "abort"."""
        generations = [g for key, g in self._generations.items() if request_id in (key, key.partition("~")[0])]
        for generation in generations:
            self._end_early([sequence for sequence in generation.sequences if not sequence.is_finished], "abort")
        return bool(generations)

    async def tokenize(
        self,
        prompt: Prompt,
        request: HttpRequest,
        returns_tokens: bool = False,
        media: Sequence[MediaItem] = (),
        truncate_prompt_tokens: int = 0,
        max_tokens: int = -1,
    ) -> Tokenized:
        """Tokenize for the client of `request`, which may disconnect."""
        call_id, source = self._new_call_id(), source_of(request, self._config)
        call = Tokenize(call_id, self._name, prompt, returns_tokens, list(media), truncate_prompt_tokens, max_tokens, source)
        answer = await self._call_for(call, request.receive)
        assert isinstance(answer, Tokenized)
        return answer

    async def detokenize(self, token_ids: bytes, request: HttpRequest) -> str:
        call = Detokenize(self._new_call_id(), self._name, token_ids, source_of(request, self._config))
        answer = await self._call_for(call, request.receive)
        assert isinstance(answer, Detokenized)
        return answer.text

    # -------------------------------------------------------------------------------------------------- for the actor

    def on_message(self, message: Message) -> None:
        if isinstance(message, Deltas):
            now_ns = time.monotonic_ns()
            for delta in message.deltas:
                self._on_delta(delta, now_ns)
            self._open_requests.set(len(self._sequences))
        elif isinstance(message, Rejected):
            self._on_rejected(message)
        else:
            assert isinstance(message, (Tokenized, Detokenized)), f"unexpected message {type(message).__name__}"
            call = self._calls.get(message.call_id)
            if call is not None and not call.answer.done():
                call.answer.set_result(message)

    def on_peer(self, name: str) -> None:
        """Handle an actor's new epoch: submit again what it held. For a scheduler: the sequences of its replica, and those that
        no replica has answered yet."""
        is_scheduler = role_of(name) == SCHEDULER
        if not is_scheduler and name not in self._backlogs:
            return
        places = (index_of(name), -1)  # -1: it may have been there, but has not answered yet
        num_lost = 0
        for generation in self._generations.values():
            for sequence in generation.sequences:
                if not (sequence.is_finished or sequence.is_paused) and (
                    sequence.replica in places if is_scheduler else sequence.tokenizer == name
                ):
                    num_lost += 1
                    sequence.interrupted_ns = time.monotonic_ns()
                    self._backlogs[sequence.tokenizer].push(generation.key, _resubmitted(sequence))
        self._resubmissions.add(name, num_lost)
        if not is_scheduler:
            for _, tokenizer, abort in self._recent_aborts:  # it may have died before it passed them on
                if tokenizer == name:
                    self._backlogs[name].push(abort.request_id, abort)
            for call in self._calls.values():
                if call.tokenizer == name:
                    self._backlogs[name].push(call.message.call_id, call.next_attempt())
        for backlog in self._backlogs.values():
            backlog.flush()

    def on_tick(self, now_ns: int) -> None:
        """Retry what a full ring or queue rejected, and enforce limits that other actors did not. Called several times a
        second."""
        for backlog in self._backlogs.values():
            backlog.flush()
        while self._recent_aborts and now_ns - self._recent_aborts[0][0] > REMEMBER_ABORTS_NS:
            self._recent_aborts.popleft()
        while self._retries and self._retries[0][0] <= now_ns:
            _, sequence, attempt = self._retries.popleft()
            if not sequence.is_finished and sequence.own.attempt == attempt:
                self._send(sequence.tokenizer, sequence.generation.key, _resubmitted(sequence))
        overdue = now_ns - DEADLINE_GRACE_NS
        self._end_early([s for s in self._sequences.values() if 0 < s.generation.shared.deadline_ns < overdue], "timeout")
        for generation in self._generations.values():
            generation.drop_stalled_client(now_ns)
        self._resume_held()
        self._num_held_logprobs.set(self._held.num_all)

    @property
    def max_record_bytes(self) -> int:
        """Size of the largest message that fits every tokenizer's ring."""
        return min(backlog.max_record_bytes for backlog in self._backlogs.values())

    @property
    def num_open(self) -> int:
        return len(self._sequences)

    def stop(self, grace: bool) -> None:
        """Take no new requests; without grace, also end the open ones with an error."""
        self._is_stopping = True
        if not grace:
            for generation in list(self._generations.values()):
                generation.fail(stopping())

    # --------------------------------------------------------------------------------------------------------- inside

    def _take_adapter(self, adapters: AdapterRegistry, use: AdapterUse | None, num_sequences: int) -> None:
        """Count sequences of an adapter, which keeps it in the engine. Raises 404 if it was unloaded meanwhile."""
        self._adapter_gauge.add(use, num_sequences)
        try:
            adapters.check_served(filter(None, (use,)))
        except BaseException:
            self._adapter_gauge.add(use, -num_sequences)
            raise

    def _tokenizer_of(self, key: str) -> str:
        return self._tokenizers[crc32(key.encode()) % len(self._tokenizers)]

    def _send(self, tokenizer: str, key: str, *items: Item) -> None:
        """Send items that must not be lost: they wait in the backlog while the ring is full."""
        backlog = self._backlogs[tokenizer]
        for item in items:
            backlog.push(key, item)
        backlog.flush()

    def _is_stale(self, item: Item) -> bool:
        """Return whether a later attempt replaced an item, or its answer is no longer awaited."""
        if isinstance(item, SequenceSubmit):
            sequence = self._sequences.get(item.own.request_id)
            return sequence is None or sequence.own is not item.own
        if isinstance(item, Abort):
            return False
        call = self._calls.get(item.call_id)
        return call is None or call.message is not item

    def _on_delta(self, delta: Delta, now_ns: int) -> None:
        sequence = self._sequences.get(delta.request_id)
        if sequence is None or sequence.own.attempt != delta.attempt:
            self._dropped.add(1)
            return
        num_before = len(sequence.delivered)
        sequence.accept(delta)
        self._measures.on_tokens(sequence, len(sequence.delivered) - num_before, now_ns)
        if sequence.is_finished:
            self._finish(sequence, sequence.finish_reason)
            self._measures.on_answered(sequence, now_ns)
        if sequence.pending:
            sequence.generation.wake()
        if delta.logprobs or delta.prompt_logprobs:
            sequence.generation.check_held()
        if sequence.generation.is_overfull or self._holds_too_much(sequence.generation):
            self._pause(sequence.generation)
        if self._tracer.is_on and (sequence.is_finished or (delta.token_ids and not num_before)):
            name = "last token" if sequence.is_finished else "first token"
            self._tracer.span(name, now_ns, value=len(sequence.delivered), label=delta.request_id)

    def _on_rejected(self, rejected: Rejected) -> None:
        error = RequestError(
            rejected.message,
            status=rejected.status,
            code=rejected.code,
            param=rejected.param,
            retry_after_s=rejected.retry_after_s,
        )
        call = self._calls.get(rejected.request_id)
        sequence = self._sequences.get(rejected.request_id)
        if call is not None and call.message.attempt == rejected.attempt and not call.answer.done():
            call.answer.set_exception(error)
        elif sequence is None or sequence.own.attempt != rejected.attempt:
            self._dropped.add(1)
        elif (
            rejected.status == 429 and rejected.attempt > 0
        ):  # after a crash all requests come back at once; no client loses its answer for that
            self._retries.append((time.monotonic_ns() + RETRY_NS, sequence, rejected.attempt))
        else:
            self._forget(sequence)
            sequence.finish_reason = "rejected"  # nothing of it is left to abort; `fail` aborts the other sequences
            sequence.generation.fail(error)

    def _end_early(self, sequences: list[OpenSequence], reason: str) -> None:
        """End sequences early, with the tokens they have."""
        for sequence in sequences:
            self._abort(sequence, reason)
            sequence.pending.append(Delta(sequence.own.request_id, sequence.own.attempt, [], "", reason))
            self._finish(sequence, reason)
            sequence.generation.wake()
        if sequences:
            self._open_requests.set(len(self._sequences))

    def _pause(self, generation: Generation) -> None:
        """Take the sequences out of the engine until their reader has caught up. Later outputs for them are dropped."""
        for sequence in generation.sequences:
            if not (sequence.is_finished or sequence.is_paused):
                self._num_pauses.add(1)
                self._abort(sequence, "abort")
                sequence.next_attempt()
                sequence.is_paused = True

    def _holds_too_much(self, generation: Generation, num_more: int = 0) -> bool:
        """Return whether its source has no room for more log-probabilities while another of its requests may end first."""
        if not generation.is_large or self._held.has_room(generation.source, num_more):
            return False
        return not generation.keeps_logprobs or generation is not self._oldest_of(generation.source)

    def _oldest_of(self, source: str) -> Generation | None:
        """Return the oldest request of a source that keeps log-probabilities until its end, and waits for no reader."""
        own = (g for g in self._generations.values() if g.source == source and g.keeps_logprobs and g.is_large)
        return next((g for g in own if not (g.is_finished or g.is_overfull)), None)

    def _resume_held(self) -> None:
        """Resume paused requests as far as their sources have room again, the oldest first."""
        num_more = 0
        for generation in self._generations.values():
            if generation.is_paused and not generation.is_overfull:
                num_more += FREE
                if not self._holds_too_much(generation, num_more):
                    self._resume(generation)

    def _resume(self, generation: Generation) -> None:
        """Submit paused sequences again with the tokens they have: they continue as after a crash."""
        if self._holds_too_much(generation):
            return
        for sequence in generation.sequences:
            if sequence.is_paused and not sequence.is_finished:
                self._send(sequence.tokenizer, generation.key, SequenceSubmit(generation.request, sequence.own))
            sequence.is_paused = False

    def _abort(self, sequence: OpenSequence, reason: str) -> None:
        abort = Abort(sequence.own.request_id, sequence.own.attempt, reason)
        self._recent_aborts.append((time.monotonic_ns(), sequence.tokenizer, abort))
        self._send(sequence.tokenizer, sequence.generation.key, abort)

    def _finish(self, sequence: OpenSequence, reason: str) -> None:
        """Finish a sequence."""
        sequence.finish_reason = reason
        self._measures.on_finished(reason)
        sequence.generation.num_unfinished -= 1
        if sequence.generation.is_finished:
            sequence.generation.release()
            self._measures.on_closed(sequence.generation)
        self._forget(sequence)

    def _forget(self, sequence: OpenSequence) -> None:
        """Remove a sequence from all counts."""
        del self._sequences[sequence.own.request_id]
        self._adapter_gauge.add(sequence.generation.adapter, -1)

    def _new_call_id(self) -> str:
        return f"{self._name}.{self._epoch}.{next(self._call_ids)}"

    async def _call_for(self, message: Tokenize | Detokenize, receive: Receive) -> Tokenized | Detokenized:
        """Return the result of `_call`, or give it up if the client disconnects. Raises ClientGone."""
        return await unless_gone(self._call(message), receive)

    async def _call(self, message: Tokenize | Detokenize) -> Tokenized | Detokenized:
        if self._is_stopping:
            raise stopping()
        num_all, num_own = len(self._calls), sum(call.message.source == message.source for call in self._calls.values())
        if not has_room(num_own, num_all, MAX_CALLS):
            raise RequestError(
                (
                    f"too many calls of /tokenize and similar routes: {num_all} are in progress, {num_own} of them yours, "
                    f"limit {MAX_CALLS} without other users; try again later"
                ),
                status=429,
                code="too_many_requests",
                retry_after_s=1,
            )
        call = _Call(message, self._tokenizer_of(message.call_id), asyncio.get_running_loop().create_future())
        self._backlogs[call.tokenizer].check_call(message)
        self._calls[message.call_id] = call
        self._num_open_calls.set(len(self._calls))
        self._send(call.tokenizer, message.call_id, message)
        try:
            return await asyncio.wait_for(asyncio.shield(call.answer), CALL_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise RequestError(
                f"{call.tokenizer}: no answer after {CALL_TIMEOUT_S:.0f} s",
                status=503,
                code="unavailable",
                retry_after_s=1,
            ) from None
        finally:
            del self._calls[message.call_id]
            self._num_open_calls.set(len(self._calls))
            if not call.answer.done():
                self._num_cancelled_calls.add(1)
                self._send(call.tokenizer, message.call_id, Abort(message.call_id, 0))
                call.answer.cancel()


def _resubmitted(sequence: OpenSequence) -> SequenceSubmit:
    return SequenceSubmit(sequence.generation.request, sequence.next_attempt())


def stopping() -> RequestError:
    return RequestError("the server is shutting down", status=503, code="shutting_down", retry_after_s=5)
