"""Printing never waits for a reader: full pipes, paused terminals, closed readers."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import termios
from collections.abc import Iterator

import pytest

from engine.supervisor import progress
from engine.supervisor.line_writer import MAX_WAITING_BYTES, LineWriter
from engine.supervisor.progress import LiveProgress, PlainProgress
from shm.counters import State
from tests.waiting import wait_until

LINE = "x" * 1023 + "\n"


class Pipe:
    """Pipe that is not read before `text`."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._read = b""

    def text(self) -> str:
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.reader, 1 << 16):
                self._read += part
        return self._read.decode()

    def close(self) -> None:
        for descriptor in (self.reader, self.writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def notice(num_dropped: int) -> str:
    return f"{num_dropped} missing\n"


@pytest.mark.timeout(30)
def test_lines_beyond_the_limit_are_dropped_and_counted(pipe: Pipe) -> None:
    writer = LineWriter(pipe.writer, notice)
    num_lines = 2 * (MAX_WAITING_BYTES + (1 << 20)) // len(LINE)
    for _ in range(num_lines):
        writer.write(LINE)
    num_dropped = writer.num_dropped
    assert 0 < num_dropped < num_lines
    wait_until(lambda: f"{num_dropped} missing\n" in pipe.text(), what="the notice")
    assert pipe.text().count(LINE) == num_lines - num_dropped
    writer.write("after\n")
    wait_until(lambda: pipe.text().endswith("missing\nafter\n"), what="lines after the notice")
    writer.close()
    assert writer.num_dropped == num_dropped


@pytest.mark.timeout(30)
def test_close_does_not_wait_for_a_reader(pipe: Pipe) -> None:
    writer = LineWriter(pipe.writer, notice)
    for _ in range(200):
        writer.write(LINE)
    writer.close()
    assert pipe.text().startswith(LINE)


@pytest.mark.timeout(30)
def test_close_writes_waiting_lines(pipe: Pipe) -> None:
    writer = LineWriter(pipe.writer, notice)
    writer.write("first\n")
    writer.write("last\n")
    writer.close()
    assert pipe.text() == "first\nlast\n"


@pytest.mark.timeout(30)
def test_lines_after_a_closed_reader_are_harmless(pipe: Pipe) -> None:
    os.close(pipe.reader)
    writer = LineWriter(pipe.writer, notice)
    writer.write("to nothing\n")
    writer.close()


@pytest.mark.timeout(30)
def test_full_disk_is_harmless() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        writer = LineWriter(full.fileno(), notice)
        writer.write("line\n")
        writer.close()


@pytest.mark.timeout(60)
def test_paused_terminal_delays_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl+S in the terminal of a start: a thread draws the table."""
    leader, terminal = pty.openpty()
    monkeypatch.setattr(progress, "STDERR", terminal)
    live = LiveProgress()
    try:
        termios.tcflow(terminal, termios.TCOOFF)
        for number in range(2000):
            live.show({"worker0": (State.LOADING, f"{number} of 2000 " + "y" * 60)})
        live.end()
        for number in range(2000):
            live.note(f"note {number} " + "y" * 60)
        assert live.num_dropped > 0
        os.set_blocking(leader, False)
        termios.tcflow(terminal, termios.TCOON)
        seen = b""

        def is_told() -> bool:
            nonlocal seen
            with contextlib.suppress(BlockingIOError):
                seen += os.read(leader, 1 << 16)
            return b"lines of the supervisor were dropped" in seen

        wait_until(is_told, what="the notice")
        live.close()
    finally:
        os.close(terminal)
        os.close(leader)


@pytest.mark.timeout(30)
def test_notice_is_json_if_lines_are(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "STDERR", pipe.writer)
    plain = PlainProgress("json")
    while not plain.num_dropped:
        plain.note("z" * 1000)
    wait_until(lambda: "were dropped" in pipe.text(), what="the notice")
    plain.close()
    assert "were dropped" in json.loads(pipe.text().splitlines()[-1])["message"]
