"""Mixtures of experts in a family's config.json. Part of `ModelConfig`; read by the models and the loader."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from engine.checkpoint.json_fields import JsonOptions

# options that change the choice or place of experts, and their supported values
_SUPPORTED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
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
    scales: str = ""  # the tensor with a factor of each expert's weight, within a layer; empty: none
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalized: bool = False
    added_to_sum: float = 0.0
    smallest_sum: float = 0.0
    factor: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_best: int = 2
    has_shared_gate: bool = False  # the result of the shared MLP is multiplied by the sigmoid of a score
    has_weighted_inputs: bool = False  # weights multiply the input of experts, not their result
    latent_size: int = 0  # width of rows that the experts of a layer read and write, between two projections; 0: the model's
    has_biases: bool = False  # of the router, and of the experts' linears
    gate_alpha: float = 0.0  # as in `ops.modules.GateClamp`
    gate_limit: float = 0.0  # 0: gates are not clamped


class RoutingDefaults(msgspec.Struct, frozen=True):
    """Defaults of the options of routing, in DeepSeek-V3's or Qwen's way."""

    num_experts: int = 256
    num_chosen: int = 8
    intermediate_size: int = 2048
    num_groups: int = 8
    num_chosen_groups: int = 4
    factor: float = 2.5
    first_sparse_layer: int = 3


def grouped_experts(options: JsonOptions, num_layers: int, defaults: RoutingDefaults) -> ExpertsConfig | None:
    """Read DeepSeek-V3's routing: sigmoid scores with a correction, and experts in groups. `mlp_layer_types`, or
    `first_k_dense_replace`, says which layers are sparse."""
    options.check_supported(_SUPPORTED)
    count = num_experts(options, "n_routed_experts", "num_local_experts", default=defaults.num_experts)
    first = options.count("first_k_dense_replace", defaults.first_sparse_layer, least=0)
    sparse = tuple(range(first, num_layers))
    if options.values.get("mlp_layer_types") is not None:
        kinds = options.texts("mlp_layer_types")
        if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
            raise options.error("mlp_layer_types", f"{list(kinds)} should be {num_layers} entries, each 'dense' or 'sparse'")
        sparse = tuple(index for index, kind in enumerate(kinds) if kind == "sparse")
    if not count:
        return None
    groups = options.count("n_group", defaults.num_groups)
    if count % groups:
        raise options.error("n_group", f"{groups} does not divide {count} experts")
    chosen_groups = options.count("topk_group", defaults.num_chosen_groups, most=groups)
    intermediate_size = options.count("moe_intermediate_size", defaults.intermediate_size)
    return ExpertsConfig(
        sparse,
        count,
        num_chosen(options, "num_experts_per_tok", defaults.num_chosen, count // groups * chosen_groups),
        intermediate_size,
        options.count("n_shared_experts", 1, least=0) * intermediate_size,
        correction="mlp.gate.e_score_correction_bias",
        correction_shape=(count,),
        scoring="sigmoid",
        is_normalized=options.flag("norm_topk_prob", True),
        added_to_sum=1e-20,
        factor=options.number("routed_scaling_factor", defaults.factor),
        num_groups=groups,
        num_chosen_groups=chosen_groups,
    )


def num_experts(options: JsonOptions, *names: str, default: int) -> int:
    """Read the number of experts, stored under any of the names; several values must agree."""
    given = {name: options.count(name, least=0, most=_MAX_EXPERTS) for name in names if options.values.get(name) is not None}
    if len(set(given.values())) > 1:
        raise options.error(next(iter(given)), f"conflicting values for one setting: {given}")
    return next(iter(given.values()), default)


def num_chosen(options: JsonOptions, name: str, default: int | None, most: int) -> int:
    """Read the number of experts per token."""
    count = options.count(name, default)
    if count > most:
        raise options.error(name, f"{count} experts per token, but only {most} exist")
    return count


def interleaved_experts(options: JsonOptions, num_layers: int, defaults: RoutingDefaults) -> ExpertsConfig | None:
    """Read Qwen's mixtures: softmax scores, and experts in every `decoder_sparse_step`-th layer; None: no experts."""
    count = num_experts(options, "num_experts", "num_local_experts", default=defaults.num_experts)
    sparse = interleaved_layers(options, num_layers)
    if not count:
        return None
    return ExpertsConfig(
        sparse,
        count,
        num_chosen(options, "num_experts_per_tok", defaults.num_chosen, count),
        options.count("moe_intermediate_size", defaults.intermediate_size),
        is_normalized=options.flag("norm_topk_prob", False),
    )


def interleaved_layers(options: JsonOptions, num_layers: int) -> tuple[int, ...]:
    """Return every `decoder_sparse_step`-th layer, without `mlp_only_layers`."""
    step = options.count("decoder_sparse_step", 1)
    dense = layer_indexes(options, "mlp_only_layers", num_layers)
    return tuple(index for index in range(num_layers) if index not in dense and (index + 1) % step == 0)


def layer_indexes(options: JsonOptions, name: str, num_layers: int) -> Collection[int]:
    value = options.values.get(name) or []
    if not isinstance(value, list) or not all(type(index) is int and 0 <= index < num_layers for index in value):
        raise options.error(name, f"{value!r} should be a list of layers, 0 to {num_layers - 1}")
    return value
