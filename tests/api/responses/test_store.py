"""Where responses are kept: whole or not at all, for all processes, within bounds."""

from __future__ import annotations

import os
from pathlib import Path

from api.responses.store import MAX_RESPONSE_BYTES, ResponseStore

IDS = [f"resp_{number:032x}" for number in range(6)]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def save(store: ResponseStore, directory: Path, number: int, data: bytes) -> bool:
    """In order, whatever the clock of the file system."""
    is_kept = store.save(IDS[number], data)
    if is_kept:
        os.utime(directory / IDS[number], ns=(number, number))
    return is_kept


def test_any_process_finds_it(tmp_path: Path) -> None:
    one, other = ResponseStore(tmp_path / "kept"), ResponseStore(tmp_path / "kept")
    assert one.load(IDS[0]) is None
    assert one.save(IDS[0], b"text")
    assert other.load(IDS[0]) == b"text"
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700
    assert other.delete(IDS[0])
    assert not one.delete(IDS[0])
    assert one.load(IDS[0]) is None


def test_the_oldest_go(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path, max_responses=3)
    for number in range(5):
        assert save(store, tmp_path, number, b"text")
    assert names(tmp_path) == IDS[2:5]
    store = ResponseStore(tmp_path, max_bytes=20)
    assert save(store, tmp_path, 5, b"x" * 14)
    assert names(tmp_path) == IDS[4:]
    assert not save(store, tmp_path, 0, b"x" * 21)
    assert names(tmp_path) == IDS[4:]


def test_no_name_leads_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    store = ResponseStore(tmp_path / "kept")
    assert store.save(IDS[0], b"text")
    for name in ("../manifest.json", "", ".", f".{IDS[0]}", IDS[0][:-1], f"{IDS[0]}\n", "a" * 5000, "\x00"):
        assert store.load(name) is None
        assert not store.delete(name)
    assert (tmp_path / "manifest.json").exists()


def test_no_room_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("no directory")
    assert not ResponseStore(tmp_path / "kept").save(IDS[0], b"text")


def test_one_that_is_too_long_is_not_kept(tmp_path: Path) -> None:
    """Whoever goes on from it has it read at once; those that are there stay."""
    store = ResponseStore(tmp_path)
    assert store.save(IDS[0], b"x")
    assert not store.save(IDS[1], b"x" * (MAX_RESPONSE_BYTES + 1))
    assert store.save(IDS[2], b"x" * MAX_RESPONSE_BYTES)
    assert names(tmp_path) == [IDS[0], IDS[2]]
