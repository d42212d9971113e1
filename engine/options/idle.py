"""Options without effect, because of other options or the model: each gets a note, since the user expects an effect. Part of
`resolve.py`. An option that contradicts another one is an error, raised where it is resolved."""

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
    """Add notes about options without effect. `is_cache_asked`: the cache size is given. `is_card_known`: the device memory is
    known."""
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
    """Return whether the option is meant to have an effect: options that turn something off, or allow no images, are not."""
    is_none_allowed = key == "limit_mm_per_prompt" and isinstance(value, dict) and not any(value.values())
    return value is not False and not is_none_allowed
