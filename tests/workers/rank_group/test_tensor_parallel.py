"""Several ranks give one rank's bytes: tokens and log-probabilities, also of prompts, in every precision and with every
plan."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops import _cpu
from shm.segment import MemoryFile
from tests.paths import GOLDEN
from tests.workers import deepseek
from tests.workers.checkpoints import write_checkpoint
from tests.workers.mtp import drafting, write_walk
from tests.workers.rank_group.rank_groups import rank_group_of
from tests.workers.rank_group.serving import serve, serve_all, serve_golden
from tests.workers.serving import ARCHITECTURES, golden_cases
from tests.workers.test_variants import VARIANTS

ARENA_BYTES = 32 << 20

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
    "int8": {"quantization": "wint8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "wint4"},
}

# heads that end within panels, a KV head that ranks share, matrices of which the last panel is not full, and some so small that
# they run whole
ODD = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 72,
    "intermediate_size": 216,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "vocab_size": 1003,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}

# the same with norms of all queries and all keys, fused projections, and soft caps with norms on both sides
ODD_WIDE = {**ODD, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
ODD_FUSED = {**ODD, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
ODD_CAPPED = {**ODD, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "sliding_window": 20}

# attention and MLP side by side with LayerNorms, an MLP without a gate, norms after the rotation, and scaled queries
ODD_PARALLEL = {**ODD, "model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"], "sliding_window": 20}
ODD_PLAIN = {**ODD, "model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"]}
ODD_TURNED = {**ODD, "model_type": "hunyuan_v1_dense", "architectures": ["HunYuanDenseV1ForCausalLM"]}
ODD_SCALED = {
    **ODD,
    "model_type": "ministral3",
    "architectures": ["Ministral3ForCausalLM"],
    "rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 8},
}

# the same of experts, and of latent attention: compressed rows are cut, and shared experts added to a rank's own columns
ODD_EXPERTS = {
    **ODD,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 104,
    "moe_intermediate_size": 100,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
ODD_GATED = {
    **ODD_EXPERTS,
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "shared_expert_intermediate_size": 100,
}
ODD_WEIGHTED = {
    **{key: value for key, value in ODD_EXPERTS.items() if key not in ("num_experts", "moe_intermediate_size")},
    "model_type": "llama4_text",
    "architectures": ["Llama4ForCausalLM"],
    "intermediate_size": 100,
    "intermediate_size_mlp": 216,
    "num_local_experts": 7,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 17,
    "floor_scale": 8,
}
ODD_SINKS = {
    **{key: value for key, value in ODD_EXPERTS.items() if key not in ("num_experts", "moe_intermediate_size")},
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "intermediate_size": 100,
    "num_local_experts": 7,
    "sliding_window": 20,
}
ODD_MXFP4 = {
    **ODD_SINKS,
    "hidden_size": 128,
    "intermediate_size": 160,
    "quantization_config": {"quant_method": "mxfp4"},
}
ODD_LAYERS = {
    **ODD_EXPERTS,
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 20,
    "num_key_value_heads": 6,
    "num_global_key_value_heads": 1,
    "global_head_dim": 36,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 20,
    "vocab_size_per_layer_input": 1003,
    "enable_moe_block": True,
    "top_k_experts": 3,
}
ODD_LATENTS = {
    **deepseek.CONFIG,
    "vocab_size": 1003,
    "hidden_size": 104,
    "intermediate_size": 216,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 100,
    "kv_lora_rank": 104,
    "qk_nope_head_dim": 20,
    "moe_intermediate_size": 100,
}


def on_each(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return each rank's answer, with a KV arena that they share."""
    with rank_group_of(num_ranks) as rank_group:
        arena = MemoryFile.create("tokamak-test-arena", ARENA_BYTES)
        ranks = [rank_group.start(rank, function, (DupFd(arena.fd), ARENA_BYTES), *arguments) for rank in range(num_ranks)]
        return [rank.answer() for rank in ranks]


