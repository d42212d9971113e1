"""Checkpoint of a local path: a directory as it is, or the converted directory of a GGUF file. Used by `--model` and `tokamak
ctl reload`, which also search the hub (`locate.py`), and by `POST /admin/reload`."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.gguf.file import is_gguf
from engine.errors import CheckpointError


def local_checkpoint(name: str) -> Path | None:
    """Return the absolute directory of the checkpoint; None: the path does not exist. Raises CheckpointError if it is not a
    checkpoint or cannot be read."""
    try:
        path = Path(name).expanduser()
        if is_gguf(path):
            from engine.checkpoint.gguf.convert import gguf_checkpoint  # only needed for GGUF files

            return gguf_checkpoint(path)
        if not path.exists():
            return None
        path = path.resolve()
        if not path.is_dir():
            raise CheckpointError(f"{path} is a file; expected a directory with config.json and weights, or a .gguf file")
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} is not a checkpoint: it has no config.json")
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: unknown user in ~user
        raise CheckpointError(f"{name}: {error}") from error
    return path
