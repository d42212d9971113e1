"""The store of responses: atomic, shared by all processes, and bounded."""

from __future__ import annotations

import os
from pathlib import Path

from api.responses.store import MAX_RESPONSE_BYTES, ResponseStore

IDS = [f"resp_{number:032x}" for number in range(6)]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def save(store: ResponseStore, directory: Path, number: int, data: bytes) -> bool:
    """Save a response with a modification time by its number, independent of the clock of the file system."""
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


def test_full_store_evicts_from_its_largest_source(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path, max_responses=4)
    theirs = store.new_id("theirs")
    assert store.save(theirs, b"text")
    ours = [store.new_id("ours") for _ in range(6)]
    for number, response_id in enumerate(ours, 10):
        assert store.save(response_id, b"text")
        os.utime(tmp_path / response_id, ns=(number, number))
    assert names(tmp_path) == sorted([theirs, *ours[-3:]])
    store = ResponseStore(tmp_path, max_bytes=40)
    large = store.new_id("large")
    assert store.save(large, b"x" * 30)
    assert store.load(theirs) is not None
    assert store.save(store.new_id("large"), b"x" * 10)
    assert store.load(large) is None
    assert store.load(theirs) is not None


def test_id_begins_with_digest_of_source_and_run(tmp_path: Path) -> None:
    one, other = ResponseStore(tmp_path / "1"), ResponseStore(tmp_path / "2")
    owners = [store.new_id(source)[:13] for store in (one, other) for source in ("a", "b")]
    assert len(set(owners)) == 4
    assert one.new_id("a")[:13] == owners[0]
    assert one.new_id("a") != one.new_id("a")


def test_ids_cannot_escape_the_directory(tmp_path: Path) -> None:
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


def test_too_long_response_is_not_kept(tmp_path: Path) -> None:
    """A too long response would be read whole by every continuation; the stored ones stay."""
    store = ResponseStore(tmp_path)
    assert store.save(IDS[0], b"x")
    assert not store.save(IDS[1], b"x" * (MAX_RESPONSE_BYTES + 1))
    assert store.save(IDS[2], b"x" * MAX_RESPONSE_BYTES)
    assert names(tmp_path) == [IDS[0], IDS[2]]
