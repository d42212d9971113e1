"""Which checkpoint a path here means: a directory as it is, a GGUF file as the directory that stands for it. The rule
of `--model` and `tokamak ctl reload`, which know the hub besides (`locate.py`), and of `POST /admin/reload`."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.gguf.file import is_gguf
from engine.errors import CheckpointError


def local_checkpoint(name: str) -> Path | None:
    """Its absolute directory; None: nothing is there. CheckpointError where it is none, or cannot be looked at."""
    try:
        path = Path(name).expanduser()
        if is_gguf(path):
            from engine.checkpoint.gguf.convert import gguf_checkpoint  # of use to the few that come as such a file

            return gguf_checkpoint(path)
        if not path.exists():
            return None
        path = path.resolve()
        if not path.is_dir():
            raise CheckpointError(
                f"{path} is a file; give the directory that holds config.json and the weights, or a .gguf file"
            )
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} has no config.json, so it is no checkpoint")
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: the home of a user whom nobody knows
        raise CheckpointError(f"{name}: {error}") from error
    return path
