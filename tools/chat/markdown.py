"""Incremental Markdown in the terminal: finished blocks are printed once, the last one is redrawn as it grows.

Used by `tokamak chat`, in its process. The cost depends on the length of the last block, not of the answer.
"""

from __future__ import annotations

import time
from types import TracebackType

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments

from tools.chat.conversation import printable

PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])  # `vector<int>` is not HTML
MIN_REDRAW_S = 0.08
MAX_DRAWING_SHARE = 0.25  # share of time for drawing slow blocks


class SafeMarkdown:
    """Markdown without terminal control characters, including those written as entities. `height`: show only the last lines."""

    def __init__(self, text: str, height: int | None = None) -> None:
        self._text = text
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        markdown = Markdown("", hyperlinks=False)
        markdown.parsed = PARSER.parse(self._text)
        lines = console.render_lines(markdown, options.update(height=None), pad=False)
        for line in lines[-self._height :] if self._height else lines:
            yield Segments([Segment(printable(segment.text), segment.style, segment.control) for segment in line])
            yield Segment.line()


class MarkdownStream:
    """Context in which `write` shows more text."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._text = ""  # source of unfinished blocks
        self._is_first = True
        self._next_draw_s = 0.0

    def __enter__(self) -> MarkdownStream:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._live.stop()
        self._print(self._text)

    def write(self, text: str) -> None:
        self._text += text
        begin = time.monotonic()
        if begin < self._next_draw_s:
            return
        starts = [token.map[0] for token in PARSER.parse(self._text) if token.level == 0 and token.map and token.nesting >= 0]
        if len(starts) > 1:
            lines = self._text.splitlines(keepends=True)
            self._print("".join(lines[: starts[-1]]))
            self._text = "".join(lines[starts[-1] :])
        self._live.update(SafeMarkdown(self._text, max(1, self._console.height - 2)), refresh=True)
        end = time.monotonic()
        self._next_draw_s = end + max(MIN_REDRAW_S, (end - begin) / MAX_DRAWING_SHARE)

    def _print(self, text: str) -> None:
        if not text.strip():
            return
        if not self._is_first:
            self._console.print()
        self._console.print(SafeMarkdown(text), end="")
        self._is_first = False
