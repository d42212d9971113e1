"""Llama 4 (Meta 2025), its text model: chunks of positions in layers that rotate, scaled queries in the others, and experts
with weighted inputs beside an MLP for all tokens."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.families.experts import ExpertsConfig, layer_indexes, num_chosen, num_experts
from engine.checkpoint.families.family import Biases, Family, QueryScaling
from engine.checkpoint.families.rotated_layers import unrotated_layers
from engine.checkpoint.families.windows import layer_windows
from engine.checkpoint.json_fields import JsonOptions

_EXPERTS_WITHOUT_HEAD_NORM = 128  # llama.cpp knows Maverick by them


class Llama4(Family):
    name = "llama4_text"
    other_names = ("llama4",)
    other_trunk_names = ("Llama4Text",)
    gguf_name = "llama4"
    gguf_options = frozenset(("attention.sliding_window",))
    class_names = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")  # the second has an encoder, which is not read
    num_kv_heads = 8
    has_unread_encoder = True
    harmless_options = frozenset(("no_rope_layer_interval", "interleave_moe_layer_step", "for_llm_compressor", "vision_config"))
    unused_tensors = r"^(vision_model|multi_modal_projector)\."
    has_turned_experts = True
    is_rotary_interleaved = True
    mlp_width_name = "intermediate_size_mlp"
    rms_norm_eps = 1e-5
    rope_theta = 500_000.0
    head_dim = 128
    is_head_norm_after_rotation = True
    has_head_norm_weights = False

    def biases(self, options: JsonOptions) -> Biases:
        bias = options.flag("attention_bias", False)
        return Biases(bias, bias, False)

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        """Return what llama.cpp fixes; a window of 0 says that there are no chunks, and that all layers rotate."""
        width = options.count("feed_forward_length")
        found: dict[str, Any] = {"intermediate_size_mlp": width, "no_rope_layers": None, "attention_chunk_size": 8192}
        found["use_qk_norm"] = options.count("expert_count") != _EXPERTS_WITHOUT_HEAD_NORM
        if options.values.get("attention.sliding_window") == 0:
            found |= {"no_rope_layers": [1] * num_layers, "layer_types": ["full_attention"] * num_layers}
        return found

    def head_norm(self, options: JsonOptions) -> bool:
        return options.flag("use_qk_norm", True)

    def has_head_norm_in(self, has_head_norm: bool, has_other_rope: bool) -> bool:
        return has_head_norm and not has_other_rope

    def unrotated_layers(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        return unrotated_layers(options, num_layers)

    def query_scaling(self, options: JsonOptions, rope: JsonOptions, *, is_rotated: bool) -> QueryScaling | None:
        beta, interval = options.number("attn_scale", 0.1), options.count("floor_scale", 8192)
        is_tuned = options.values.get("attn_temperature_tuning")  # a number in some files
        if is_rotated or not (is_tuned is None or is_tuned):
            return None
        return QueryScaling(beta, interval, first=1)

    def has_chunks(self, options: JsonOptions) -> bool:
        return True

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        is_null = "attention_chunk_size" in options.values and options.values["attention_chunk_size"] is None
        size = 0 if is_null else options.count("attention_chunk_size", 8192)
        unrotated = self.unrotated_layers(options, num_layers)
        are_local = [index not in unrotated for index in range(num_layers)]
        return layer_windows(options, size, are_local, local_kind="chunked_attention")

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        step = options.count("interleave_moe_layer_step", 1)
        sparse = tuple(range(step - 1, num_layers, step))
        if options.values.get("moe_layers") is not None:
            sparse = tuple(layer_indexes(options, "moe_layers", num_layers))
        count = num_experts(options, "num_local_experts", "num_experts", default=16)
        chosen, width = num_chosen(options, "num_experts_per_tok", 1, count), options.count("intermediate_size", 8192)
        return ExpertsConfig(sparse, count, chosen, width, width, scoring="sigmoid", has_weighted_inputs=True)
