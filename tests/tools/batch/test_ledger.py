"""The file of answers: in order, whole, and gone on with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import OptionError
from tokamak.connection import Reply
from tools.batch import ledger as module
from tools.batch.ledger import Ledger
from tools.batch.lines import Request, answer_line

REQUESTS = [Request(number + 1, f"r{number}", "/v1/completions", b"{}") for number in range(40)]
LINES = [answer_line(request, Reply(200 if index % 5 else 400, b'{"n": %d}' % index)) for index, request in enumerate(REQUESTS)]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "out.jsonl"
    assert {each.name for each in tmp_path.iterdir()} <= {"out.jsonl", "out.jsonl.part"}


def opened(path: Path) -> Ledger:
    ledger = Ledger(path)
    try:
        ledger.go_on(REQUESTS)
    except OptionError:
        ledger.close(False)
        raise
    return ledger


def take(ledger: Ledger, *indexes: int) -> None:
    for index in indexes:
        ledger.take(index, REQUESTS[index], LINES[index])


@pytest.mark.parametrize("seed", range(10))
def test_any_order_comes_in_order(path: Path, seed: int) -> None:
    """In several lives, each of which may end at any time; what was answered in one is there in the next."""
    rng = random.Random(seed)
    while True:
        ledger = opened(path)
        done = ledger.num_answered
        assert path.read_bytes() == b"".join(LINES[:done])
        early = [index for index in range(done, len(LINES)) if ledger.early.get(f"r{index}") == LINES[index]]
        assert len(early) == len({name for name in ledger.early if int(name[1:]) >= done})
        take(ledger, *early)
        missing = [index for index in range(ledger.num_answered, len(LINES)) if index not in early]
        rng.shuffle(missing)
        count = rng.randrange(len(missing) + 1)
        take(ledger, *missing[:count])
        ledger.close(ledger.num_answered == len(LINES))
        if ledger.num_answered == len(LINES):
            break
        rest = opened(path)
        held = [index for index in range(len(LINES)) if index < rest.num_answered or f"r{index}" in rest.early]
        rest.close(False)
        assert held == sorted({*range(done), *early, *missing[:count]})
    assert path.read_bytes() == b"".join(LINES)
    assert ledger.num_failed == 8
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("kept", [0, 1, 20, len(LINES[2]) - 1])
def test_a_torn_line_is_cut_off(path: Path, kept: int) -> None:
    """In either file."""
    ledger = opened(path)
    take(ledger, 0, 1, 4, 5)
    ledger.close(False)
    with open(path, "ab") as file:
        file.write(LINES[2][:kept])
    part = path.with_name("out.jsonl.part")
    part.write_bytes(LINES[4] + LINES[5][:kept])
    ledger = opened(path)
    assert (ledger.num_answered, ledger.early) == (2, {"r4": LINES[4]})
    take(ledger, 6, 2)
    assert part.read_bytes() == LINES[4] + LINES[6]
    take(ledger, 3, 4, 5)
    ledger.close(False)
    assert path.read_bytes() == b"".join(LINES[:7])
    assert part.read_bytes() == b""


def test_what_waits_takes_no_more_room_than_it_must(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PART_BYTES", 100)
    ledger = opened(path)
    take(ledger, 39)
    sizes = []
    for index in range(0, 38, 2):
        take(ledger, index + 1, index)
        sizes.append(path.with_name("out.jsonl.part").stat().st_size)
    assert max(sizes) <= 100 + 5 * max(map(len, LINES))
    ledger.close(False)
    again = opened(path)
    assert (again.num_answered, again.early["r39"]) == (38, LINES[39])
    again.close(False)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"something else\n", "no answer"),
        (b"something else", "no answer"),
        (b'{"id": 3}\n', "no answer"),
        (LINES[1] + LINES[0], "'r1'"),
        (LINES[0] + LINES[2], "'r2'"),
        (LINES[0] + b"else\n", "no answer"),
        (LINES[0] + b"else", "no answer"),
        (b"".join(LINES) + answer_line(Request(41, "r40"), Reply(200, b"{}")), "more answers"),
    ],
)
def test_a_file_of_something_else_stays_as_it_is(path: Path, content: bytes, what: str) -> None:
    path.write_bytes(content)
    with pytest.raises(OptionError, match=what):
        opened(path)
    assert path.read_bytes() == content


def test_one_at_a_time(path: Path) -> None:
    first = opened(path)
    with pytest.raises(OptionError, match="another run-batch"):
        opened(path)
    first.close(False)
    opened(path).close(False)


@pytest.mark.parametrize("name", [".", "no/such/file"])
def test_where_nothing_can_be_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="give another"):
        Ledger(tmp_path / name)


def test_a_device_is_no_file() -> None:
    with pytest.raises(OptionError, match="no regular file"):
        Ledger(Path("/dev/null"))
