"""Recurrent layers in a family's config.json: which layers they are, and their sizes. Part of `ModelConfig`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from engine.checkpoint.families.windows import all_but_every
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.recurrent_layer import RecurrentLayer

MAX_KERNEL = 16  # positions that a convolution reads; the native op takes as many
# of training and of other implementations: transformers computes the same with any value
UNUSED_MAMBA_OPTIONS = frozenset(f"time_step_{name}" for name in ("min", "max", "floor", "rank", "init_scheme", "scale"))
# names of kinds in older files
_OLDER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


class Mamba(msgspec.Struct, frozen=True):
    """Options of Mamba-2 (Dao and Gu 2024). Its input is projected to gates | x | B | C | time steps."""

    activation: str = "silu"  # of the convolution
    least_step: float = 0.0  # limits of time steps
    most_step: float = math.inf
    has_input_bias: bool = False  # of the projection before
    has_output_bias: bool = False  # of the projection after
    norm: Literal["after gate", "before gate", "none"] = "after gate"
    input_factor: float = 1.0
    factors: tuple[float, ...] = ()  # of gates, x, B, C and time steps; empty: 1
    output_factor: float = 1.0


class Recurrence(msgspec.Struct, frozen=True):
    """The recurrent layers of a model, all alike: a causal convolution of each column, and what follows it: nothing, the gated
    delta rule (Yang et al. 2024), or Mamba-2's state spaces, where keys are B and C of a group, and values are x of a head."""

    kind: Literal["convolution", "delta", "state spaces"]
    layers: tuple[int, ...]
    kernel: int  # positions that the convolution reads, its own included
    channels: int  # columns of the convolution: of the delta rule queries, keys and values
    has_bias: bool = False  # of the convolution; if nothing follows it, also of the linears around it
    num_key_heads: int = 0  # this and the next three: of what follows the convolution
    num_value_heads: int = 0  # a multiple of the key heads: neighbours share one
    key_dim: int = 0  # of a head
    value_dim: int = 0
    mamba: Mamba | None = None  # of state spaces
    is_per_channel: bool = False  # each key of the delta rule decays at its own rate

    @property
    def keys_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values_width(self) -> int:
        return self.num_value_heads * self.value_dim

    def layer_by_layer(self, num_layers: int) -> tuple[RecurrentLayer | None, ...]:
        """Return the sizes of each layer's state; None: it has attention."""
        return tuple(self.layer if index in self.layers else None for index in range(num_layers))

    def others(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers that are not recurrent."""
        return tuple(index for index in range(num_layers) if index not in self.layers)

    @property
    def layer(self) -> RecurrentLayer:
        """Return the sizes of one layer's state."""
        if self.kind == "convolution":
            return RecurrentLayer(self.channels, self.kernel, None, 0)
        matrix = self.num_value_heads, self.key_dim, self.value_dim
        num_decays = self.num_value_heads * (self.key_dim if self.is_per_channel else 1)
        log_width = self.keys_width + self.values_width + num_decays
        return RecurrentLayer(self.channels, self.kernel, matrix, log_width)


def gated_delta(options: JsonOptions, num_layers: int) -> Recurrence | None:
    """Read Qwen3-Next's recurrent layers: three of four, or those that `layer_types` names; None: there are none."""
    # the convolutions have the MLPs' activation
    options.check_supported({"hidden_act": "silu", "attn_output_gate": True, "output_gate_type": "swish"})
    key_heads = options.count("linear_num_key_heads", 16)
    value_heads = options.count("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise options.error("linear_num_key_heads", f"{key_heads} does not divide linear_num_value_heads {value_heads}")
    kernel = options.count("linear_conv_kernel_dim", 4, most=MAX_KERNEL)
    key_dim, value_dim = options.count("linear_key_head_dim", 128), options.count("linear_value_head_dim", 128)
    layers = recurrent_layers(
        options, all_but_every(options.count("full_attention_interval", 4), num_layers), "linear_attention"
    )
    return delta_rule(layers, kernel, (key_heads, key_dim), (value_heads, value_dim))


def delta_rule(
    layers: tuple[int, ...], kernel: int, keys: tuple[int, int], values: tuple[int, int], *, is_per_channel: bool = False
) -> Recurrence | None:
    """Return layers of the delta rule; None: there are none. `keys`, `values`: number and size of the heads."""
    if not layers:
        return None
    (key_heads, key_dim), (value_heads, value_dim) = keys, values
    return Recurrence(
        "delta",
        layers,
        kernel,
        2 * key_heads * key_dim + value_heads * value_dim,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        is_per_channel=is_per_channel,
    )


class MambaNames(msgspec.Struct, frozen=True):
    """Options of Mamba-2's sizes in config.json, and their defaults."""

    num_heads: tuple[str, int] = ("mamba_n_heads", 128)
    head_dim: tuple[str, int] = ("mamba_d_head", 0)  # 0: the width divided by the heads
    num_groups: tuple[str, int] = ("mamba_n_groups", 1)
    state_dim: tuple[str, int] = ("mamba_d_state", 256)
    kernel: tuple[str, int] = ("mamba_d_conv", 4)
    conv_bias: str = "mamba_conv_bias"


MAMBA_NAMES = MambaNames()


def state_spaces(
    options: JsonOptions, layers: tuple[int, ...], width: int, mamba: Mamba, names: MambaNames = MAMBA_NAMES
) -> Recurrence | None:
    """Read the sizes of Mamba-2's layers. `width`: of x; 0: that of all heads."""
    num_heads, num_groups = options.count(*names.num_heads), options.count(*names.num_groups)
    state_dim, kernel = options.count(*names.state_dim), options.count(*names.kernel, most=MAX_KERNEL)
    name, head_dim = names.head_dim
    if options.values.get(name) not in (None, "auto"):
        head_dim = options.count(name)
    head_dim = head_dim or width // num_heads
    if width and num_heads * head_dim != width:
        raise options.error(name, f"{num_heads} heads of {head_dim} are not the {width} columns of the recurrent layers")
    if num_heads % num_groups:
        raise options.error(names.num_groups[0], f"{num_groups} does not divide {names.num_heads[0]} {num_heads}")
    has_bias = options.flag(names.conv_bias, True)
    if not layers:
        return None
    return Recurrence(
        "state spaces",
        layers,
        kernel,
        num_heads * head_dim + 2 * num_groups * state_dim,
        has_bias,
        num_groups,
        num_heads,
        state_dim,
        head_dim,
        mamba,
    )


def time_step_limits(options: JsonOptions, name: str = "time_step_limit") -> tuple[float, float]:
    """Read the limits of Mamba-2's time steps: two numbers, also infinite ones."""
    given = options.values.get(name)
    if given is None:
        return 0.0, math.inf
    limits = [_number(each) for each in given] if isinstance(given, list) else []
    if len(limits) != 2 or None in limits or not limits[0] <= limits[1] or limits[1] < 0 or math.isinf(limits[0]):
        raise options.error(name, f"{given!r} should be two numbers, the least and the largest time step")
    return limits[0], limits[1]


def read_mamba(options: JsonOptions, activation: str, bias: str) -> Mamba:
    """Read the options of Mamba-2 in families with one for the biases of both projections, and norms after the gate."""
    has_bias = options.flag(bias, False)
    return Mamba(activation, *time_step_limits(options), has_input_bias=has_bias, has_output_bias=has_bias)


def _number(value: Any) -> Any:
    """Return a number, which transformers may have written as an object; None: it is none."""
    if isinstance(value, dict):
        found = value.get("__float__")
        value = {"Infinity": math.inf, "-Infinity": -math.inf}.get(found) if isinstance(found, str) else None
    return float(value) if type(value) in (int, float) and not math.isnan(value) else None


def recurrent_layers(options: JsonOptions, are_recurrent: Sequence[bool], kind: str) -> tuple[int, ...]:
    """Return the layers that `layer_types` calls `kind`, the others being "full_attention"; without it, those of
    `are_recurrent`."""
    if options.values.get("layer_types") is not None:
        kinds = layer_kinds(options, "layer_types", ("full_attention", kind))
        if len(kinds) != len(are_recurrent):
            raise options.error("layer_types", f"{len(kinds)} entries should be {len(are_recurrent)}, one for each layer")
        are_recurrent = [each == kind for each in kinds]
    return tuple(index for index, is_recurrent in enumerate(are_recurrent) if is_recurrent)


def layer_kinds(options: JsonOptions, name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kind of each layer. Raises CheckpointError if one is not among the `known` ones."""
    kinds = tuple(_OLDER_KINDS.get(each, each) for each in options.texts(name))
    if set(kinds) - set(known):
        raise options.error(name, f"{list(kinds)} should be a list of {', '.join(known)}")
    return kinds
