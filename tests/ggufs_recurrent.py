"""Recurrent layers in GGUF files for tests, as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from typing import Any

import gguf
import numpy as np

DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
DELTA_PARTS = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
LFM2_PARTS = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}
MAMBA = ("granitemoehybrid", "bamba", "mamba2", "nemotron_h", "falcon_h1")
KIMI_PARTS = {
    **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"self_attn.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
}
MAMBA_PARTS = {
    "norm": "attn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "mlp.fc1_latent_proj": "ffn_latent_down",
    "mlp.fc2_latent_proj": "ffn_latent_up",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
_MTP_PARTS = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


def add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the metadata of recurrent layers, and of the experts beside them."""
    kinds = config.get("layer_types")
    if config["model_type"].startswith("lfm2"):
        writer.kv_data[0].pop(f"{writer.arch}.attention.head_count_kv")
        writer.add_head_count_kv([config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds or []])
        writer.add_shortconv_l_cache(config.get("conv_L_cache", 3))
    if config["model_type"] == "lfm2_moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config.get("num_experts_per_tok", config.get("num_experts_per_token")))
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] in MAMBA:
        _add_mamba(writer, config)
    if config["model_type"] == "kimi_linear":
        _add_kimi(writer, config)
    if config["model_type"] not in DELTA:
        return
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_ssm_conv_kernel(config.get("linear_conv_kernel_dim", 4))
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    if kinds is not None:
        of_drafts = [False] * config.get("num_nextn_predict_layers", 0)
        writer.add_array(
            f"{writer.arch}.attention.recurrent_layers", [kind == "linear_attention" for kind in kinds] + of_drafts
        )
    writer.add_uint32(f"{writer.arch}.full_attention_interval", config.get("full_attention_interval", 4))
    share = config.get("rope_parameters", {}).get("partial_rotary_factor", 0.25)
    writer.add_rope_dimension_count(int(config["head_dim"] * share))


