"""sentence-transformers' files of a model: they define how hidden states become a vector or a score.

Read by the launcher. `modules.json` lists the steps in order, each with a directory that has its config.json:

    [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
     {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
     {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]

Only the last word of a type counts, because the others differ between versions. An unknown step is an error: without it the
vectors would be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.checkpoint.files import leads_outside, read_file
from engine.checkpoint.json_fields import JsonOptions, read_json
from engine.dense_module import DenseModule
from engine.errors import CheckpointError

MODULES = "modules.json"
LENGTHS = "sentence_bert_config.json"
POOLED_KINDS = {"lasttoken": "last", "mean": "mean", "cls": "cls"}  # by their names in the files
_ACTIVATIONS: dict[str, Literal["none", "tanh"]] = {"Identity": "none", "Tanh": "tanh"}  # of PyTorch
_MODES = {  # flags of older files
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


class SentenceModules(msgspec.Struct, frozen=True):
    """Pooling modules of a checkpoint. `kind`: pooled tokens, one of POOLED_KINDS; empty: no pooling module. `class_token_ids`:
    the tokens for no and yes, or only yes."""

    kind: str = ""
    is_normalized: bool = False
    class_token_ids: tuple[int, ...] = ()
    dense: tuple[DenseModule, ...] = ()  # between pooling and normalization
    max_tokens: int = 0  # per prompt; 0: the limit of the model

    @staticmethod
    def read(path: Path) -> SentenceModules | None:
        """Read the files of the checkpoint directory `path`; None if there are none. Raises CheckpointError."""
        if not (path / MODULES).is_file():
            return None
        found: dict[str, Any] = {}
        for kind, options in _steps(path):
            if kind == "Pooling":
                found["kind"] = _pooled_kind(options)
            elif kind == "Dense" and "kind" in found and "is_normalized" not in found:
                found["dense"] = (*found.get("dense", ()), _dense(options))
            elif kind == "Normalize":
                found["is_normalized"] = True
            elif kind == "LogitScore":
                ids = [options.token_ids("false_token_id"), options.token_ids("true_token_id")]
                found["class_token_ids"] = tuple(token_id for each in ids for token_id in each)
            elif kind != "Transformer":
                raise CheckpointError(
                    f"{path / MODULES}: module type {kind!r} is not supported here; expected Transformer, Pooling, then Dense, "
                    "Normalize or LogitScore"
                )
        if (path / LENGTHS).is_file():
            lengths = JsonOptions(read_json(path / LENGTHS), path / LENGTHS)
            found["max_tokens"] = lengths.count("max_seq_length", 0)
            if lengths.flag("do_lower_case", False):
                raise lengths.error("do_lower_case", "true is not supported; send texts in lower case and set it to false")
        return SentenceModules(**found)


def _steps(path: Path) -> Iterator[tuple[str, JsonOptions]]:
    """Yield the kind of each step and its options."""
    file = path / MODULES
    try:
        modules = json.loads(read_file(file))
        steps = [(str(module["type"]).rpartition(".")[2], str(module.get("path", ""))) for module in modules]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}") from error
    for kind, directory in steps:
        if leads_outside(directory):
            raise CheckpointError(f"{file}: the path {directory!r} points outside the checkpoint")
        options = path / directory / "config.json"
        is_own = bool(directory) and options.is_file()  # the model's own config.json does not belong to a step
        yield kind, JsonOptions(read_json(options) if is_own else {}, options)


def _dense(options: JsonOptions) -> DenseModule:
    name = options.text("activation_function", "Tanh").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise options.error("activation_function", f"{name!r} is not supported; expected one of {', '.join(_ACTIVATIONS)}")
    file = options.path.with_name("model.safetensors")
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; convert the weights of this module to safetensors")
    return DenseModule(
        str(file),
        options.count("in_features"),
        options.count("out_features"),
        options.flag("bias", True),
        _ACTIVATIONS[name],
    )


def _pooled_kind(options: JsonOptions) -> str:
    modes = [mode for flag, mode in _MODES.items() if options.flag(flag, False)]
    modes = modes or ([options.text("pooling_mode", None)] if "pooling_mode" in options.values else ["mean"])
    if len(modes) != 1 or modes[0] not in POOLED_KINDS:
        raise options.error(
            "pooling_mode", f"{' and '.join(modes)} is not supported; expected one of {', '.join(POOLED_KINDS)}"
        )
    return POOLED_KINDS[modes[0]]
