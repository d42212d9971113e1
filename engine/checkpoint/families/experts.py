"""Mixtures of experts in a family's config.json. Part of `ModelConfig`; read by the models and the loader."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from engine.checkpoint.json_fields import JsonOptions

_MAX_EXPERTS = 65_536  # per layer; bounds the memory taken before weights are read


class ExpertsConfig(msgspec.Struct, frozen=True):
    """Sparse layers, with experts in place of an MLP. `ops.modules.RoutingRule` has the same fields and explains how experts
    are chosen and weighted."""

    sparse_layers: tuple[int, ...]
    num_experts: int
    num_chosen: int
    intermediate_size: int  # per expert
    shared_intermediate_size: int = 0  # width of the MLP shared by all rows; 0: none
    correction: str = ""  # the tensor that corrects scores, within a layer; empty: none
    correction_shape: tuple[int, ...] = ()
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalized: bool = False
    added_to_sum: float = 0.0
    smallest_sum: float = 0.0
    factor: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1


def num_experts(options: JsonOptions, *names: str, default: int) -> int:
    """Read the number of experts, stored under any of the names; several values must agree."""
    given = {name: options.count(name, least=0, most=_MAX_EXPERTS) for name in names if options.values.get(name) is not None}
    if len(set(given.values())) > 1:
        raise options.error(next(iter(given)), f"conflicting values for one setting: {given}")
    return next(iter(given.values()), default)


def num_chosen(options: JsonOptions, name: str, default: int, most: int) -> int:
    """Read the number of experts per token."""
    count = options.count(name, default)
    if count > most:
        raise options.error(name, f"{count} experts per token, but only {most} exist")
    return count


def layer_indexes(options: JsonOptions, name: str, num_layers: int) -> Collection[int]:
    value = options.values.get(name) or []
    if not isinstance(value, list) or not all(type(index) is int and 0 <= index < num_layers for index in value):
        raise options.error(name, f"{value!r} should be a list of layers, 0 to {num_layers - 1}")
    return value
