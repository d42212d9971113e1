"""The actors' logs on stderr: complete lines with names, independent of changes of the files and of readers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.process.run_directory import Run
from engine.supervisor.log_relay import CHUNK_BYTES, LogRelay
from tests.waiting import wait_until

ACTORS = ("api0", "worker0")


class Reader:
    """The end of a pipe that a relay writes to; it is read only on request."""

    def __init__(self) -> None:
        self.end, self.writer = os.pipe()
        os.set_blocking(self.end, False)
        self._read = b""

    def text(self) -> str:
        try:
            while part := os.read(self.end, 1 << 16):
                self._read += part
        except BlockingIOError:
            pass
        return self._read.decode()

    def close(self) -> None:
        os.close(self.end)
        os.close(self.writer)


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run("0123abcd", tmp_path)


def write(run: Run, actor: str, text: str) -> None:
    with run.log_path(actor).open("a") as log:
        log.write(text)


def test_lines_have_names_and_appear_once(run: Run, reader: Reader) -> None:
    write(run, "api0", "before it began\n")
    relay = LogRelay(run, ACTORS, reader.writer, "text")
    write(run, "worker0", "half a li")
    relay.look()
    wait_until(lambda: "[api0] before it began\n" in reader.text(), what="the first line")
    assert "half" not in reader.text()
    write(run, "worker0", "ne\n\nanother\nunended")
    relay.look()
    wait_until(lambda: "[worker0] half a line\n[worker0] another\n" in reader.text(), what="whole lines")
    relay.look()
    relay.close()
    assert reader.text().count("before it began") == 1
    assert reader.text().endswith("[worker0] unended\n")


def test_recreated_log_is_read_from_its_beginning(run: Run, reader: Reader) -> None:
    relay = LogRelay(run, ACTORS, reader.writer, "text")
    write(run, "api0", "a long line that was there first\n")
    relay.look()
    wait_until(lambda: "first\n" in reader.text(), what="the first")
    run.log_path("api0").unlink()
    relay.look()
    write(run, "api0", "second\n")
    relay.look()
    relay.close()
    assert "[api0] second\n" in reader.text()


def test_slow_reader_blocks_nothing(run: Run, reader: Reader) -> None:
    """More than a pipe holds: reading the logs and ending take bounded time; printed lines are complete."""
    relay = LogRelay(run, ACTORS, reader.writer, "text")
    write(run, "api0", "x" * 99 + "\n")
    for _ in range(100):
        write(run, "api0", ("y" * 99 + "\n") * 100)
        relay.look()
    relay.close()
    assert reader.text().startswith("[api0] xxx")


def test_whoever_is_gone_ends_the_relay(run: Run) -> None:
    end, writer = os.pipe()
    os.close(end)
    relay = LogRelay(run, ACTORS, writer, "text")
    write(run, "api0", "line\n")
    relay.look()
    relay.close()
    os.close(writer)


def test_endless_line_is_split(run: Run, reader: Reader) -> None:
    relay = LogRelay(run, ACTORS, reader.writer, "text")
    write(run, "api0", "z" * (3 * CHUNK_BYTES))
    relay.look()
    wait_until(lambda: reader.text().count("z") == 3 * CHUNK_BYTES, what="all of it")
    relay.close()
    assert reader.text().count("[api0] ") == 3


def test_json_is_an_object_a_line(run: Run, reader: Reader) -> None:
    """Output of libraries and the interpreter becomes one, too."""
    relay = LogRelay(run, ACTORS, reader.writer, "json")
    write(run, "api0", '{"time": "now", "level": "info", "actor": "api0", "message": "ours"}\nFatal Python error: \x1b[31m\n')
    relay.look()
    relay.close()
    ours, theirs = (json.loads(line) for line in reader.text().splitlines())
    assert ours["message"] == "ours"
    assert theirs.items() >= {"actor": "api0", "message": "Fatal Python error: \\x1b[31m"}.items()
