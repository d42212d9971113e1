"""The vision encoder's share of a step, and chunks of prompts with media. Used by `resolve.py`."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.vision_config import VisionConfig
from engine.errors import OptionError

INT8_RATE = 3  # multiplications with 8- or 4-bit weights in the time of one in float32, measured with AVX-512 VNNI


def resolve_encoder(values: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return fields of EngineConfig; for a text model the defaults."""
    vision = model.vision
    if vision is None or values["language_model_only"]:
        return {}
    max_tokens = values["max_num_batched_tokens"]
    chunk_tokens = values["mm_chunk_tokens"] or max_tokens
    if chunk_tokens > max_tokens:
        raise OptionError(
            f"--mm-chunk-tokens {chunk_tokens} exceeds --max-num-batched-tokens {max_tokens}, the limit of a "
            "step; lower it to at most that"
        )
    whole = tuple(layer for layer in range(vision.depth) if not vision.window_size or layer in vision.full_attention_layers)
    text_rate = INT8_RATE if values["quantization"] != "none" or model.quantization is not None else 1
    vision_rate = INT8_RATE if values["vision_quantization"] != "none" else 1
    return {
        "encoder_depth": vision.depth,
        "encoder_passes": vision.num_passes,
        "encoder_whole_layers": whole,
        "encoder_attention_cost": attention_cost(vision, vision_rate),
        "max_num_batched_encoder_embeds": values["max_num_batched_encoder_embeds"]
        or equal_embeds(model, vision, max_tokens * vision_rate / text_rate),
        "mm_chunk_tokens": chunk_tokens,
        "disable_chunked_mm_input": values["disable_chunked_mm_input"],
    }


def equal_embeds(model: ModelConfig, vision: VisionConfig, num_tokens: float) -> int:
    """Return the number of feature rows for which the encoder's matrices need about as many multiplications as the decoder's
    for `num_tokens` of text."""
    heads = model.num_attention_heads + model.num_kv_heads
    experts = model.experts
    width = experts.num_chosen * experts.intermediate_size + experts.shared_intermediate_size if experts else 0
    width = width or model.intermediate_size
    per_token = model.num_layers * model.hidden_size * (2 * heads * model.head_dim + 3 * width)
    patches = vision.spatial_merge_size**2 * vision.temporal_merge_size
    per_row = patches * vision.depth * vision.hidden_size * _per_column(vision)
    return max(1, int(num_tokens * per_token / per_row))


def attention_cost(vision: VisionConfig, rate: float) -> float:
    """Return the cost of attention per pair of a unit's rows, in a layer with attention over whole units. The unit is the time
    of the layer's matrices for one row. `rate`: multiplications of the matrices in the time of one in attention, which uses
    float32."""
    return rate * 2 * vision.spatial_merge_size**2 / _per_column(vision)


def _per_column(vision: VisionConfig) -> int:
    """Multiplications of a layer's matrices, per patch and element of its hidden state."""
    return 4 * vision.hidden_size + 3 * vision.intermediate_size