@pytest.mark.slow
def test_two_ranks_equal_one_rank() -> None:
    """Every precision with every variant of the kernels, and op by op."""
    path = GOLDEN / "llama"
    jobs = [(path, {**options, "variant": variant}) for variant in _cpu.variants() for options in PRECISIONS.values()]
    jobs += [(path, {**PRECISIONS[name], "plan": "eager"}) for name in ("float32", "int4")]
    jobs.append((path, {"plan": "captured", "cudagraph_capture_sizes": (8, 4), "max_cudagraph_capture_size": 8}))
    expected = [serve(*job) for job in jobs]
    for found in on_each(2, serve_all, jobs):
        for job, answers, alone in zip(jobs, found, expected, strict=True):
            assert answers == alone, job


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_odd_shapes_equal_one_rank(num_ranks: int, tmp_path: Path) -> None:
    jobs = []
    for config in (ODD, ODD_WIDE, ODD_FUSED, ODD_CAPPED, ODD_PARALLEL, ODD_PLAIN, ODD_TURNED, ODD_SCALED):
        path = tmp_path / config["model_type"]
        write_checkpoint(path, config)
        jobs.append((path, {"max_model_len": 256}))
    assert on_each(num_ranks, serve_all, jobs) == [[serve(*job) for job in jobs]] * num_ranks


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "granitemoehybrid", "kimi_linear", "nemotron_h", "falcon_h1"])
@pytest.mark.parametrize("kinds", [("full_attention", "recurrent"), ("recurrent", "recurrent", "full_attention")])
def test_recurrent_layers_equal_one_rank(family: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Heads and channels are split, also in a last layer, which keeps only some rows; in every precision, and op by op."""
    given = VARIANTS[family]["config"]
    own = "conv" if family == "lfm2" else "linear_attention"
    layers = [own if kind == "recurrent" else kind for kind in kinds]
    config = {**given, "hidden_size": 128, "vocab_size": 1003, "num_hidden_layers": len(layers), "layer_types": layers}
    if family == "nemotron_h":  # the other parts, experts between projections among them, are layers, too
        layers = ["mlp", *layers[:1], "moe", *layers[1:]]
        config = {**given, "hidden_size": 128, "vocab_size": 1003, "layers_block_type": layers, "moe_latent_size": 72}
    if family == "falcon_h1":  # a group of the norm has heads of both ranks
        config |= {"mamba_n_groups": 1, "mamba_rms_norm": True, "mamba_norm_before_gate": kinds[0] == "recurrent"}
    write_checkpoint(tmp_path, config)
    jobs: list[tuple[Path, dict[str, Any]]] = [(tmp_path, {**options, "max_model_len": 256}) for options in PRECISIONS.values()]
    jobs.append((tmp_path, {"plan": "eager", "max_model_len": 256}))
    assert on_each(2, serve_all, jobs) == [[serve(*job) for job in jobs]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_experts_and_latents_equal_one_rank(num_ranks: int, tmp_path: Path) -> None:
    """Every precision, and op by op."""
    jobs: list[tuple[Path, dict[str, Any]]] = []
    kinds = {"experts": ODD_EXPERTS, "latents": ODD_LATENTS, "gated": ODD_GATED, "weighted": ODD_WEIGHTED, "sinks": ODD_SINKS}
    kinds["layers of several sizes"] = ODD_LAYERS
    for name, config in kinds.items():
        write_checkpoint(tmp_path / name, config)
        jobs += [(tmp_path / name, {**options, "max_model_len": 256}) for options in PRECISIONS.values()]
        jobs.append((tmp_path / name, {"plan": "eager", "max_model_len": 256}))
    write_checkpoint(tmp_path / "mxfp4", ODD_MXFP4)
    jobs += [(tmp_path / "mxfp4", {**PRECISIONS[name], "max_model_len": 256}) for name in ("float32", "bfloat16")]
    expected = [serve(*job) for job in jobs]
    for found in on_each(num_ranks, serve_all, jobs):
        for job, answers, alone in zip(jobs, found, expected, strict=True):
            assert answers == alone, job


@pytest.mark.slow
def test_two_ranks_agree_with_transformers() -> None:
    expected = {name: [case["greedy_token_ids"] for case in golden_cases(name)[:6]] for name in ARCHITECTURES}
    assert on_each(2, serve_golden, ARCHITECTURES, {}) == [expected] * 2


@pytest.mark.slow
def test_mtp_layers_draft_like_one_rank(tmp_path: Path) -> None:
    """Two ranks draft like one: each row brings as many tokens, with a layer that knows the answer and with random ones."""
    write_walk(tmp_path / "walk", np.random.default_rng(1).permutation(960), is_by_hidden=True)
    drafts = {"speculative_config": drafting(3), "max_model_len": 256}
    jobs: list[tuple[Path, dict[str, Any]]] = [(tmp_path / "walk", drafts), (GOLDEN / "deepseek_v3", drafts)]
    jobs += [(GOLDEN / "ernie4_5_moe", {**drafts, **PRECISIONS["int8"]}), (GOLDEN / "deepseek_v3", {**drafts, "plan": "eager"})]
    expected = [serve(*job) for job in jobs]
    assert max(expected[0][-1][0]) == 4
    assert on_each(2, serve_all, jobs) == [expected] * 2
    assert serve(GOLDEN / "deepseek_v3", {"max_model_len": 256}) == expected[1][:-1]


def test_first_rank_decides_which_drafts_are_verified() -> None:
    """The clock of the first rank decides the number of drafts, and its remembered answers which: all ranks run the same
    rows."""
    drafts = drafting(5, adaptive=True, method="ngram,suffix,mtp")
    job = GOLDEN / "deepseek_v3", {"speculative_config": drafts, "max_model_len": 256}
    first, second = on_each(2, serve_all, [job, job])
    assert first == second
    alone = serve(GOLDEN / "deepseek_v3", {"max_model_len": 256})
    assert [found[:-1] for found in first] == [alone] * 2
