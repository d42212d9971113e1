"""Whether the engine generates or pools, and how: from `--runner`, `--pooler-config` and the checkpoint. Part of
`resolve.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.record import ModelRecord
from engine.checkpoint.sentence_modules import SentenceModules
from engine.config import PoolingConfig
from engine.errors import OptionError
from engine.options.table import OptionValues


def resolve_pooling(values: dict[str, Any], record: ModelRecord) -> tuple[PoolingConfig | None, ModelRecord]:
    """Return the pooling settings (None: the engine generates) and the record; its model is cut to what is computed, such as
    hidden states only. Raises OptionError if the model does not support the options."""
    model, path = record.config, Path(record.path)
    modules = SentenceModules.read(path)
    runner, asked = values["runner"], values["pooler_config"]
    if runner == "auto":
        runner = "pooling" if modules or asked or model.task != "generate" else "generate"
    if runner == "generate":
        if model.task != "generate":
            raise OptionError(
                f"--runner generate: the {model.architecture} model in {path} cannot generate text, it is a model for "
                f"{model.task}; remove it"
            )
        if asked:
            raise OptionError("--pooler-config has no effect with --runner generate; remove one of them")
        return None, record
    _check_others(values, model)
    modules = modules or SentenceModules()
    class_token_ids = modules.class_token_ids
    if "class_tokens" in asked:
        class_token_ids = _token_ids(record, asked["class_tokens"])
    if class_token_ids and model.task != "generate":
        raise OptionError(
            "--pooler-config: classifier_from_token needs a model that generates text, but this model is for "
            f"{model.task}; remove it"
        )
    outside = [token_id for token_id in class_token_ids if not 0 <= token_id < model.vocab_size]
    if outside:
        raise OptionError(f"{path}: its score uses token {outside[0]}, which is outside the vocabulary of {model.vocab_size}")
    if model.task == "generate" and not class_token_ids:
        model = msgspec.structs.replace(model, task="embed")
    pooling = _config(model, modules, asked, class_token_ids)
    values["enable_prefix_caching"] &= not pooling.needs_all_tokens  # cached blocks have no hidden states
    return pooling, msgspec.structs.replace(record, config=model)


def resolve_whole_prompts(options: OptionValues, limit: int, model: ModelConfig) -> int:
    """Return the longest prompt of a model that computes each prompt in one step: it must fit one. Nothing of a step is kept:
    there are as many blocks as two steps need, and no prefix cache."""
    values = options.values
    if "max_num_batched_tokens" not in options.given:
        values["max_num_batched_tokens"] = max(values["max_num_batched_tokens"], limit)
    elif values["max_num_batched_tokens"] < limit:
        limit = values["max_num_batched_tokens"]
        options.notes.append(
            f"a pooling prompt must fit into one step, so prompts over --max-num-batched-tokens {limit} are rejected"
        )
    if values["tensor_parallel_size"] > 1 and model.position_tables is not None:
        raise OptionError(f"--tensor-parallel-size {values['tensor_parallel_size']}: encoder models support only 1; remove it")
    if values["num_kv_blocks"] is None and values["kv_cache_memory"] is None:
        of_step = math.ceil(values["max_num_batched_tokens"] / values["block_size"]) + values["max_num_seqs"]
        values["num_kv_blocks"] = 2 * of_step
    return limit


def _config(
    model: ModelConfig, modules: SentenceModules, asked: dict[str, Any], class_token_ids: tuple[int, ...]
) -> PoolingConfig:
    if model.task == "embed":
        return PoolingConfig(
            task="embed",
            kind=asked.get("kind", modules.kind or model.pooled_kind),
            num_values=_num_values(model, modules),
            dense=modules.dense,
            is_normalized=asked.get("is_normalized", modules.is_normalized if modules.kind else True),
            is_whole=model.is_bidirectional,
            dimensions=model.matryoshka_dimensions,
            max_tokens=modules.max_tokens,
        )
    if "kind" in asked:
        raise OptionError(
            f"--pooler-config: pooling_type {asked['kind'].upper()} does not apply to a model that scores; remove it"
        )
    num_values = 1 if class_token_ids else model.num_labels
    activation = model.score_activation or ("sigmoid" if num_values == 1 else "softmax")
    return PoolingConfig(
        task="classify",
        kind=model.pooled_kind,
        num_values=num_values,
        is_whole=model.is_bidirectional,
        activation=activation if asked.get("is_normalized", True) else "none",
        class_token_ids=class_token_ids,
        max_tokens=modules.max_tokens,
    )


def _num_values(model: ModelConfig, modules: SentenceModules) -> int:
    """Return the size of vectors. Raises OptionError if a module takes others than those before it."""
    width = model.hidden_size
    for module in modules.dense:
        if module.num_inputs != width:
            raise OptionError(f"{module.path}: in_features {module.num_inputs} differs from the {width} values before it")
        width = module.num_outputs
    return width


def _check_others(values: dict[str, Any], model: ModelConfig) -> None:
    """Raise OptionError for options that only make sense for generation."""
    if values["speculative_config"].method:
        raise OptionError("--speculative-config has no effect on a pooling model, which generates no text; remove it")
    if model.vision is not None:
        raise OptionError(
            f"--runner pooling: {model.architecture} is a vision-language model, for which pooling is not supported"
        )


def _token_ids(record: ModelRecord, words: Sequence[str]) -> tuple[int, ...]:
    """Return the ids of tokens by their names in tokenizer.json. Raises OptionError for an unknown name."""
    try:
        file = json.loads(record.files.get("tokenizer.json", b"{}"))
        known = {str(token["content"]): int(token["id"]) for token in file.get("added_tokens", [])}
        known |= dict(file.get("model", {}).get("vocab", {}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OptionError(f"{record.path}/tokenizer.json cannot be read: {error!r}") from error
    for word in words:
        if word not in known:
            raise OptionError(f"--pooler-config: classifier_from_token: {word!r} is no token in {record.path}/tokenizer.json")
    return tuple(known[word] for word in words)
