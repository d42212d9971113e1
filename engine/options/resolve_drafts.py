"""`--speculative-config`, checked against the checkpoint. Part of `resolve.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.tensor_names import tensor_names
from engine.config import SpeculativeConfig
from engine.errors import OptionError
from engine.options.table import OptionValues


def choose_drafts(options: OptionValues, model: ModelConfig, ops: str, *, is_pooling: bool) -> None:
    """Choose the embedded model's own draft layer if no option names a method and it pays according to measurements
    (tools/bench/peers.md): one rank, tapes of native ops, steps with room for it."""
    values, drafts = options.values, SpeculativeConfig(method="mtp")
    is_embedded = values["model"] is None and model.num_draft_layers > 0 and values["load_format"] != "dummy"
    is_measured = ops == "native" and values["plan"] != "captured" and values["tensor_parallel_size"] == 1
    if "speculative_config" in options.given or is_pooling or not (is_embedded and is_measured):
        return
    if values["max_num_batched_tokens"] > drafts.max_drafts:
        values["speculative_config"] = drafts


def check_drafts(values: dict[str, Any], model: ModelConfig, path: Path) -> None:
    """Raise OptionError if draft layers are requested but the checkpoint has none."""
    config: SpeculativeConfig = values["speculative_config"]
    if not config.has_mtp:
        return
    names = FAMILIES[model.architecture].draft_names
    if names is None:
        having = ", ".join(name for name, family in FAMILIES.items() if family.draft_names)
        lack = f"{model.architecture} models have no MTP layers; models that may have them: {having}"
    elif not model.num_draft_layers:
        lack = "its config.json has no num_nextn_predict_layers, or sets it to 0"
    else:
        asked = [names.of(index, model.num_layers).projection for index in range(model.num_draft_layers)]
        missing = [] if values["load_format"] == "dummy" else [name for name in asked if not _has(path, name)]
        if not missing:
            return
        lack = f"{missing[0]}.weight is missing, although config.json declares {model.num_draft_layers} MTP layers"
    raise OptionError(
        f"--speculative-config: method mtp does not work with {path}: {lack}; use method ngram, or a checkpoint with MTP layers"
    )


def _has(path: Path, name: str) -> bool:
    """Return whether the checkpoint has the tensor, whatever the prefix of its names and its quantization. True if the names
    cannot be read: then the loader reports the error."""
    stored = tensor_names(path)
    part = f"{name.removeprefix('model.')}."
    return not stored or any(part in each for each in stored)
