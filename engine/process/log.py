"""How an actor's log is written: no text from outside can look like a line of ours.

Used by `engine.process.main` in every child process. What goes into a log line, or into an exception's message, may come from
a request's path, header or body.
"""

from __future__ import annotations

import logging
import re

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_UNPRINTABLE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """`text` on one line, without what moves a terminal's cursor or turns text around."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


class LogFormatter(logging.Formatter):
    """The lines of a record after its first are indented: only ours begin with a time."""

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(printable(line) for line in super().format(record).split("\n"))
