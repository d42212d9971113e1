"""Options without effect beside the other options and the model: each is named in a note, since the user expects something of
it. Part of `resolve.py`. An option that contradicts another is refused where that is resolved.
"""

from __future__ import annotations

from engine.checkpoint.model_config import ModelConfig
from engine.options.table import OptionValues

_OF_MEDIA = (
    *(
        "mm_chunk_tokens",
        "max_num_batched_encoder_embeds",
        "disable_chunked_mm_input",
        "limit_mm_per_prompt",
        "media_io_kwargs",
    ),
    *("allowed_media_domains", "allowed_media_networks", "allowed_local_media_path", "media_download_parallel"),
    "allowed_object_buckets",
    *("media_fetch_timeout", "max_image_pixels", "max_media_bytes", "media_memory", "mm_processor_cache_gb"),
    *("mm_processor_kwargs", "enable_mm_embeds"),
)


def note_idle(options: OptionValues, model: ModelConfig, device: str, *, is_cache_asked: bool, is_card_known: bool) -> None:
    """`is_cache_asked`: the cache's size is given; `is_card_known`: the memory of the card."""
    values = options.values
    if is_cache_asked:
        share = "the size of the KV cache is set by --num-kv-blocks or --kv-cache-memory"
    elif device == "cpu":
        share = "it applies to GPUs only, and the engine runs on the CPU; use --kv-cache-memory"
    else:
        share = f"Paddle does not report the memory of {device}; use --kv-cache-memory"
    rows: tuple[tuple[tuple[str, ...], bool, str], ...] = (
        (("gpu_memory_utilization",), not is_card_known, share),
        (("max_loras", "max_lora_rank"), not values["enable_lora"], "LoRA adapters are disabled; add --enable-lora"),
        (
            _OF_MEDIA,
            model.vision is None or values["language_model_only"],
            "the model takes only text" if model.vision is None else "the vision encoder is disabled by --language-model-only",
        ),
        (
            ("expert_placement_strategy",),
            not values["enable_expert_parallel"],
            "expert parallelism is disabled; add --enable-expert-parallel",
        ),
        (("eplb_config",), not values["enable_eplb"], "expert rebalancing is disabled; add --enable-eplb"),
        (("data_parallel_routing",), values["data_parallel_size"] == 1, "there is only one replica (--data-parallel-size)"),
        (("weight_cache_limit",), not values["weight_cache"], "packed weights are not kept (--no-weight-cache)"),
    )
    for keys, is_idle, why in rows:
        found = [f"--{key.replace('_', '-')}" for key in keys if key in options.given and _asks(key, values[key])]
        if is_idle and found:
            options.notes.append(f"{' and '.join(found)} has no effect: {why}")


def _asks(key: str, value: object) -> bool:
    """Whether it is to have an effect: who turns something off, or allows no pictures, has what he asks for."""
    is_none_allowed = key == "limit_mm_per_prompt" and isinstance(value, dict) and not any(value.values())
    return value is not False and not is_none_allowed
