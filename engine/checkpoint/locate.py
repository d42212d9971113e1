"""Finds a model's files: on this machine (`local.py`), or on a hub (`hubs/`), from which a snapshot is downloaded first.

Called once by the launcher, before any actor starts; actors see only the absolute path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from engine.checkpoint.gguf.parts import part_paths, stem_of
from engine.checkpoint.hubs.choice import hub_of
from engine.checkpoint.hubs.hub import Hub, HubName
from engine.checkpoint.local import local_checkpoint
from engine.errors import CheckpointError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
_GGUF_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?:(?P<tag>[\w.-]+)")
_FILES = ["*.json", "*.jinja", "*.model", "*.safetensors"]
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model"]
_QUANTIZATION = re.compile(r"(?<![A-Za-z0-9])(I?Q\d\w*|TQ\d\w*|BF16|F16|F32|FP16|MXFP4\w*)$", re.IGNORECASE)


def resolve_model(name: str, hub: Hub | HubName = "huggingface") -> Path:
    """Return the absolute directory of `name`: a local path (of a directory or a GGUF file), or on the hub `owner/model`,
    `owner/model@revision`, or `owner/model:Q4_K_M` for the GGUF file with that quantization. `hub`: a hub or its name.

    Raises CheckpointError with a remedy: no such path or repository, no access, no connection.
    """
    found = local_checkpoint(name)
    file = _GGUF_NAME.fullmatch(name) if found is None else None
    if file is not None:
        found = local_checkpoint(str(_download_gguf(file["repository"], file["revision"] or "", file["tag"], hub)))
    elif found is None and (not _HUB_NAME.fullmatch(name) or name.startswith((".", "~"))):
        raise CheckpointError(f"{name}: not a directory, and not a hub name of the form owner/model or owner/model:Q4_K_M")
    found = found or local_checkpoint(str(_download(name, hub)))
    assert found is not None, f"{name} is missing after its download"
    return found


def resolve_tokenizer(name: str, hub: Hub | HubName = "huggingface") -> Path:
    """Return the directory of a tokenizer's files, found in the same way. Raises CheckpointError."""
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: unknown user in ~user
        raise CheckpointError(f"{name}: {error}") from error
    if not _HUB_NAME.fullmatch(name) or name.startswith((".", "~")):
        raise CheckpointError(f"{name}: not a directory, and not a hub name of the form owner/model")
    return _download(name, hub, _TOKENIZER_FILES)


def _download(name: str, hub: Hub | HubName, patterns: Sequence[str] = _FILES) -> Path:
    repository, _, revision = name.partition("@")
    return hub_of(hub).snapshot(repository, revision, patterns)


def _download_gguf(repository: str, revision: str, tag: str, hub: Hub | HubName) -> Path:
    """Download the GGUF file of a repository that `tag` selects, or all its parts, and return the first one's path. Without a
    connection, look among those downloaded before."""
    found = hub_of(hub)
    return found.files(repository, revision, _chosen(repository, tag, found.file_names(repository, revision)))


def _chosen(repository: str, tag: str, names: Sequence[str]) -> list[str]:
    """Return the name of the file that `tag` selects, or of all its parts in order."""
    files = {name: stem_of(name) for name in names if name.endswith(".gguf") and "mmproj" not in name.lower()}
    wanted = re.compile(rf"(.*[-._/])?{re.escape(stem_of(tag))}", re.IGNORECASE)
    found = {name: stem for name, stem in files.items() if wanted.fullmatch(stem)}
    stems = sorted(set(found.values()))
    if not stems:
        known = sorted({match[0] for stem in files.values() if (match := _QUANTIZATION.search(stem))})
        there = f"there are {', '.join(known)}" if known else "it has no GGUF files"
        raise CheckpointError(f"{repository} has no {tag}; {there}")
    if len(stems) > 1:
        raise CheckpointError(f"{repository} has several files for {tag}: {', '.join(stems)}; choose one by its name")
    parts = [str(path) for path in part_paths(Path(min(found)))]
    missing = [name for name in parts if name not in found]
    if missing or len(parts) != len(found):
        lacking = f"{', '.join(missing)} is missing" if missing else f"there are {len(found)} files for {len(parts)} parts"
        raise CheckpointError(
            f"{repository}:{tag} is incomplete: {lacking}; choose another quantization, or tell its publisher"
        )
    return parts
