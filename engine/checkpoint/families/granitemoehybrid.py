"""Granite 4 H (IBM 2025): most layers are Mamba-2, the others have attention; all have an MLP, with or without experts beside
it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from engine.checkpoint.activations import read_activation
from engine.checkpoint.families import mamba_in_gguf
from engine.checkpoint.families.experts import ExpertsConfig
from engine.checkpoint.families.granitemoe import GraniteMoeShared
from engine.checkpoint.families.recurrence import (
    MAMBA_NAMES,
    UNUSED_MAMBA_OPTIONS,
    Recurrence,
    read_mamba,
    recurrent_layers,
    state_spaces,
)
from engine.checkpoint.json_fields import JsonOptions

_SUPPORTED = {"normalization_function": "rmsnorm"}
_POSITIONS = (None, "nope", "rope")


class GraniteMoeHybrid(GraniteMoeShared):
    name = "granitemoehybrid"
    gguf_name: str | None = "granitehybrid"
    gguf_options = GraniteMoeShared.gguf_options | {"attention.head_count_kv"}
    gguf_names = MappingProxyType(mamba_in_gguf.tensor_names("mamba"))
    class_names = ("GraniteMoeHybridForCausalLM",)
    model = "workers.models.mamba2:Mamba2"
    mlp_width_name = "shared_intermediate_size"
    mlp_name = "mlp.shared_experts"
    recurrent_module = "mamba"
    other_option_names = MappingProxyType({"layers_block_type": "layer_types"})
    harmless_options = UNUSED_MAMBA_OPTIONS | {"mamba_chunk_size", "init_method"}

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        attending = mamba_in_gguf.are_attending(options, num_layers)
        width = options.count("expert_shared_feed_forward_length", options.count("feed_forward_length"))
        return {
            **super().of_gguf(options, num_layers),
            **mamba_in_gguf.sizes(options, MAMBA_NAMES),
            "mamba_expand": options.count("ssm.inner_size") // options.count("embedding_length"),
            "layer_types": ["full_attention" if each else "linear_attention" for each in attending],
            "position_embedding_type": "rope" if options.flag("rope.scaling.finetuned", True) else "nope",
            "shared_intermediate_size": width,
            "num_local_experts": options.count("expert_count", 0, least=0),
        }

    def text_defaults(self, text: JsonOptions) -> Mapping[str, Any]:
        return {"shared_intermediate_size": 1024}

    def is_rotated(self, options: JsonOptions) -> bool:
        kind = options.values.get("position_embedding_type")
        if kind not in _POSITIONS:
            raise options.error("position_embedding_type", f"{kind!r} is not supported; expected one of {_POSITIONS}")
        return bool(kind == "rope")

    def recurrence(self, options: JsonOptions, num_layers: int) -> Recurrence | None:
        options.check_supported(_SUPPORTED)
        mamba = read_mamba(options, read_activation(options, self.activation_name, self.activation), "mamba_proj_bias")
        layers = recurrent_layers(options, [True] * num_layers, "linear_attention")
        width = options.count("mamba_expand", 2) * options.count("hidden_size")
        return state_spaces(options, layers, width, mamba)

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        if options.values.get("num_local_experts") == 0:
            for name in ("intermediate_size", "num_experts_per_tok"):  # mean nothing
                options.values.get(name)
            return None
        return super().experts(options, num_layers)
