"""No text of a request can look like a line of the log."""

from __future__ import annotations

import logging
import sys

from engine.process.log import LogFormatter


def formatted(message: str, error: Exception | None = None) -> str:
    try:
        if error is not None:
            raise error
        trace = None
    except Exception:
        trace = sys.exc_info()
    return LogFormatter().format(logging.LogRecord("tokamak.api0", logging.ERROR, __file__, 1, "%s failed", (message,), trace))


def test_lines_from_outside() -> None:
    forged = "2026-01-01 00:00:00,000 ERROR tokamak.worker0 all is lost"
    for separator in ("\n", "\r", "\r\n", "\x0b", "\x85", "\u2028"):
        lines = formatted(f"GET /a{separator}{forged}", ValueError(f"b{separator}{forged}")).splitlines()
        assert "tokamak.api0 GET /a" in lines[0]
        assert all(line.startswith("    ") for line in lines[1:])


def test_control_characters_are_escaped() -> None:
    assert "\\x1b[2J" in formatted("\x1b[2J")
    assert formatted("glüht ⚛\t1").endswith("glüht ⚛\t1 failed")
