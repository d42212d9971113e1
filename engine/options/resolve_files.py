"""Files of a model that options replace: another tokenizer, other sampling defaults. Used by `engine/options/resolve.py`.

They become part of the run's own record of the checkpoint, so every life of every actor reads the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoint.files import read_file
from engine.checkpoint.locate import resolve_tokenizer
from engine.checkpoint.model_config import GENERATION_CONFIG
from engine.checkpoint.record import TEMPLATES, TOKENIZER_FILES, VOCABULARIES, ModelRecord, small_files
from engine.checkpoint.sampling_defaults import SamplingDefaults
from engine.errors import CheckpointError, OptionError
from engine.options.table import OptionValues


def with_revision(name: str, revision: str) -> str:
    """Return a hub name with the requested revision, as `owner/model@revision` or `owner/model@revision:Q4_K_M`."""
    if not revision:
        return name
    if "@" in name:
        raise OptionError(f"--revision {revision}: {name} already has a revision; give it once")
    repository, colon, tag = name.partition(":")
    return f"{repository}@{revision}{colon}{tag}"


def with_files(options: OptionValues, record: ModelRecord) -> ModelRecord:
    """Return the record with the files that the options name. Raises OptionError."""
    files = dict(record.files)
    values = options.values
    if values["tokenizer"]:
        files = {name: data for name, data in files.items() if not _is_tokenizers(name)} | _tokenizer(options)
    elif values["tokenizer_revision"]:
        raise OptionError("--tokenizer-revision needs --tokenizer owner/model; add it, or remove --tokenizer-revision")
    defaults = _generation(values["generation_config"], files.pop(GENERATION_CONFIG, b"{}"))
    if values["override_generation_config"]:
        defaults = json.dumps(_parsed(defaults) | values["override_generation_config"]).encode()
    files[GENERATION_CONFIG] = defaults
    if values["override_generation_config"] or values["generation_config"] != "auto":
        try:
            SamplingDefaults.decode(defaults)
        except CheckpointError as error:
            raise OptionError(f"--generation-config, --override-generation-config: {error}") from error
    return msgspec.structs.replace(record, files=files)


def _is_tokenizers(name: str) -> bool:
    return name in TOKENIZER_FILES or name.startswith(f"{TEMPLATES}/")


def _tokenizer(options: OptionValues) -> dict[str, bytes]:
    given = options.values["tokenizer"]
    try:
        path = resolve_tokenizer(with_revision(given, options.values["tokenizer_revision"]), options.values["hub"])
        files = {name: data for name, data in small_files(path) if _is_tokenizers(name)}
    except CheckpointError as error:
        raise OptionError(f"--tokenizer {given}: {error}") from error
    if not files.keys() & set(VOCABULARIES):
        raise OptionError(f"--tokenizer {given} has none of {', '.join(VOCABULARIES)}; use a directory that has one of them")
    return files


def _generation(asked: str, own: bytes) -> bytes:
    if asked == "auto":
        return own
    if asked in ("vllm", "none"):
        return b"{}"
    try:
        return read_file(Path(asked).expanduser() / GENERATION_CONFIG)
    except (OSError, RuntimeError) as error:
        raise OptionError(
            f"--generation-config {asked} has no readable {GENERATION_CONFIG} ({error}); expected auto, vllm or a directory"
        ) from error


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise OptionError(f"--override-generation-config: {GENERATION_CONFIG} cannot be read: {error}") from error
