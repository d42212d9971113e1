"""Clients' files on disk: full disks, incomplete uploads, and access by their owners."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from api.batches.batch import Batch, RequestCounts, StoredBatch
from api.batches.ledger import BatchLedger
from api.batches.lines import Request, answer_line
from api.files.store import FileStore, Upload, append
from engine.errors import RequestError

ROOM = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "files", 2 * ROOM, ROOM)


def upload(store: FileStore, source: str, num_bytes: int) -> str:
    made = Upload(store, source)
    try:
        made.write(b"x" * num_bytes)
        return made.finish("name", "batch", None).id
    finally:
        made.drop()


def test_full_disk_is_reported() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(RequestError, match="No space left") as raised:
        append(full, b"x")
    os.close(full)
    assert (raised.value.status, raised.value.code) == (507, "no_room")


def test_unwritable_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("")
    with pytest.raises(RequestError) as raised:
        upload(FileStore(tmp_path / "files", ROOM, ROOM), "a", 1)
    assert raised.value.status == 507


def test_one_user_leaves_room_for_others(store: FileStore) -> None:
    first = upload(store, "a", ROOM - 4096)
    with pytest.raises(RequestError, match="your files"):
        upload(store, "a", 8192)
    upload(store, "b", ROOM - 4096)
    with pytest.raises(RequestError, match="all users'"):
        upload(store, "c", 16384)
    assert [store.ids("file-", source) for source in ("a", "c")] == [[first], []]


def test_expired_file_makes_room(store: FileStore) -> None:
    """An expired file makes room although no request touched it since."""
    made = Upload(store, "a")
    made.write(b"x" * (ROOM - 4096))
    made.finish("name", "batch", 1)
    second = upload(store, "a", ROOM - 4096)
    assert store.ids("file-", "a") == [second]


def stored_batch(store: FileStore) -> StoredBatch:
    batch = Batch(
        id=store.new_id("batch_", "a"),
        endpoint="/v1/completions",
        input_file_id="",
        created_at=0,
        expires_at=0,
        request_counts=RequestCounts(total=3),
    )
    store.directory.mkdir(exist_ok=True)
    return StoredBatch(batch=batch, output_id=store.new_id("file-", "a"), error_id=store.new_id("file-", "a"))


def test_answers_rarely_list_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path / "files", 100 * ROOM, 100 * ROOM)
    ledger = BatchLedger(store, stored_batch(store))
    num_looks, scandir = 0, os.scandir

    def counted(path: Path) -> object:
        nonlocal num_looks
        num_looks += 1
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    for number in range(3000):
        ledger.take(b"x" * 1023 + b"\n", is_well=number % 2 == 0)
    ledger.close()
    assert 0 < num_looks <= 5  # the first of each file, and one more for each MiB
    assert (ledger.num_well, ledger.num_failed) == (1500, 1500)


def test_answers_fill_storage_to_the_last_byte(store: FileStore) -> None:
    stored = stored_batch(store)
    upload(store, "a", 1000)
    own = sum(path.stat().st_size for path in store.directory.iterdir())
    ledger = BatchLedger(store, stored)
    line = b"x" * 4095 + b"\n"
    num_lines = (ROOM - own) // len(line)
    for _ in range(num_lines):
        ledger.take(line, is_well=True)
    with pytest.raises(RequestError, match="your files would take 2 MiB, limit 1 MiB"):
        ledger.take(line, is_well=True)
    ledger.take(b"y" * ((ROOM - own) % len(line)), is_well=True)
    assert sum(path.stat().st_size for path in store.directory.iterdir()) == ROOM
    ledger.close()


def test_second_file_of_a_batch_counts_as_a_file(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.files.store.MAX_FILES_PER_USER", 1)
    upload(store, "a", 1)
    ledger = BatchLedger(store, stored_batch(store))
    ledger.take(b"x\n", is_well=True)
    with pytest.raises(RequestError, match="too many files: 2 of yours"):
        ledger.take(b"x\n", is_well=False)
    ledger.close()


def test_torn_answer_is_cut_off(store: FileStore) -> None:
    stored = stored_batch(store)
    requests = [Request(number, str(number), "/v1/completions", b"{}") for number in range(3)]
    ledger = BatchLedger(store, stored)
    for request in requests[:2]:
        ledger.take(answer_line(request, None), is_well=True)
    ledger.close()
    whole = store.path(stored.output_id).read_bytes()
    store.path(stored.output_id).write_bytes(whole + answer_line(requests[2], None)[:-5])
    ledger = BatchLedger(store, stored)
    assert ledger.answer_ids == {request.answer_id for request in requests[:2]}
    assert (ledger.num_well, ledger.num_failed) == (2, 0)
    assert store.path(stored.output_id).read_bytes() == whole
    assert ledger.finish() == (stored.output_id, None)
    ledger.close()
