"""The cluster key file: made once, refused if others can read it, never a part of messages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.cluster.key import is_exposed, make_key_file, read_key_file
from engine.errors import OptionError


def test_keys_depend_on_the_file_alone(tmp_path: Path) -> None:
    first, second, copy = (tmp_path / name for name in ("first", "second", "copy"))
    make_key_file(first)
    make_key_file(second)
    copy.write_bytes(first.read_bytes())
    copy.chmod(0o400)
    assert first.stat().st_mode & 0o777 == 0o600
    keys = read_key_file(first)
    assert keys == read_key_file(copy)
    assert len({*(getattr(keys, name) for name in keys.__struct_fields__)}) == 4
    assert keys.engine_public != read_key_file(second).engine_public
    text = first.read_text().split()[-1]
    assert not any(text.encode() in getattr(keys, name) for name in keys.__struct_fields__)


def test_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("mine")
    with pytest.raises(OptionError, match="File exists; remove it first"):
        make_key_file(path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "mode", "cause"),
    [
        (None, 0o600, "No such file"),
        (b"", 0o600, "is not a cluster key file"),
        (b"tokamak-cluster-key-1 abcd\n", 0o600, "is not a cluster key file"),
        (b"tokamak-cluster-key-1 " + b"zz" * 32, 0o600, "is not a cluster key file"),
        (b"\xff\xfe" * 40, 0o600, "it is not text"),
        (b"tokamak-cluster-key-1 " + b"ab" * 32 + b"\n", 0o640, "other users can use .*mode 640"),
        (b"tokamak-cluster-key-1 " + b"ab" * 32 + b"\n", 0o604, "other users can use .*mode 604"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: bytes | None, mode: int, cause: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(OptionError, match=cause):
        read_key_file(path)


@pytest.mark.parametrize(
    ("mode", "owner", "user", "expected"),
    [
        (0o600, 1000, 1000, False),
        (0o400, 1000, 1000, False),
        (0o440, 1000, 1000, True),
        (0o440, 0, 10001, False),  # a secret of Kubernetes
        (0o640, 0, 10001, False),
        (0o660, 0, 10001, True),
        (0o444, 0, 10001, True),
        (0o440, 0, 0, True),
    ],
)
def test_only_the_group_of_a_file_of_root_may_read_it(mode: int, owner: int, user: int, expected: bool) -> None:
    assert is_exposed(mode, owner, user) == expected


def test_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(OptionError, match="is not a cluster key file"):
        read_key_file(tmp_path / "fifo")