def with_mamba_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a model with Mamba-2 layers under Granite's names."""
    kind, layers = config["model_type"], range(config.get("num_hidden_layers", 0))
    if kind == "bamba":
        attending = config["attn_layer_indices"]
        return config | {"layer_types": ["full_attention" if index in attending else "mamba" for index in layers]}
    if kind == "falcon_h1":
        return config | {"mamba_d_head": config["mamba_d_ssm"] // config["mamba_n_heads"]}
    if kind not in ("mamba2", "nemotron_h"):
        return config
    prefix, state = ("", "state_size") if kind == "mamba2" else ("mamba_", "ssm_state_size")
    sizes = {"mamba_n_heads": f"{prefix}num_heads", "mamba_d_head": f"{prefix}head_dim"}
    found = {name: config[own] for name, own in (sizes | {"mamba_n_groups": "n_groups", "mamba_d_state": state}).items()}
    if kind == "mamba2":
        missing = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size"), 0)
        config = {name: value for name, value in config.items() if name != "head_dim"}
        return config | found | missing | {"max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5}
    kinds = config["layers_block_type"]
    return config | found | {"num_hidden_layers": len(kinds), "layer_types": kinds, "rms_norm_eps": 1e-5}


def _add_mamba(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads, kinds = config["mamba_n_heads"], config.get("layer_types")
    if kinds is not None:
        writer.kv_data[0].pop(f"{writer.arch}.attention.head_count_kv")
        writer.add_head_count_kv(
            [config["num_key_value_heads"] if kind in ("attention", "full_attention") else 0 for kind in kinds]
        )
    if config["model_type"] == "nemotron_h":
        writer.kv_data[0].pop(f"{writer.arch}.feed_forward_length")
        writer.add_feed_forward_length([config["moe_intermediate_size"] if kind == "moe" else 0 for kind in kinds or []])
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(True)
    if config["model_type"] == "bamba":
        writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"] // 2)
    writer.add_ssm_conv_kernel(config.get("mamba_d_conv", 4))
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config.get("mamba_n_groups", 1))
    writer.add_ssm_time_step_rank(heads)
    expanded = config.get("mamba_expand", 2) * config["hidden_size"]
    writer.add_ssm_inner_size(heads * config["mamba_d_head"] if "mamba_d_head" in config else expanded)
    writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")


def mamba_tensors(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of Mamba-2 as the converter stores them: vectors have another axis."""
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if name.endswith("mamba.norm.weight"):
            tensor = tensor.reshape(config.get("mamba_n_groups", 1), -1)
        elif name.endswith("mamba.conv1d.weight"):
            tensor = tensor.squeeze(1)
        elif name.endswith((".A_log", ".D")):
            tensor = (-np.exp(tensor) if name.endswith("A_log") else tensor)[:, None]
        found[name] = tensor
    is_scaled = config["model_type"] == "falcon_h1"
    return {name: _scaled(name, values, config) for name, values in found.items()} if is_scaled else found


def _scaled(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Return a tensor of Falcon-H1 with its constant factors."""
    gate, down = config["mlp_multipliers"]
    attention = config["attention_in_multiplier"]
    factors = {
        **{"gate_proj": gate, "down_proj": down, "o_proj": config["attention_out_multiplier"]},
        **{"q_proj": attention, "k_proj": attention * config["key_multiplier"], "v_proj": attention},
        **{"out_proj": config["ssm_out_multiplier"], "lm_head": config["lm_head_multiplier"]},
        **{"embed_tokens": config["embedding_multiplier"], "in_proj": config["ssm_in_multiplier"]},
    }
    module = name.removesuffix(".weight").rpartition(".")[2]
    scaled = values * np.float32(factors.get(module, 1.0))
    if module == "in_proj":
        width, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        widths = (width, width, keys, keys, config["mamba_n_heads"])
        scaled *= np.repeat(config["ssm_multipliers"], widths).astype(np.float32)[:, None]
    return scaled


def _add_kimi(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    linear = config["linear_attn_config"]
    writer.kv_data[0].pop(f"{writer.arch}.attention.head_count_kv")
    writer.add_head_count_kv(
        [int(number in linear["full_attn_layers"]) for number in range(1, config["num_hidden_layers"] + 1)]
    )
    writer.add_ssm_conv_kernel(linear["short_conv_kernel_size"])
    writer.add_uint32(f"{writer.arch}.kda.head_dim", linear["head_dim"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(1)
    writer.add_expert_weights_scale(2.446)


def kimi_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of Kimi Linear as the converter stores them."""
    found = {name: -np.exp(tensor) if name.endswith(".A_log") else tensor for name, tensor in tensors.items()}
    return {name: tensor.swapaxes(0, 1)[None] if "conv1d" in name else tensor for name, tensor in found.items()}


def draft_layers(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return Qwen's MTP layers, named as layers behind the others."""
    first, found = config["num_hidden_layers"], {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"mtp\.layers\.(\d+)\.(.+)", name):
            found[f"model.layers.{first + int(match[1])}.{match[2]}"] = tensor
        elif match := re.fullmatch(r"mtp\.(\w+)\.weight", name):
            found[f"model.layers.{first}.{_MTP_PARTS[match[1]]}.weight"] = tensor
    return found


def delta_tensors(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of Qwen3-Next or Qwen3.5 as the converter stores them, without the offset of norms."""
    found: dict[str, np.ndarray] = {}
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight").rpartition(".linear_attn.")[2]
        if module == "in_proj_qkvz":
            width = values // keys * value_dim
            parts = np.split(tensor.reshape(keys, -1, tensor.shape[1]), np.cumsum([key_dim, key_dim, width]), axis=1)
            prefix = name.removesuffix("_qkvz.weight")
            found[f"{prefix}_qkv.weight"] = np.concatenate([part.reshape(-1, tensor.shape[1]) for part in parts[:3]])
            found[f"{prefix}_z.weight"] = parts[3].reshape(-1, tensor.shape[1])
            continue
        if config["model_type"] != "qwen3_next":
            tensor = _tiled(module, tensor, keys, values, value_dim, 2 * keys * key_dim)
        found[name] = -np.exp(tensor) if module == "A_log" else tensor.squeeze(1) if module == "conv1d" else tensor
    return found


def _tiled(module: str, tensor: np.ndarray, keys: int, values: int, value_dim: int, first: int) -> np.ndarray:
    """Return value heads as the converter orders them for Qwen3.5. `first`: rows of queries and keys."""

    def ordered(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(keys, values // keys, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if module in ("in_proj_qkv", "conv1d"):
        return np.concatenate([tensor[:first], ordered(tensor[first:])])
    if module == "out_proj":
        return np.ascontiguousarray(ordered(tensor.T).T)
    return ordered(tensor) if module in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias") else tensor
