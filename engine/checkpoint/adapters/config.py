"""An adapter's `adapter_config.json`, as PEFT writes it, as one checked value.

Read by the rank that loads an adapter. What would have the base model's weights changed, or parts of it replaced, is an error
and never ignored: a wrong answer would follow. Patterns are regular expressions of whoever made the file: those that could take
long are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.checkpoint.json_fields import JsonOptions, read_json
from engine.config import MAX_LORA_RANK
from engine.errors import CheckpointError

Number = TypeVar("Number", int, float)

CONFIG_NAME = "adapter_config.json"
ALL_LINEAR = "all-linear"
MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERNS, _MAX_PATTERN_LETTERS, _MAX_REPEATS, _MAX_GROUPS = 256, 1024, 2, 2
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_NEEDED_OF_BASE = ("pissa", "olora", "corda", "loftq")  # beginnings of init_lora_weights that change the base's weights too
_REFUSED = {  # option -> why
    "use_dora": "DoRA also scales the columns of the base's weights; only plain LoRA is served",
    "use_qalora": "QALoRA pools inputs; only plain LoRA is served",
    "lora_bias": "biases of B are not served; train it without",
    "modules_to_save": "it replaces whole modules of the base; merge it, or train it without",
    "trainable_token_indices": "it replaces rows of the embedding; merge it, or train it without",
    "layer_replication": "it repeats layers of the base; merge it",
    "target_parameters": "it adapts parameters that are no linears, such as experts; only linears have adapters here",
    "alora_invocation_tokens": "it begins in the middle of a prompt; only plain LoRA is served",
    "megatron_config": "it is of Megatron's layers; only plain LoRA is served",
}


class AdapterConfig(msgspec.Struct, frozen=True):
    """What decides about an adapter's numbers; modules are given by their names in the checkpoint."""

    path: Path
    rank: int
    alpha: float
    is_rank_stabilized: bool  # rsLoRA (Kalajdzievski 2023)
    targets: tuple[str, ...] | str  # endings of names, or a pattern of whole ones
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...]  # those that are transformed; none: all
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @staticmethod
    def read(directory: Path) -> AdapterConfig:
        """Raises CheckpointError."""
        path = directory / CONFIG_NAME
        try:
            size = path.stat().st_size
        except OSError:
            raise CheckpointError(f"{path} is missing; an adapter is a directory that PEFT's save_pretrained wrote") from None
        if size > MAX_CONFIG_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, {MAX_CONFIG_BYTES} are read at most; is it one?")
        options = JsonOptions(read_json(path), path)
        _refuse_others(options)
        config = AdapterConfig(
            path=path,
            rank=options.count("r", most=MAX_LORA_RANK),
            alpha=options.number("lora_alpha", None),
            is_rank_stabilized=options.flag("use_rslora", False),
            targets=_names(options, "target_modules"),
            excluded=_names(options, "exclude_modules"),
            layers=options.counts("layers_to_transform", (), or_one=1),
            rank_pattern={name: _rank(options, name, value) for name, value in _patterns(options, "rank_pattern")},
            alpha_pattern={name: _alpha(options, name, value) for name, value in _patterns(options, "alpha_pattern")},
        )
        for pattern in (*config.rank_pattern, *config.alpha_pattern):
            _check(path, pattern)
        return config

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What the product is multiplied by."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank

    def may_have(self, module: str) -> bool:
        """Whether the linear `module` can be one that it adapts."""
        return self._is_target(module) is not False

    def must_have(self, module: str) -> bool:
        """Whether the linear `module`, which the model has, is one that it adapts."""
        return self._is_target(module) is True

    def _is_target(self, module: str) -> bool | None:
        """None: its pattern is not tried."""
        layer = _LAYER.search(module)
        if self.layers and (layer is None or int(layer[1]) not in self.layers):
            return False
        is_excluded = _is_named(self.excluded, module) if self.excluded else False
        is_named = _is_named(self.targets, module)
        return None if is_excluded is None or is_named is None else is_named and not is_excluded


def _by_pattern(values: Mapping[str, Number], module: str, default: Number) -> Number:
    """Of the first pattern that the end of the name is, from a dot on."""
    for pattern, value in values.items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
            return value
    return default


def _refuse_others(options: JsonOptions) -> None:
    kind = options.text("peft_type", "LORA").upper()
    if kind != "LORA":
        raise options.error("peft_type", f"{kind!r} is not served; LORA alone is")
    for name, why in _REFUSED.items():
        if options.values.get(name):
            raise options.error(name, why)
    if options.text("bias", "none") != "none":
        raise options.error("bias", f"{options.text('bias', '')!r} trains biases of the base; only 'none' is served")
    start = options.values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_NEEDED_OF_BASE):
        raise options.error("init_lora_weights", f"{start!r} changes the base's weights as well; convert it to plain LoRA")


def _names(options: JsonOptions, name: str) -> tuple[str, ...] | str:
    value = options.values.get(name)
    return value if isinstance(value, str) else options.texts(name)


def _is_named(names: tuple[str, ...] | str, module: str) -> bool | None:
    """None: that is a pattern which might take long."""
    if names == ALL_LINEAR:
        return True
    if isinstance(names, str):
        return None if _is_involved(names) else re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _patterns(options: JsonOptions, name: str) -> Sequence[tuple[str, Any]]:
    found = options.mapping(name)
    if len(found) > _MAX_PATTERNS:
        raise options.error(name, f"{len(found)} patterns, {_MAX_PATTERNS} are read at most")
    return list(found.items())


def _rank(options: JsonOptions, name: str, value: Any) -> int:
    return JsonOptions({name: value}, options.path, "rank_pattern.").count(name, most=MAX_LORA_RANK)


def _alpha(options: JsonOptions, name: str, value: Any) -> float:
    return JsonOptions({name: value}, options.path, "alpha_pattern.").number(name, None)


def _check(path: Path, pattern: str) -> None:
    """CheckpointError for what is no pattern, or one that might take long on the name of a module."""
    if _is_involved(pattern):
        raise CheckpointError(
            f"{path}: the pattern {pattern[:80]!r} is no regular expression, or too involved: {_MAX_REPEATS} repetitions and "
            f"{_MAX_GROUPS} groups, none repeated, are tried at most; name the modules"
        )


def _is_involved(pattern: str) -> bool:
    repeats = sum(map(pattern.replace("(?", "(").count, "*+?{"))
    if len(pattern) > _MAX_PATTERN_LETTERS or repeats > _MAX_REPEATS or pattern.count("(") > _MAX_GROUPS:
        return True
    if re.search(r"\)\s*[*+?{]", pattern):
        return True
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return True
    return False
