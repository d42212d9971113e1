"""A conversation with a server that speaks OpenAI's API: the messages so far, and the answers as they come.

Used by `tokamak chat`, in its process.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import unicodedata
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import msgspec

from engine.errors import OptionError, TokamakError
from engine.installation import command
from tokamak.connection import Server
from tools.attachments import attachment
from tools.target import Target, error_text

SILENCE_LIMIT_S = 600.0  # the longest wait for a reply, or for more of it


class Piece(NamedTuple):
    """Text of an answer as it comes."""

    text: str
    is_reasoning: bool = False


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the name in newer servers


class Choice(msgspec.Struct):
    delta: Delta = msgspec.field(default_factory=Delta)


class Usage(msgspec.Struct):
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class ModelCard(msgspec.Struct):
    id: str


class ModelList(msgspec.Struct):
    data: list[ModelCard] = []


class Conversation:
    """The messages so far, and the server that continues them."""

    def __init__(self, target: Target, model: str, system: str, parameters: dict[str, Any]) -> None:
        self._target = target
        self._server = Server(target.url, target.api_key, SILENCE_LIMIT_S)
        self._parameters = parameters
        self._system = system
        self._turns: list[dict[str, Any]] = []
        self._attached: list[dict[str, Any]] = []
        self._question: dict[str, Any] | None = None  # the last question, answered or not
        self.num_tokens = 0  # usage of the last reply, as counted by the server
        self.model = model or self._first_model()

    def clear(self, system: str | None = None) -> None:
        """Forget all turns; a given system prompt replaces the old one."""
        self._turns.clear()
        self._attached.clear()
        self._question = None
        if system is not None:
            self._system = system

    def attach(self, path: str) -> None:
        """Attach a file to the next question; it stays in the conversation."""
        self._attached.append(attachment(path))

    def ask(self, text: str) -> Generator[Piece]:
        """Yield the answer as it is generated. A partial answer is kept, an empty one is not."""
        content = [*self._attached, {"type": "text", "text": text}] if self._attached else text
        return self._answer({"role": "user", "content": content}, len(self._turns))

    def retry(self) -> Generator[Piece]:
        """Ask the last question again; the new answer replaces the old one. OptionError if there is no question."""
        if self._question is None:
            raise OptionError("no question to repeat")
        is_answered = len(self._turns) >= 2 and self._turns[-2] is self._question
        return self._answer(self._question, len(self._turns) - 2 * is_answered)

    def _answer(self, question: dict[str, Any], num_kept: int) -> Generator[Piece]:
        """Yield the answer to `question` after the first `num_kept` messages."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {
            "model": self.model,
            "messages": [*system, *self._turns[:num_kept], question],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._parameters,
        }
        self._question = question
        self.num_tokens = 0
        texts: list[str] = []
        try:
            for piece in self._stream(body):
                if not piece.is_reasoning:
                    texts.append(piece.text)
                yield piece
        finally:
            if texts:
                self._turns[num_kept:] = [question, {"role": "assistant", "content": "".join(texts)}]
                sent = question["content"] if isinstance(question["content"], list) else []
                self._attached = [part for part in self._attached if part not in sent]

    def _first_model(self) -> str:
        with self._reply("GET", "/v1/models") as reply:
            try:
                return msgspec.json.decode(reply.read(), type=ModelList).data[0].id
            except (msgspec.DecodeError, IndexError):
                raise TokamakError(f"{self._target.url} lists no models; choose one with --model") from None

    def _stream(self, body: dict[str, Any]) -> Iterator[Piece]:
        data = json.dumps(body, ensure_ascii=False).encode(errors="replace")  # text may hold bytes that are not UTF-8
        with self._reply("POST", "/v1/chat/completions", data) as reply:
            for line in reply:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = msgspec.json.decode(data, type=Chunk)
                if chunk.error is not None:
                    raise TokamakError(f"the server ended the reply: {chunk.error}")
                if chunk.usage is not None:
                    self.num_tokens = chunk.usage.completion_tokens
                delta = chunk.choices[0].delta if chunk.choices else Delta()
                if thought := delta.reasoning_content or delta.reasoning:
                    yield Piece(thought, is_reasoning=True)
                if delta.content:
                    yield Piece(delta.content)
        raise TokamakError("the connection closed before the reply was complete")

    @contextlib.contextmanager
    def _reply(self, method: str, path: str, body: bytes = b"") -> Iterator[http.client.HTTPResponse]:
        """Provide a reply with status 200. The block closes its connection, which also stops the generation."""
        try:
            with self._server.stream(method, path, body or None) as reply:
                if reply.status != 200:
                    raise TokamakError(f"{self._target.url} answers {reply.status}: {error_text(reply.read())}")
                yield reply
        except (ConnectionRefusedError, FileNotFoundError):
            remedy = f"start a server with `{command('serve')}`, or choose another with --url"
            raise TokamakError(f"no server listens on {self._target.url}; {remedy}") from None
        except (OSError, msgspec.DecodeError) as error:
            raise TokamakError(f"{self._target.url}: {error or type(error).__name__}") from error


def printable(text: str) -> str:
    """Return text without control characters, which a model could use to control the terminal."""
    return "".join(character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc")
