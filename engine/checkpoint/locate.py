"""Finds a model's files: on this machine (`local.py`), or on the hub, from which a snapshot is downloaded first.

Called once by the launcher, before any actor starts; actors see only the absolute path. The hub's endpoint, cache directory,
token and offline switch are huggingface_hub's own (`HF_ENDPOINT`, `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
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
_GGUF_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?:(?P<tag>[\w.-]+)")
_FILES = ["*.json", "*.jinja", "*.model", "*.safetensors"]
_OTHER_FORMATS = ["*/*"]  # subfolders have the same weights for other engines
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model"]
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_QUANTIZATION = re.compile(r"(?<![A-Za-z0-9])(I?Q\d\w*|TQ\d\w*|BF16|F16|F32|FP16|MXFP4\w*)$", re.IGNORECASE)


def resolve_model(name: str, endpoint: str | None = None) -> Path:
    """Return the absolute directory of `name`: a local path (of a directory or a GGUF file), or on the hub `owner/model`,
    `owner/model@revision`, or `owner/model:Q4_K_M` for the GGUF file with that quantization.

    Raises CheckpointError with a remedy: no such path or repository, no access, no connection.
    """
    found = local_checkpoint(name)
    file = _GGUF_NAME.fullmatch(name) if found is None else None
    if file is not None:
        found = local_checkpoint(str(_download_gguf(file["repository"], file["revision"] or "", file["tag"], endpoint)))
    elif found is None and (not _HUB_NAME.fullmatch(name) or name.startswith((".", "~"))):
        raise CheckpointError(f"{name}: not a directory, and not a hub name of the form owner/model or owner/model:Q4_K_M")
    found = found or local_checkpoint(str(_download(name, endpoint)))
    assert found is not None, f"{name} is missing after its download"
    return found


def resolve_tokenizer(name: str, endpoint: str | None = None) -> Path:
    """Return the directory of a tokenizer's files, found in the same way. Raises CheckpointError."""
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: unknown user in ~user
        raise CheckpointError(f"{name}: {error}") from error
    if not _HUB_NAME.fullmatch(name) or name.startswith((".", "~")):
        raise CheckpointError(f"{name}: not a directory, and not a hub name of the form owner/model")
    return _download(name, endpoint, _TOKENIZER_FILES)


def _download(name: str, endpoint: str | None, patterns: Sequence[str] = _FILES) -> Path:
    repository, _, revision = name.partition("@")
    with _explained(repository, revision):
        snapshot = snapshot_download(
            repository,
            revision=revision or None,
            endpoint=endpoint,
            allow_patterns=list(patterns),
            ignore_patterns=_OTHER_FORMATS,
        )
    return Path(snapshot).resolve()


def _download_gguf(repository: str, revision: str, tag: str, endpoint: str | None) -> Path:
    """Download the GGUF file of a repository that `tag` selects. If the hub cannot be reached, cached files are searched."""
    with _explained(repository, revision):
        try:
            names = HfApi(endpoint=endpoint).list_repo_files(repository, revision=revision or None)
        except (httpx2.TransportError, ConnectionError):
            cached = Path(
                snapshot_download(
                    repository, revision=revision or None, endpoint=endpoint, allow_patterns=["*.gguf"], local_files_only=True
                )
            )
            names = [str(file.relative_to(cached)) for file in cached.rglob("*.gguf")]
        name = _chosen(repository, tag, names)
        return Path(hf_hub_download(repository, name, revision=revision or None, endpoint=endpoint))


def _chosen(repository: str, tag: str, names: Sequence[str]) -> str:
    files = {name: name.removesuffix(".gguf") for name in names if name.endswith(".gguf") and "mmproj" not in name.lower()}
    wanted = re.compile(rf"(.*[-._/])?{re.escape(tag.removesuffix('.gguf'))}", re.IGNORECASE)
    found = [name for name, stem in files.items() if wanted.fullmatch(_PART.sub("", stem))]
    if len(found) == 1 and not _PART.search(files[found[0]]):
        return found[0]
    if found:
        raise CheckpointError(
            f"{repository}:{tag} is split into {len(found)} parts; merge them with `llama-gguf-split --merge` first"
        )
    known = sorted({match[0] for stem in files.values() if (match := _QUANTIZATION.search(_PART.sub("", stem)))})
    there = f"there are {', '.join(known)}" if known else "it has no GGUF files"
    raise CheckpointError(f"{repository} has no {tag}; {there}")


@contextlib.contextmanager
def _explained(repository: str, revision: str) -> Iterator[None]:
    """Convert the hub's errors to ours."""
    try:
        yield
    except GatedRepoError as error:
        raise CheckpointError(f"{repository} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repository}: neither a directory nor a repository on the hub (if it is private, set HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repository} has no revision {revision!r} on the hub") from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{repository}: the hub cannot be reached and no snapshot is cached; check the connection or use a local directory"
        ) from error
    except (HfHubHTTPError, httpx2.HTTPError, OSError, ValueError) as error:
        raise CheckpointError(f"{repository} cannot be downloaded: {error}") from error
