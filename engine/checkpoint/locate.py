"""Where a model's files are: on this machine (`local.py`), or under a hub name, whose snapshot is downloaded first.

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

from engine.checkpoint.local import local_checkpoint
from engine.errors import CheckpointError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
_FILES = ["*.json", "*.jinja", "*.model", "*.safetensors"]
_OTHER_FORMATS = ["*/*"]  # folders hold the same weights for other engines


def resolve_model(name: str, endpoint: str | None = None) -> Path:
    """The absolute directory of `name`: a local path (of a directory or a GGUF file), or `owner/model` or
    `owner/model@revision` on the hub.

    Raises CheckpointError that says what to do: no such path or repository, no access, no connection.
    """
    found = local_checkpoint(name)
    if found is None and (not _HUB_NAME.fullmatch(name) or name.startswith((".", "~"))):
        raise CheckpointError(f"{name}: no such directory, and no hub name of the form owner/model")
    found = found or local_checkpoint(str(_download(name, endpoint)))
    assert found is not None, f"{name} is not where it was downloaded to"
    return found


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
