"""How much of the vision encoder a step runs, and how prompts with media are cut. Used by `resolve.py`."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.vision_config import VisionConfig
from engine.errors import OptionError


def resolve_encoder(values: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Fields of EngineConfig; of a text model they are as if nothing were asked for."""
    vision = model.vision
    if vision is None or values["language_model_only"]:
        return {}
    max_tokens = values["max_num_batched_tokens"]
    chunk_tokens = values["mm_chunk_tokens"] or max_tokens
    if chunk_tokens > max_tokens:
        raise OptionError(
            f"--mm-chunk-tokens {chunk_tokens}: a step has at most --max-num-batched-tokens {max_tokens}; give at most that"
        )
    return {
        "encoder_depth": vision.depth,
        "max_num_batched_encoder_embeds": values["max_num_batched_encoder_embeds"] or equal_embeds(model, vision, max_tokens),
        "mm_chunk_tokens": chunk_tokens,
        "disable_chunked_mm_input": values["disable_chunked_mm_input"],
    }


def equal_embeds(model: ModelConfig, vision: VisionConfig, num_tokens: int) -> int:
    """The rows of features that take the encoder about as many multiplications as `num_tokens` of text take the decoder: those
    of its matrices, since attention has as many more as there are tokens."""
    heads = model.num_attention_heads + model.num_kv_heads
    experts = model.experts
    width = experts.num_chosen * experts.intermediate_size + experts.shared_intermediate_size if experts else 0
    width = width or model.intermediate_size
    per_token = model.num_layers * model.hidden_size * (2 * heads * model.head_dim + 3 * width)
    patches = vision.spatial_merge_size**2 * vision.temporal_merge_size
    per_row = patches * vision.depth * vision.hidden_size * (4 * vision.hidden_size + 3 * vision.intermediate_size)
    return max(1, num_tokens * per_token // per_row)
