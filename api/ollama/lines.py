"""Turns an answer's parts into lines of JSON, or a whole answer. Runs in the api process.

A call is one line, because its arguments are an object. Silences are filled with empty lines.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

import msgspec
from msgspec import UNSET

from api.client.generation import Generation, OpenSequence
from api.ollama.answers import (
    DoneReason,
    OllamaChat,
    OllamaGeneration,
    OllamaMadeCall,
    OllamaMadeFunction,
    OllamaMessage,
)
from api.ollama.errors import error_body
from api.ollama.requests import OllamaRequest
from api.openai.logprobs import LogprobsShown, chat_logprobs, whole_chat_logprobs
from api.request_context import RequestContext
from api.schemas.responses import encoder
from api.sse import EventStream, EventWriter
from api.translation import Translation, cut_off
from engine.errors import RequestError
from engine.messages import Delta, Part

Answer = OllamaChat | OllamaGeneration
_LINE_ENDS = tuple((mark.encode(), b"\\u%04x" % ord(mark)) for mark in "\x85\u2028\u2029")


class LineStream(EventStream):
    media_type = "application/x-ndjson"


class LineWriter(EventWriter):
    """Writes one answer, as lines or whole."""

    def __init__(self, context: RequestContext, body: OllamaRequest, translation: Translation) -> None:
        self._arrival_ns = context.arrival_ns
        self._model_name = body.model or context.services.model.names[0]
        self._translation = translation
        self._num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self._call: Part | None = None  # the call with arguments in progress
        self._arguments: list[str] = []
        self.keep_alive = line(self.answer())

    def take(self, generation: Generation) -> bytes:
        (sequence,) = generation.sequences
        if not sequence.pending:
            return b""
        delta = sequence.take()
        pieces = self._pieces(delta.all_parts, sequence.is_finished)
        self._add_logprobs(pieces, delta)
        lines = [line(piece) for piece in pieces]
        if sequence.is_finished:
            error = cut_off(sequence)
            lines.append(line(self._ended(self.answer(), sequence)) if error is None else error_body(error) + b"\n")
        return b"".join(lines)

    def named(self, error: RequestError) -> RequestError:
        return self._translation.restore(error)

    def failed(self, error: RequestError) -> bytes:
        return error_body(self.named(error)) + b"\n"

    async def whole(self, generation: Generation) -> Answer:
        (sequence,) = generation.sequences
        if (error := cut_off(sequence)) is not None:
            raise error
        delta = sequence.take()
        parts = delta.all_parts
        text = "".join(part.text for part in parts if part.kind == "content")
        thinking = "".join(part.text for part in parts if part.kind == "reasoning")
        calls = [call for part in parts if (call := self._taken(part)) is not None]
        answer = self.answer(text, thinking, [*calls, *self._last_call()])
        if self._num_logprobs is not None:
            answer.logprobs = (await whole_chat_logprobs(delta.logprobs, LogprobsShown(self._num_logprobs))).content
        return self._ended(answer, sequence)

    @abstractmethod
    def answer(self, text: str = "", thinking: str = "", calls: Sequence[OllamaMadeCall] = ()) -> Answer:
        """Return one piece, or the whole."""

    def _pieces(self, parts: Iterable[Part], is_last: bool) -> list[Answer]:
        """Return a piece for each part, and for each complete call."""
        pieces: list[Answer] = []
        for part in parts:
            if (call := self._taken(part)) is not None:
                pieces.append(self.answer(calls=[call]))
            if part.kind == "content":
                pieces.append(self.answer(part.text))
            elif part.kind == "reasoning":
                pieces.append(self.answer(thinking=part.text))
        return [*pieces, *(self.answer(calls=[call]) for call in (self._last_call() if is_last else ()))]

    def _taken(self, part: Part) -> OllamaMadeCall | None:
        """Return the call that ends where this part begins."""
        if part.kind == "arguments":
            self._arguments.append(part.text)
            return None
        (ended,) = self._last_call() or (None,)
        if part.kind == "call":
            self._call, self._arguments = part, []
        return ended

    def _last_call(self) -> list[OllamaMadeCall]:
        """Return the call in progress, if there is one: it is complete."""
        call, self._call = self._call, None
        if call is None:
            return []
        arguments = "".join(self._arguments) or "{}"
        # JSON may contain line breaks between its parts, which would end a line here
        raw = msgspec.Raw(arguments.translate({0x0A: " ", 0x0D: " "}).encode())
        function = OllamaMadeFunction(index=call.call_index, name=call.text, arguments=raw)
        return [OllamaMadeCall(id=call.call_id, function=function)]

    def _add_logprobs(self, pieces: list[Answer], delta: Delta) -> None:
        """Add log-probabilities to the first piece from the tokens, even if it has no text yet."""
        if self._num_logprobs is None or not delta.logprobs:
            return
        if not pieces:
            pieces.append(self.answer())
        pieces[0].logprobs = chat_logprobs(delta.logprobs, LogprobsShown(self._num_logprobs))

    def _ended(self, answer: Answer, sequence: OpenSequence) -> Answer:
        now_ns = time.monotonic_ns()
        first_ns = sequence.first_token_ns or now_ns
        answer.done, answer.done_reason = True, "length" if sequence.finish_reason == "length" else "stop"
        answer.total_duration, answer.load_duration = now_ns - self._arrival_ns, 0
        answer.prompt_eval_count, answer.prompt_eval_duration = sequence.num_prompt_tokens, first_ns - self._arrival_ns
        answer.eval_count, answer.eval_duration = len(sequence.delivered), max(1, now_ns - first_ns)  # clients divide by it
        return answer

    def loaded(self, reason: DoneReason) -> Answer:
        """Answer a request without a prompt: the model is loaded."""
        answer = self.answer()
        answer.done, answer.done_reason = True, reason
        return answer


class ChatLines(LineWriter):
    def answer(self, text: str = "", thinking: str = "", calls: Sequence[OllamaMadeCall] = ()) -> OllamaChat:
        message = OllamaMessage(content=text, thinking=thinking or UNSET, tool_calls=list(calls) or UNSET)
        return OllamaChat(model=self._model_name, created_at=now(), message=message)


class GenerationLines(LineWriter):
    def answer(self, text: str = "", thinking: str = "", calls: Sequence[OllamaMadeCall] = ()) -> OllamaGeneration:
        """Return one piece, or the whole; without tools there are no calls."""
        return OllamaGeneration(model=self._model_name, created_at=now(), response=text, thinking=thinking or UNSET)


def now() -> str:
    return rfc3339(time.time())


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


def line(answer: Any) -> bytes:
    """Return an answer as JSON, without characters that some clients treat as the end of a line (Python's texts have more than
    line feeds)."""
    encoded = encoder.encode(answer)
    for mark, escaped in _LINE_ENDS:
        encoded = encoded.replace(mark, escaped)
    return encoded + b"\n"
