"""`tokamak chat`: a conversation in the terminal with any server that speaks OpenAI's API.

Runs in its own process, as a client; `main` is called by tools/cli.py. With a PROMPT, or with text piped in, it answers once
and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import socket
import sys
import time
import unicodedata
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import msgspec
import orjson

from engine.errors import OptionError, TokamakError
from engine.options.argument_parser import ArgumentParser
from tools.attachments import attachment
from tools.target import Target, add_target_arguments, error_text, find_target

HELP = """/clear        forget the conversation
/image FILE   show it (a video, too) with the next question
/system TEXT  set the system prompt and forget the conversation
/help         this
/quit         leave; so does Ctrl+D
Ctrl+C        stop a reply"""

INTERRUPTED = 130
SILENCE_LIMIT_S = 600.0  # the longest wait for a reply, or for more of it


class Delta(msgspec.Struct):
    content: str | None = None


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
        self._parameters = parameters
        self._system = system
        self._turns: list[dict[str, Any]] = []
        self._attached: list[dict[str, Any]] = []
        self.num_tokens = 0  # of the last reply, as the server counts
        self.model = model or self._first_model()

    def clear(self, system: str | None = None) -> None:
        """Forget all turns; a new system prompt where one is given."""
        self._turns.clear()
        self._attached.clear()
        if system is not None:
            self._system = system

    def attach(self, path: str) -> None:
        """A file to go with the next question, and to stay in the conversation."""
        self._attached.append(attachment(path))

    def ask(self, text: str) -> Generator[str]:
        """The reply's text as it is generated. A turn that breaks off stays as far as it came; one without a word does not."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        content = [*self._attached, {"type": "text", "text": text}] if self._attached else text
        question = {"role": "user", "content": content}
        body = {
            "model": self.model,
            "messages": [*system, *self._turns, question],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._parameters,
        }
        self.num_tokens = 0
        pieces: list[str] = []
        try:
            for piece in self._stream(body):
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self._turns += [question, {"role": "assistant", "content": "".join(pieces)}]
                self._attached.clear()

    def _first_model(self) -> str:
        with self._reply("GET", "/v1/models") as reply:
            try:
                return msgspec.json.decode(reply.read(), type=ModelList).data[0].id
            except (msgspec.DecodeError, IndexError):
                raise TokamakError(f"{self._target.url} names no model; use --model") from None

    def _stream(self, body: dict[str, Any]) -> Iterator[str]:
        with self._reply("POST", "/v1/chat/completions", orjson.dumps(body)) as reply:
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
                if chunk.choices and chunk.choices[0].delta.content:
                    yield chunk.choices[0].delta.content
        raise TokamakError("the connection ended in the middle of the reply")

    @contextlib.contextmanager
    def _reply(self, method: str, path: str, body: bytes = b"") -> Iterator[http.client.HTTPResponse]:
        """A reply with status 200. Its connection closes with the block, which also stops the generation."""
        kind = http.client.HTTPSConnection if self._target.is_tls else http.client.HTTPConnection
        connection = kind(self._target.host, self._target.port, timeout=SILENCE_LIMIT_S)
        try:
            if self._target.uds:
                connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.sock.settimeout(SILENCE_LIMIT_S)
                connection.sock.connect(self._target.uds)
            headers = {**self._target.headers(), "content-type": "application/json"}
            connection.request(method, self._target.path(path), body or None, headers)
            reply = connection.getresponse()
            if reply.status != 200:
                raise TokamakError(f"{self._target.url} answers {reply.status}: {error_text(reply.read())}")
            yield reply
        except (ConnectionRefusedError, FileNotFoundError):
            remedy = "start a server with tools/serve, or name another one with --url"
            raise TokamakError(f"nothing listens on {self._target.url}; {remedy}") from None
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise TokamakError(f"{self._target.url}: {error or type(error).__name__}") from error
        finally:
            connection.close()


def printable(text: str) -> str:
    """Text without the control characters that would drive the terminal, whatever a model writes."""
    return "".join(character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc")


class Terminal:
    """The screen's side of a conversation: what the user types, and the reply as it comes."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._is_styled = sys.stdout.isatty()

    def talk(self) -> None:
        """Turn after turn, until the user leaves."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing and history)
        self._note(f"{self._conversation.model}. /help lists the commands.")
        while True:
            try:
                text = input(self._style("> ", "1", is_prompt=True)).strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                self._note("\n/quit or Ctrl+D to leave")
                continue
            if text == "/quit":
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._turn(text)

    def answer(self, text: str) -> None:
        """One reply, its text alone."""
        with contextlib.closing(self._conversation.ask(text)) as pieces:
            for piece in pieces:
                print(printable(piece), end="", flush=True)
        print()

    def _turn(self, text: str) -> None:
        begin = time.monotonic()
        try:
            self.answer(text)
        except KeyboardInterrupt:
            self._note("\nstopped")
        except TokamakError as error:
            print(f"\n{error}", file=sys.stderr)
        else:
            num_tokens, seconds = self._conversation.num_tokens, time.monotonic() - begin
            self._note(f"{num_tokens} tokens in {seconds:.2f} s" if num_tokens else f"{seconds:.2f} s")

    def _command(self, text: str) -> None:
        command, _, rest = text.partition(" ")
        if command == "/clear":
            self._conversation.clear()
            self._note("forgotten")
        elif command == "/system":
            self._conversation.clear(rest.strip())
            self._note("system prompt set" if rest.strip() else "no system prompt")
        elif command == "/image":
            try:
                self._conversation.attach(rest.strip())
                self._note("goes with the next question")
            except OptionError as error:
                print(error, file=sys.stderr)
        else:
            self._note(HELP if command == "/help" else f"no command {command}\n{HELP}")

    def _note(self, text: str) -> None:
        print(self._style(text, "2"))

    def _style(self, text: str, code: str, *, is_prompt: bool = False) -> str:
        if not self._is_styled:
            return text
        # readline must be told which characters of a prompt take no room
        begin, end = ("\001", "\002") if is_prompt else ("", "")
        return f"{begin}\033[{code}m{end}{text}{begin}\033[0m{end}"


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="tokamak chat", description="A conversation with a server that speaks OpenAI's API.")
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="answer this and end; piped input is added to it")
    add_target_arguments(parser)
    parser.add_argument("--model", default="", help="default: the first of /v1/models")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="picture or video to ask about, one or more"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="default: up to the model's limit")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the server's")
    parser.add_argument("--seed", type=int, metavar="N")
    return parser


def _question(words: Sequence[str]) -> str:
    """The prompt from the command line and from what is piped in, or "" where the user wants to talk."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    return "\n\n".join(part for part in (" ".join(words), piped.strip()) if part)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: left, or answered; 1: no answer; 2: bad options; 130: interrupted."""
    options = _parser().parse_args(argv)
    given = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": options.seed}
    try:
        target = find_target(options)
        question = _question(options.prompt)
        if not question and not sys.stdin.isatty():
            raise OptionError("there is no PROMPT and nothing was piped in")
        parameters = {name: value for name, value in given.items() if value is not None}
        conversation = Conversation(target, options.model, options.system, parameters)
        for path in options.image:
            conversation.attach(path)
        terminal = Terminal(conversation)
        if question:
            terminal.answer(question)
        else:
            terminal.talk()
    except TokamakError as error:
        print(f"tokamak chat: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
