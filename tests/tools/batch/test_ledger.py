"""The file of answers: in order, complete, and continued."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.batches.lines import Error, Request, answer_line
from engine.errors import OptionError
from tokamak.connection import Reply
from tools.batch import ledger as module
from tools.batch.ledger import Ledger

REQUESTS = [Request(number + 1, f"r{number}", "/v1/completions", b"{}") for number in range(40)]
IDS = [request.answer_id for request in REQUESTS]
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
def test_answers_of_any_order_are_sorted(path: Path, seed: int) -> None:
    """Several lives may each end at any time; answers of one life are there in the next."""
    rng = random.Random(seed)
    while True:
        ledger = opened(path)
        done = ledger.num_answered
        assert path.read_bytes() == b"".join(LINES[:done])
        early = [index for index in range(done, len(LINES)) if ledger.early.get(IDS[index]) == LINES[index]]
        assert len(early) == len({name for name in ledger.early if IDS.index(name) >= done})
        take(ledger, *early)
        missing = [index for index in range(ledger.num_answered, len(LINES)) if index not in early]
        rng.shuffle(missing)
        count = rng.randrange(len(missing) + 1)
        take(ledger, *missing[:count])
        ledger.close(ledger.num_answered == len(LINES))
        if ledger.num_answered == len(LINES):
            break
        rest = opened(path)
        held = [index for index in range(len(LINES)) if index < rest.num_answered or IDS[index] in rest.early]
        rest.close(False)
        assert held == sorted({*range(done), *early, *missing[:count]})
    assert path.read_bytes() == b"".join(LINES)
    assert ledger.num_failed == 8
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("kept", [0, 1, 20, len(LINES[2]) - 1])
def test_truncated_line_is_cut_off(path: Path, kept: int) -> None:
    """A truncated line in either file."""
    ledger = opened(path)
    take(ledger, 0, 1, 4, 5)
    ledger.close(False)
    with open(path, "ab") as file:
        file.write(LINES[2][:kept])
    part = path.with_name("out.jsonl.part")
    part.write_bytes(LINES[4] + LINES[5][:kept])
    ledger = opened(path)
    assert (ledger.num_answered, ledger.early) == (2, {IDS[4]: LINES[4]})
    take(ledger, 6, 2)
    assert part.read_bytes() == LINES[4] + LINES[6]
    take(ledger, 3, 4, 5)
    ledger.close(False)
    assert path.read_bytes() == b"".join(LINES[:7])
    assert part.read_bytes() == b""


def test_file_of_early_answers_stays_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (again.num_answered, again.early[IDS[39]]) == (38, LINES[39])
    again.close(False)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"something else\n", "not a batch answer"),
        (b"something else", "not a batch answer"),
        (b'{"id": 3}\n', "not a batch answer"),
        (LINES[1] + LINES[0], "'r1'"),
        (LINES[0] + LINES[2], "'r2'"),
        (LINES[0] + b"else\n", "not a batch answer"),
        (LINES[0] + b"else", "not a batch answer"),
        (b"".join(LINES) + answer_line(Request(41, "r40"), Reply(200, b"{}")), "more answers"),
    ],
)
def test_foreign_file_is_left_unchanged(path: Path, content: bytes, what: str) -> None:
    path.write_bytes(content)
    with pytest.raises(OptionError, match=what):
        opened(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "changed",
    [
        Request(2, "r1", "/v1/completions", b'{"prompt": "other"}'),
        Request(2, "r1", "/v1/chat/completions", b"{}"),
        Request(2, "r1", error=Error("invalid_url", "line 2: url is 'x'")),
    ],
    ids=["body", "url", "malformed"],
)
def test_changed_request_is_not_answered(path: Path, changed: Request) -> None:
    """Under the same custom_id: an answered line stays and is reported; one that was answered early is sent again."""
    ledger = opened(path)
    take(ledger, 0, 1, 3)
    ledger.close(False)
    again = Ledger(path)
    with pytest.raises(
        OptionError, match=r"line 2 answers an earlier version of request 'r1'.* line 2 .*; choose another file, or"
    ):
        again.go_on([REQUESTS[0], changed, *REQUESTS[2:]])
    again.close(False)
    assert path.read_bytes() == b"".join(LINES[:2])
    rest = opened(path)
    assert changed.answer_id not in rest.early
    assert list(rest.early) == [IDS[3]]
    rest.close(False)


def test_positions_of_lines_do_not_matter(path: Path) -> None:
    """One more empty line, and more requests at the end."""
    ledger = opened(path)
    take(ledger, 0, 1, 2)
    ledger.close(False)
    again = Ledger(path)
    again.go_on([Request(each.number + 1, each.custom_id, each.url, each.body) for each in REQUESTS])
    assert again.num_answered == 3
    again.close(False)


def test_one_at_a_time(path: Path) -> None:
    first = opened(path)
    with pytest.raises(OptionError, match="another run-batch"):
        opened(path)
    first.close(False)
    opened(path).close(False)


@pytest.mark.parametrize("name", [".", "no/such/file"])
def test_unwritable_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="choose another"):
        Ledger(tmp_path / name)


def test_a_device_is_no_file() -> None:
    with pytest.raises(OptionError, match="not a regular file"):
        Ledger(Path("/dev/null"))


@pytest.mark.parametrize("what", ["file", "link", "fifo", "directory"])
def test_foreign_part_file_is_left_alone(path: Path, what: str) -> None:
    """A user's own file of that name, possibly the input file."""
    beside, other = path.with_name("out.jsonl.part"), path.parent.with_suffix(".other")
    other.write_text("mine\n")
    if what == "file":
        beside.write_text("mine\n")
    elif what == "link":
        beside.symlink_to(other)
    elif what == "fifo":
        os.mkfifo(beside)
    else:
        beside.mkdir()
    before = beside.lstat()
    with pytest.raises(OptionError, match=r"out\.jsonl\.part"):
        Ledger(path)
    after = beside.lstat()
    assert (after.st_ino, after.st_mode, after.st_size, other.read_text()) == (
        before.st_ino,
        before.st_mode,
        before.st_size,
        "mine\n",
    )


def test_other_requests_keep_early_answers(path: Path) -> None:
    """A shorter file is given by mistake: all of its requests seem answered."""
    ledger = opened(path)
    take(ledger, 0, 1, 2, 5)
    ledger.close(False)
    ledger = Ledger(path)
    with pytest.raises(OptionError, match="more answers"):
        ledger.go_on(REQUESTS[:2])
    ledger.close(ledger.num_answered == 2)
    ledger = opened(path)
    assert (ledger.num_answered, list(ledger.early)) == (3, [IDS[5]])
    ledger.close(False)


def test_deeply_nested_answer_is_continued(path: Path) -> None:
    for depth in (800, 1015, 5000):
        ledger = Ledger(path)
        ledger.go_on(REQUESTS)
        index = ledger.num_answered
        ledger.take(index, REQUESTS[index], answer_line(REQUESTS[index], Reply(200, b"[" * depth + b"]" * depth)))
        ledger.close(False)
    assert opened(path).num_answered == 3
