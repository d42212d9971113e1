"""DeepSeek-V3's config.json: latent attention, its options, their defaults, and every value that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.families.family import Latents
from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from tests.paths import GOLDEN

DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "max_position_embeddings": 256,
}


def read(directory: Path, config: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return ModelConfig.read(directory)


def test_golden() -> None:
    config = ModelConfig.read(GOLDEN / "deepseek_v3")
    assert config.latents == Latents(48, 32, 32, 16, 32)
    assert config.experts is not None
    assert (config.experts.sparse_layers, config.experts.num_groups, config.experts.factor) == ((1, 2), 2, 2.5)
    assert (config.head_dim, config.num_draft_layers, config.rope.is_interleaved) == (16, 1, True)
    assert (config.rope.rotary_dim, config.rope.mscale, config.rope.mscale_all_dim) == (16, 1.0, 1.0)


def test_defaults(tmp_path: Path) -> None:
    """Defaults equal those of transformers' own configuration class."""
    config = read(tmp_path, DEEPSEEK)
    assert config.latents == Latents(1536, 512, 128, 64, 128)
    assert not config.has_qkv_bias


def test_options(tmp_path: Path) -> None:
    assert read(tmp_path, {**DEEPSEEK, "first_k_dense_replace": 5}).experts is None
    assert not read(tmp_path, {**DEEPSEEK, "rope_interleave": False}).rope.is_interleaved
    plain = read(tmp_path, {**DEEPSEEK, "q_lora_rank": None}).latents
    assert plain is not None
    assert plain.query_dim == 0


@pytest.mark.parametrize(("dtype", "slot_bytes"), [("float32", 48 * 4), ("bfloat16", 48 * 2), ("int8", 48 + 2 * 4)])
def test_bytes_of_the_kv_cache(dtype: str, slot_bytes: int) -> None:
    """One latent of 32 and one rotated key of 16 for all heads; each has its scale in int8."""
    spec = KVCacheSpec.of(ModelConfig.read(GOLDEN / "deepseek_v3"), 8, dtype)
    assert spec.bytes_per_block == 3 * 8 * slot_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads: 1 should equal num_attention_heads, 3"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim: 7 is odd"),
        ({"kv_lora_rank": 0}, "kv_lora_rank: 0 should be an integer of at least 1"),
        ({"rope_interleave": 1}, "rope_interleave: 1 should be true or false"),
    ],
)
def test_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path, {**DEEPSEEK, **changes})
    assert message in str(raised.value)
