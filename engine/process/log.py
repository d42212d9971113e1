"""Format of an actor's log: outside text cannot imitate a log line.

Used by `engine.process.main` in every child process. Text in a log line, or in an exception's message, may come from a
request's path, header or body.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_UNPRINTABLE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


_PLAIN = re.compile(r"[\w.,:/~+-]+")


def printable(text: str) -> str:
    """Return `text` on one line, without characters that move the cursor or change the direction of text."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def json_line(actor: str, level: str, message: str, fields: Mapping[str, object] | None = None, time_s: float = 0.0) -> bytes:
    """Return a line of `--log-format json` without its end, in printable ASCII. `time_s`: since 1970; 0: now."""
    time_s = time_s or time.time()
    when = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(time_s))}.{int(time_s % 1 * 1000):03}Z"
    return json.dumps({"time": when, "level": level, "actor": actor, "message": message, **(fields or {})}).encode()


class LogFormatter(logging.Formatter):
    """Only the first line of a record begins with a time; further lines are indented. The `fields` of a record (`log.info(...,
    extra={"fields": {...}})`) follow its message."""

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        fields = getattr(record, "fields", None)
        if fields:
            text += "".join(f" {name}={_shown(value)}" for name, value in fields.items())
        return "\n    ".join(printable(line) for line in text.split("\n"))


def _shown(value: object) -> str:
    """Return the value as text, quoted where it could be taken for more than one value."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, actor, message, `exception` if there was one, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", None) or {})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        actor = record.name.removeprefix("tokamak.")
        return json_line(actor, record.levelname.lower(), record.getMessage(), fields, record.created).decode()


def formatter_for(log_format: str) -> logging.Formatter:
    """Return the formatter for `--log-format`."""
    return JsonFormatter() if log_format == "json" else LogFormatter()
