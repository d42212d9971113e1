"""`adapter_config.json` of an adapter, as written by PEFT, as one checked value.

Read by the rank that loads the adapter. Options that would change weights of the base model, or replace parts of it, are
errors: ignoring them would give wrong answers. Patterns are regular expressions from untrusted files, so those that could be
slow to match are rejected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from engine.checkpoint.json_fields import JsonOptions, read_json
from engine.config import MAX_LORA_RANK
from engine.errors import CheckpointError

Number = TypeVar("Number", int, float)

_SWAPPED = (0, 19)
CONFIG_NAME = "adapter_config.json"
ALL_LINEAR = "all-linear"
MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERNS, _MAX_PATTERN_LETTERS, _MAX_REPEATS, _MAX_GROUPS = 1024, 1024, 2, 2
_MAX_INVOLVED, _MAX_LETTERS = 32, 1 << 16  # patterns of an option that are not plain names, and characters of all
_NAME = re.compile(r"[\w.\\^$-]{0,256}")  # a name, perhaps with escaped dots
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
# prefixes of init_lora_weights that also change the base model's weights
_NEEDED_OF_BASE = ("pissa", "olora", "corda", "loftq")
_REFUSED = {  # option -> why
    "use_dora": "DoRA is not supported; use plain LoRA",
    "use_qalora": "QALoRA is not supported; use plain LoRA",
    "lora_bias": "biases of LoRA B are not supported; train the adapter without them",
    "modules_to_save": "replacing modules of the base model is not supported; merge the adapter, or train it without",
    "trainable_token_indices": "replacing embedding rows is not supported; merge the adapter, or train it without",
    "layer_replication": "repeating layers of the base model is not supported; merge the adapter",
    "alora_invocation_tokens": "adapters that start in the middle of a prompt (aLoRA) are not supported; use plain LoRA",
    "megatron_config": "Megatron layers are not supported; use plain LoRA",
}


class ByPattern(Generic[Number]):
    """A number per module, by patterns. Patterns are compiled once and most are plain names, since the rank is also serving
    streams."""

    def __init__(self, values: Mapping[str, Number]) -> None:
        self._values: list[tuple[re.Pattern[str], Number]] = [
            (re.compile(rf"(?:.*\.)?(?:{pattern})"), value) for pattern, value in values.items()
        ]

    def of(self, module: str, default: Number) -> Number:
        """Return the value of the first pattern that matches the end of the name, from a dot on."""
        return next((value for pattern, value in self._values if pattern.fullmatch(module)), default)


class AdapterConfig(msgspec.Struct, frozen=True):
    """Settings that affect an adapter's results; modules have their names in the checkpoint."""

    path: Path
    rank: int
    alpha: float
    is_rank_stabilized: bool  # rsLoRA (Kalajdzievski 2023)
    targets: frozenset[str] | str  # suffixes of names, or a pattern for whole names
    parameters: frozenset[str]  # suffixes of names of parameters
    excluded: frozenset[str] | str
    layers: frozenset[int]  # indexes of adapted layers; empty: all
    rank_pattern: ByPattern[int]
    alpha_pattern: ByPattern[float]
    has_swapped_stacks: bool  # A of stacked matrices [experts, x, y] is [..., y] (PEFT 0.19), not [..., x]

    @staticmethod
    def read(directory: Path) -> AdapterConfig:
        """Raises CheckpointError."""
        path = directory / CONFIG_NAME
        try:
            size = path.stat().st_size
        except OSError:
            raise CheckpointError(
                f"{path} is missing; expected an adapter directory written by PEFT's save_pretrained"
            ) from None
        if size > MAX_CONFIG_BYTES:
            raise CheckpointError(
                f"{path} has {size} bytes, the limit is {MAX_CONFIG_BYTES}; check that it is an adapter config"
            )
        options = JsonOptions(read_json(path), path)
        _refuse_others(options)
        return AdapterConfig(
            path=path,
            rank=options.count("r", most=MAX_LORA_RANK),
            alpha=options.number("lora_alpha", None),
            is_rank_stabilized=options.flag("use_rslora", False),
            targets=_names(options, "target_modules"),
            parameters=frozenset(options.texts("target_parameters")),
            excluded=_names(options, "exclude_modules"),
            layers=frozenset(options.counts("layers_to_transform", (), or_one=1)),
            rank_pattern=_patterns(options, "rank_pattern", _rank),
            alpha_pattern=_patterns(options, "alpha_pattern", _alpha),
            has_swapped_stacks=_version(options) >= _SWAPPED,
        )

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.of(module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of the low-rank product."""
        rank, alpha = self.rank_of(module), self.alpha_pattern.of(module, self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank

    def may_have(self, module: str) -> bool:
        """Return whether the linear `module` can be adapted by it."""
        return self._is_target(module) is not False or self.has_parameter(f"{module}.weight")

    def must_have(self, module: str) -> bool:
        """Return whether the linear `module`, which the model has, must be adapted by it."""
        return self._is_target(module) is True

    def has_parameter(self, name: str) -> bool:
        """Return whether the parameter `name`, such as all experts of a layer, is adapted by it."""
        parts = name.split(".")
        return any(".".join(parts[first:]) in self.parameters for first in range(len(parts)))

    def _is_target(self, module: str) -> bool | None:
        """Return whether `module` is a target; None: its pattern is not evaluated."""
        layer = _LAYER.search(module)
        if self.layers and (layer is None or int(layer[1]) not in self.layers):
            return False
        is_excluded = _is_named(self.excluded, module) if self.excluded else False
        is_named = _is_named(self.targets, module)
        return None if is_excluded is None or is_named is None else is_named and not is_excluded


def _refuse_others(options: JsonOptions) -> None:
    kind = options.text("peft_type", "LORA").upper()
    if kind != "LORA":
        raise options.error("peft_type", f"{kind!r} is not supported; expected 'LORA'")
    for name, why in _REFUSED.items():
        if options.values.get(name):
            raise options.error(name, why)
    if options.text("bias", "none") != "none":
        raise options.error(
            "bias", f"{options.text('bias', '')!r} trains biases of the base model, which is not supported; expected 'none'"
        )
    start = options.values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_NEEDED_OF_BASE):
        raise options.error(
            "init_lora_weights", f"{start!r} also changes weights of the base model; convert the adapter to plain LoRA"
        )


def _version(options: JsonOptions) -> tuple[int, ...]:
    """Return the version of PEFT that wrote the files; empty: before 0.18."""
    return tuple(map(int, re.findall(r"\d{1,9}", options.text("peft_version", ""))[:2]))


def _names(options: JsonOptions, name: str) -> frozenset[str] | str:
    value = options.values.get(name)
    return value if isinstance(value, str) else frozenset(options.texts(name))


def _is_named(names: frozenset[str] | str, module: str) -> bool | None:
    """Return whether `names` include `module`; None: it is a pattern that might be slow."""
    if names == ALL_LINEAR:
        return True
    if isinstance(names, str):
        return None if _is_involved(names) else re.fullmatch(names, module) is not None
    parts = module.split(".")
    return any(".".join(parts[first:]) in names for first in range(len(parts)))


def _patterns(options: JsonOptions, name: str, read: Callable[[JsonOptions, str, Any], Number]) -> ByPattern[Number]:
    found = options.mapping(name)
    if len(found) > _MAX_PATTERNS:
        raise options.error(name, f"{len(found)} patterns, the limit is {_MAX_PATTERNS}; name the modules instead")
    if sum(map(len, found)) > _MAX_LETTERS:
        raise options.error(name, f"the patterns have more than {_MAX_LETTERS} characters, the limit; name the modules instead")
    num_involved = sum(not _NAME.fullmatch(pattern) for pattern in found)
    if num_involved > _MAX_INVOLVED:
        raise options.error(name, f"{num_involved} regular expressions, the limit is {_MAX_INVOLVED}; name the modules instead")
    for pattern in found:
        _check(options.path, pattern)
    return ByPattern({pattern: read(options, pattern, value) for pattern, value in found.items()})


def _rank(options: JsonOptions, name: str, value: Any) -> int:
    return JsonOptions({name: value}, options.path, "rank_pattern.").count(name, most=MAX_LORA_RANK)


def _alpha(options: JsonOptions, name: str, value: Any) -> float:
    return JsonOptions({name: value}, options.path, "alpha_pattern.").number(name, None)


def _check(path: Path, pattern: str) -> None:
    """Raise CheckpointError for an invalid pattern, or one that might be slow to match."""
    if _is_involved(pattern):
        raise CheckpointError(
            f"{path}: pattern {pattern[:80]!r} is invalid or too complex: the limit is {_MAX_REPEATS} repetitions and "
            f"{_MAX_GROUPS} groups, none of them repeated; name the modules instead"
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
