"""Latent attention of a GGUF file, as options of DeepSeek-V3's config.json. Called by `convert.py`.

Newer files give `key_length` and `value_length` of the cached latents, and those of a head under names with `_mla`; older files
have only those of a head. llama.cpp rotates neighbouring elements, and scales by yarn's mscale_all_dim; the converter stores a
tenth of it.
"""

from __future__ import annotations

from typing import Any

from engine.checkpoint.json_fields import JsonOptions


def latent_options(options: JsonOptions, name: str) -> dict[str, Any]:
    """Return the options. `name`: the architecture's name in the file."""
    suffix = "_mla" if f"{name}.attention.key_length_mla" in options.values else ""
    key_dim = options.count(f"{name}.attention.key_length{suffix}")
    rotary_dim = options.count(f"{name}.rope.dimension_count")
    if rotary_dim >= key_dim:
        raise options.error(f"{name}.rope.dimension_count", f"{rotary_dim} should be less than attention.key_length, {key_dim}")
    return {
        "num_key_value_heads": options.count(f"{name}.attention.head_count"),
        "q_lora_rank": options.count(f"{name}.attention.q_lora_rank", 0) or None,
        "kv_lora_rank": options.count(f"{name}.attention.kv_lora_rank"),
        "qk_nope_head_dim": key_dim - rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "v_head_dim": options.count(f"{name}.attention.value_length{suffix}"),
        "rope_interleave": True,
    }


def latent_scaling(options: JsonOptions, name: str) -> dict[str, Any]:
    """Return the scaling options of the rope parameters."""
    mscale = round(10 * options.number(f"{name}.rope.scaling.yarn_log_multiplier", 0.0), 6)
    return {"mscale": mscale, "mscale_all_dim": mscale} if mscale else {}
