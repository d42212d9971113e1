"""Experts in config.json, and every refused value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.families.deepseek_v3 import DeepseekV3
from engine.checkpoint.families.experts import ExpertsConfig
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from tests.paths import GOLDEN

COMMON: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
QWEN = {**COMMON, "architectures": ["Qwen3MoeForCausalLM"]}
ERNIE = {**COMMON, "architectures": ["Ernie4_5_MoeForCausalLM"]}
BIAS = "mlp.moe_statics.e_score_correction_bias"


def read(directory: Path, config: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return ModelConfig.read(directory)


def experts_of(directory: Path, config: dict[str, Any]) -> ExpertsConfig:
    experts = read(directory, config).experts
    assert experts is not None
    return experts


def test_golden() -> None:
    qwen, ernie = (ModelConfig.read(GOLDEN / name) for name in ("qwen3_moe", "ernie4_5_moe"))
    assert qwen.experts == ExpertsConfig((0, 1, 2), 8, 2, 48, is_normalized=True)
    expected = ExpertsConfig((1, 2, 3), 8, 2, 48, 96, BIAS, (1, 8), is_normalized=True, smallest_sum=1e-12)
    assert ernie.experts == expected
    assert ernie.rope.is_interleaved
    assert ModelConfig.read(GOLDEN / "qwen3").experts is None


def test_defaults(tmp_path: Path) -> None:
    """Defaults equal those of the models' own configuration classes."""
    assert experts_of(tmp_path, QWEN) == ExpertsConfig((0, 1, 2, 3), 128, 8, 768)
    assert read(tmp_path, QWEN).head_dim == 16
    expected = ExpertsConfig((1, 2, 3), 64, 6, 1536, 3072, BIAS, (1, 64), is_normalized=True, smallest_sum=1e-12)
    assert experts_of(tmp_path, ERNIE) == expected
    ernie = read(tmp_path, ERNIE)
    assert (ernie.tie_word_embeddings, ernie.rms_norm_eps, ernie.rope.theta) == (True, 1e-5, 500000.0)


@pytest.mark.parametrize(
    ("config", "sparse"),
    [
        ({**QWEN, "decoder_sparse_step": 2}, (1, 3)),
        ({**QWEN, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, (3,)),
        ({**QWEN, "mlp_only_layers": [0, 2]}, (1, 3)),
        ({**QWEN, "mlp_only_layers": None}, (0, 1, 2, 3)),
        ({**ERNIE, "moe_layer_start_index": 2}, (2, 3)),
        ({**ERNIE, "moe_layer_end_index": 2}, (1, 2)),
        ({**ERNIE, "moe_layer_interval": 2, "moe_layer_start_index": 0}, (1, 3)),
    ],
)
def test_sparse_layers(config: dict[str, Any], sparse: tuple[int, ...], tmp_path: Path) -> None:
    assert experts_of(tmp_path, config).sparse_layers == sparse


@pytest.mark.parametrize(
    "config",
    [
        {**QWEN, "num_experts": 0},
        {**QWEN, "mlp_only_layers": [0, 1, 2, 3]},
        {**QWEN, "decoder_sparse_step": 5},
        {**ERNIE, "moe_num_experts": 0},
        {**ERNIE, "moe_layer_start_index": 4},
    ],
)
def test_none(config: dict[str, Any], tmp_path: Path) -> None:
    assert read(tmp_path, config).experts is None


def test_sliding_windows(tmp_path: Path) -> None:
    assert read(tmp_path, {**QWEN, "sliding_window": 9}).sliding_windows == (0, 0, 0, 0)
    windowed = {**QWEN, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}
    assert read(tmp_path, windowed).sliding_windows == (9, 9, 9, 9)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN, "num_experts": 8, "num_local_experts": 4}, "num_experts: conflicting values for one setting"),
        ({**QWEN, "num_experts": 10**9}, "num_experts: 1000000000 should be an integer of at most"),
        ({**QWEN, "num_experts": 4}, "num_experts_per_tok: 8 experts per token, but only 4 exist"),
        ({**QWEN, "decoder_sparse_step": 0}, "decoder_sparse_step: 0 should be an integer of at least 1"),
        ({**QWEN, "mlp_only_layers": [4]}, "mlp_only_layers: [4] should be a list of layers, 0 to 3"),
        ({**QWEN, "mlp_only_layers": 1}, "mlp_only_layers: 1 should be a list of layers"),
        ({**QWEN, "norm_topk_prob": "yes"}, "norm_topk_prob: 'yes' should be true or false"),
        ({**QWEN, "moe_intermediate_size": 0}, "moe_intermediate_size: 0 should be an integer of at least 1"),
        ({**ERNIE, "moe_k": 65}, "moe_k: 65 experts per token, but only 64 exist"),
        ({**ERNIE, "moe_gate": "top2_fused"}, "moe_gate: 'top2_fused' is not supported; supported: 'topk'"),
        ({**ERNIE, "moe_gate_act": "sigmoid"}, "moe_gate_act: 'sigmoid' is not supported; supported: 'softmax'"),
        ({**ERNIE, "moe_intermediate_size": [1536, 512]}, "moe_intermediate_size: [1536, 512] should be an integer"),
        ({**ERNIE, "moe_layer_interval": 0}, "moe_layer_interval: 0 should be an integer of at least 1"),
        ({**ERNIE, "moe_layer_end_index": -2}, "moe_layer_end_index: -2 should be an integer of at least -1"),
    ],
)
def test_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path, config)
    assert message in str(raised.value)


def deepseek(changes: dict[str, Any]) -> ExpertsConfig | None:
    return DeepseekV3().experts(JsonOptions(changes, Path("config.json")), 6)


def test_deepseek() -> None:
    expected = ExpertsConfig(
        (3, 4, 5),
        256,
        8,
        2048,
        2048,
        "mlp.gate.e_score_correction_bias",
        (256,),
        scoring="sigmoid",
        is_normalized=True,
        added_to_sum=1e-20,
        factor=2.5,
        num_groups=8,
        num_chosen_groups=4,
    )
    assert deepseek({}) == expected
    small = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "n_shared_experts": 0, "first_k_dense_replace": 0}
    found = deepseek(small)
    assert found is not None
    assert (found.sparse_layers, found.shared_intermediate_size, found.num_groups) == ((0, 1, 2, 3, 4, 5), 0, 4)
    assert deepseek({"first_k_dense_replace": 6}).sparse_layers == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported; supported: 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method: 'greedy' is not supported; supported: 'noaux_tc'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: 2 is not supported"),
        ({"n_group": 7}, "n_group: 7 does not divide 256 experts"),
        ({"topk_group": 9}, "topk_group: 9 should be an integer of at most 8"),
        ({"n_routed_experts": 16, "topk_group": 1}, "num_experts_per_tok: 8 experts per token, but only 2 exist"),
    ],
)
def test_deepseek_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        deepseek(changes)
    assert message in str(raised.value)
