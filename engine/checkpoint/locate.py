"""Where a model's files are: a local directory as it is, a GGUF file as the directory that stands for it, or a hub name whose
snapshot is downloaded first.

Called once by the launcher, before any actor starts; actors see only the absolute path. The hub's endpoint, cache directory,
token and offline switch are huggingface_hub's own (`HF_ENDPOINT`, `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`).
"""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from engine.checkpoint.gguf.convert import gguf_checkpoint
from engine.checkpoint.gguf.file import is_gguf
from engine.errors import CheckpointError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
_FILES = ["*.json", "*.jinja", "*.model", "*.safetensors"]
_OTHER_FORMATS = ["*/*"]  # folders hold the same weights for other engines


def resolve_model(name: str, endpoint: str | None = None) -> Path:
    """The absolute directory of `name`: a local path (of a directory or a GGUF file), or `owner/model` or
    `owner/model@revision` on the hub.

    Raises CheckpointError that says what to do: no such path or repository, no access, no connection.
    """
    path = Path(name).expanduser()
    if is_gguf(path):
        return gguf_checkpoint(path)
    if path.exists():
        return _checked(path.resolve())
    if not _HUB_NAME.fullmatch(name) or name.startswith((".", "~")):
        raise CheckpointError(f"{name}: no such directory, and no hub name of the form owner/model")
    return _checked(_download(name, endpoint))


def _checked(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give the directory that holds config.json and the weights, or a .gguf file")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json, so it is no checkpoint")
    return path


def _download(name: str, endpoint: str | None) -> Path:
    repository, _, revision = name.partition("@")
    try:
        snapshot = snapshot_download(
            repository, revision=revision or None, endpoint=endpoint, allow_patterns=_FILES, ignore_patterns=_OTHER_FORMATS
        )
    except GatedRepoError as error:
        raise CheckpointError(f"{repository} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repository}: no such directory here and no such repository on the hub (or it is private: set HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repository} has no revision {revision!r} on the hub") from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{repository}: the hub cannot be reached and no snapshot is cached; check the connection or give a local directory"
        ) from error
    except (HfHubHTTPError, httpx2.HTTPError, OSError, ValueError) as error:
        raise CheckpointError(f"{repository} cannot be downloaded: {error}") from error
    return Path(snapshot).resolve()
