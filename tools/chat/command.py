"""`tokamak chat`: a conversation in the terminal with any server that speaks OpenAI's API.

Runs in its own process, as a client; `main` is called by tools/cli.py. With a PROMPT it answers once and ends; each line of
piped input is a message. A terminal shows the answer as Markdown (markdown.py), other outputs as plain text.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from engine.errors import OptionError, TokamakError
from engine.options.argument_parser import ArgumentParser
from tools.chat.conversation import Conversation, Piece, printable
from tools.chat.keys import ctrl_d_raises
from tools.exits import exit_code
from tools.target import add_target_arguments, find_target

if TYPE_CHECKING:
    from rich.console import Console

COMMANDS = {
    "/retry": ("", "ask the last question again"),
    "/clear": ("", "start a new conversation"),
    "/image": ("FILE", "send an image or video with the next question"),
    "/system": ("TEXT", "set the system prompt and start a new conversation"),
    "/help": ("", "show this list"),
    "/quit": ("", "quit; Ctrl+D works too, even during an answer"),
}
HELP = "\n".join(
    [
        *(f"{f'{name} {argument}':<14}{text}" for name, (argument, text) in COMMANDS.items()),
        f"{'Ctrl+C':<14}stop the answer",
        f"{'Alt+Enter':<14}insert a line break",
    ]
)


class Terminal:
    """The terminal of a conversation: reads what the user types and shows the answer as it comes."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        can_style = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        self._console = _console() if can_style else None

    def talk(self) -> None:
        """Run turn after turn until the user leaves."""
        self._note(f"Model: {self._conversation.model}. Type /help for a list of commands.")
        read_line = self._line_reader()
        while True:
            try:
                text = read_line().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._note(
                    "\nType /quit or press Ctrl+D to quit" if self._console is None else "Type /quit or press Ctrl+D to quit"
                )
                continue
            if text == "/quit":
                return
            try:
                with ctrl_d_raises():
                    self._take(text)
            except EOFError:
                self._note_stop()
                return
            except KeyboardInterrupt:
                self._note_stop()
            except TokamakError as error:
                print(f"\n{error}" if self._console is None else error, file=sys.stderr)

    def answer(self, text: str) -> None:
        self._show(self._conversation.ask(text))

    def _line_reader(self) -> Callable[[], str]:
        if self._console is None:
            return lambda: input("> ")
        from tools.chat.prompt import line_reader

        return line_reader("> ", list(COMMANDS))

    def _take(self, text: str) -> None:
        """Handle a line that the user typed."""
        begin = time.monotonic()
        if text == "/retry":
            self._show(self._conversation.retry())
        elif text.startswith("/"):
            return self._command(text)
        elif text:
            self.answer(text)
        else:
            return
        num_tokens, seconds = self._conversation.num_tokens, time.monotonic() - begin
        self._note(f"{num_tokens} tokens in {seconds:.2f} s" if num_tokens else f"{seconds:.2f} s")

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == "/clear":
            self._conversation.clear()
            self._note("started a new conversation")
        elif name == "/system":
            self._conversation.clear(rest.strip())
            self._note("system prompt set" if rest.strip() else "no system prompt")
        elif name == "/image":
            self._conversation.attach(rest.strip())
            self._note("attached to the next question")
        else:
            self._note(HELP if name == "/help" else f"unknown command {name}\n{HELP}")

    def _show(self, pieces: Iterator[Piece]) -> None:
        with contextlib.closing(pieces):  # type: ignore[type-var]  # a generator
            if self._console is not None:
                self._show_styled(pieces, self._console)
                return
            for piece in pieces:
                if not piece.is_reasoning:
                    print(printable(piece.text), end="", flush=True)
        print(flush=True)

    def _show_styled(self, pieces: Iterator[Piece], console: Console) -> None:
        """Show dimmed reasoning as it comes, then the answer as Markdown."""
        from tools.chat.markdown import MarkdownStream

        first = None
        has_reasoning = False
        try:
            for piece in pieces:
                if not piece.is_reasoning:
                    first = piece
                    break
                has_reasoning = True
                console.out(printable(piece.text), style="dim", end="", highlight=False)
        finally:
            if has_reasoning:
                console.print("\n")
        if first is None:
            return
        with MarkdownStream(console) as stream:
            stream.write(printable(first.text))
            for piece in pieces:
                if not piece.is_reasoning:
                    stream.write(printable(piece.text))

    def _note_stop(self) -> None:
        self._note("\nstopped" if self._console is None else "stopped")

    def _note(self, text: str) -> None:
        if self._console is None:
            print(text)
        else:
            self._console.out(text, style="dim", highlight=False)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="tokamak chat", description="Chat with any server that has the OpenAI API.")
    how = "answer this prompt and exit; piped input is appended to it. Without PROMPT, each piped line is one message"
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help=how)
    add_target_arguments(parser)
    parser.add_argument("--model", default="", help="default: the first model in /v1/models")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="image or video to ask about (may be repeated)"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="default: the limit of the model")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the default of the server")
    parser.add_argument("--seed", type=int, metavar="N")
    return parser


def _messages(prompt: str, is_piped: bool) -> Iterator[str]:
    """Yield the messages given as arguments or piped in. OptionError if there is neither a terminal nor a message."""
    if prompt or not is_piped:
        return iter([prompt] if prompt else [])
    lines = filter(None, map(str.strip, sys.stdin))
    first = next(lines, None)
    if first is None:
        raise OptionError("no prompt: pass PROMPT or pipe in text")
    return itertools.chain([first], lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit code 0: left, or answered; or as `tools/exits.py` says."""
    options = _parser().parse_args(argv)
    return exit_code("tokamak chat", lambda: _chat(options))


def _chat(options: argparse.Namespace) -> int:
    given = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": options.seed}
    prompt, is_piped = " ".join(options.prompt), not sys.stdin.isatty()
    target = find_target(options)
    if prompt and is_piped:
        prompt = "\n\n".join(part for part in (prompt, sys.stdin.read().strip()) if part)
    messages = _messages(prompt, is_piped)
    parameters = {name: value for name, value in given.items() if value is not None}
    conversation = Conversation(target, options.model, options.system, parameters)
    for path in options.image:
        conversation.attach(path)
    terminal = Terminal(conversation)
    for message in messages:
        terminal.answer(message)
    if not prompt and not is_piped:
        terminal.talk()
    return 0
