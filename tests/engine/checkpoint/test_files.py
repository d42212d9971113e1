"""Files that are replaced atomically, in a directory that other users may write to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.checkpoint.files import make_directory, replace_file


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kept.json"
    for content in (b"first", b"second"):
        replace_file(path, content)
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (content, 0o600)
    assert list(path.parent.iterdir()) == [path]


def test_directories_are_private(tmp_path: Path) -> None:
    """Missing directories are made private with any umask, existing ones stay unchanged."""
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        make_directory(tmp_path / "tokamak" / "weights")
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path, tmp_path / "tokamak", tmp_path / "tokamak" / "weights")]
    assert modes == [0o755, 0o700, 0o700]


def test_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at the path of the file nor at the guessed name of its temporary file."""
    other, path = tmp_path / "other", tmp_path / "kept.json"
    other.write_bytes(b"somebody's")
    path.symlink_to(other)
    replace_file(path, b"ours")
    assert (other.read_bytes(), path.is_symlink(), path.read_bytes()) == (b"somebody's", False, b"ours")
    monkeypatch.setattr(os, "urandom", bytes)  # zeros, so that the name can be foreseen
    drafted = path.with_suffix(f".{bytes(8).hex()}.partial")
    drafted.symlink_to(other)
    with pytest.raises(FileExistsError):
        replace_file(path, b"new")
    assert (other.read_bytes(), path.read_bytes()) == (b"somebody's", b"ours")


def test_failed_replacement_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
