"""Mixtures of experts in a family's config.json. Part of `ModelConfig`; read by the models and the loader."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from engine.checkpoint.json_fields import JsonOptions

_MAX_EXPERTS = 65_536  # of a layer; each takes memory before a weight is looked at


class ExpertsConfig(msgspec.Struct, frozen=True):
    """The sparse layers, which have experts in place of an MLP. How experts are chosen and weighed is said by
    `ops.modules.RoutingRule`, whose fields these are."""

    sparse_layers: tuple[int, ...]
    num_experts: int
    num_chosen: int
    intermediate_size: int  # of an expert
    shared_intermediate_size: int = 0  # of the MLP that all rows go through as well; 0: there is none
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
    """Under any of the names; where it is under several, they must agree."""
    given = {name: options.count(name, least=0, most=_MAX_EXPERTS) for name in names if options.values.get(name) is not None}
    if len(set(given.values())) > 1:
        raise options.error(next(iter(given)), f"differs from what means the same: {given}")
    return next(iter(given.values()), default)


def num_chosen(options: JsonOptions, name: str, default: int, most: int) -> int:
    """Experts of a token."""
    count = options.count(name, default)
    if count > most:
        raise options.error(name, f"{count} experts of a token are to be chosen from {most}")
    return count


def layer_indexes(options: JsonOptions, name: str, num_layers: int) -> Collection[int]:
    value = options.values.get(name) or []
    if not isinstance(value, list) or not all(type(index) is int and 0 <= index < num_layers for index in value):
        raise options.error(name, f"{value!r} should be a list of layers, 0 to {num_layers - 1}")
    return value
