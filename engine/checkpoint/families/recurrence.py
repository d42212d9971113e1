"""Recurrent layers in a family's config.json: which layers they are, and their sizes. Part of `ModelConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from engine.checkpoint.families.windows import all_but_every
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.recurrent_layer import RecurrentLayer

MAX_KERNEL = 64  # positions that a convolution reads


class Recurrence(msgspec.Struct, frozen=True):
    """The recurrent layers of a model, all alike: a causal convolution of each column, and what follows it: nothing, or the
    gated delta rule (Yang et al. 2024)."""

    kind: Literal["convolution", "delta"]
    layers: tuple[int, ...]
    kernel: int  # positions that the convolution reads, its own included
    channels: int  # columns of the convolution: of the delta rule queries, keys and values
    has_bias: bool = False  # of the convolution and the linears around it
    num_key_heads: int = 0  # of the delta rule, and the next three
    num_value_heads: int = 0  # a multiple of the key heads: neighbours share one
    key_dim: int = 0  # of a head
    value_dim: int = 0

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
        """Return the layers with attention."""
        return tuple(index for index in range(num_layers) if index not in self.layers)

    @property
    def layer(self) -> RecurrentLayer:
        """Return the sizes of one layer's state."""
        if self.kind == "convolution":
            return RecurrentLayer(self.channels, self.kernel, None, 0)
        matrix = self.num_value_heads, self.key_dim, self.value_dim
        log_width = self.keys_width + self.values_width + self.num_value_heads
        return RecurrentLayer(self.channels, self.kernel, matrix, log_width)


def gated_delta(options: JsonOptions, num_layers: int) -> Recurrence | None:
    """Read Qwen3-Next's recurrent layers: three of four, or those that `layer_types` names; None: there are none."""
    key_heads = options.count("linear_num_key_heads", 16)
    value_heads = options.count("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise options.error("linear_num_key_heads", f"{key_heads} does not divide linear_num_value_heads {value_heads}")
    kernel = options.count("linear_conv_kernel_dim", 4, most=MAX_KERNEL)
    key_dim, value_dim = options.count("linear_key_head_dim", 128), options.count("linear_value_head_dim", 128)
    layers = recurrent_layers(
        options, all_but_every(options.count("full_attention_interval", 4), num_layers), "linear_attention"
    )
    if not layers:
        return None
    return Recurrence(
        "delta",
        layers,
        kernel,
        2 * key_heads * key_dim + value_heads * value_dim,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )


def recurrent_layers(options: JsonOptions, are_recurrent: Sequence[bool], kind: str) -> tuple[int, ...]:
    """Return the layers that `layer_types` calls `kind`, the others being "full_attention"; without it, those of
    `are_recurrent`."""
    if options.values.get("layer_types") is not None:
        kinds = options.texts("layer_types")
        if set(kinds) - {kind, "full_attention"} or len(kinds) != len(are_recurrent):
            raise options.error(
                "layer_types", f"{list(kinds)} should be {len(are_recurrent)} entries, each 'full_attention' or {kind!r}"
            )
        are_recurrent = [each == kind for each in kinds]
    return tuple(index for index, is_recurrent in enumerate(are_recurrent) if is_recurrent)
