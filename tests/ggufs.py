"""GGUF files for tests, written with the `gguf` package as llama.cpp's converter does: a checkpoint's shape, its weights under
llama.cpp's names, and a tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer

from tests.ggufs_recurrent import (
    DELTA,
    DELTA_PARTS,
    KIMI_PARTS,
    LFM2_PARTS,
    MAMBA,
    MAMBA_PARTS,
    add_shape,
    delta_tensors,
    draft_layers,
    kimi_tensors,
    mamba_tensors,
    with_mamba_sizes,
)
from workers.weights.safetensors import SafetensorsFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b": "attn_k_b",
    "self_attn.v_b": "attn_v_b",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
}
_SPECIAL_PARTS = {
    **{
        name: {"post_attention_layernorm": "post_attention_norm"}
        for name in ("gemma2", "gemma3_text", "exaone4", "seed_oss", "glm4_moe", "olmo2", "olmo3")
    },
    "gemma4_text": {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "layer_scalar": "layer_output_scale",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    },
    "gpt_oss": {"post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks"},
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    **dict.fromkeys(DELTA, DELTA_PARTS),
    **dict.fromkeys(("lfm2", "lfm2_moe"), LFM2_PARTS),
    **dict.fromkeys(MAMBA, MAMBA_PARTS),
    "kimi_linear": KIMI_PARTS,
}
_WITH_LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
_PERMUTED = (
    "llama",
    "mixtral",
    "granite",
    "granitemoeshared",
    "granitemoehybrid",
    "ministral3",
    "smollm3",
    "bamba",
    "nemotron_h",
)
_ARCHITECTURES = {
    "mixtral": "llama",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "minimax_m2": "minimax-m2",
    "olmo3": "olmo2",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_moe": "qwen35moe",
    "lfm2_moe": "lfm2moe",
    "kimi_linear": "kimi-linear",
    "qwen2_vl": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen2_moe": "qwen2moe",
    "llama4_text": "llama4",
    "qwen3_moe": "qwen3moe",
    "cohere": "command-r",
    "hunyuan_v1_dense": "hunyuan-dense",
    "granitemoeshared": "granitemoe",
    "granitemoehybrid": "granitehybrid",
    "bamba": "granitehybrid",
    "nemotron_h": "nemotron_h_moe",
    "falcon_h1": "falcon-h1",
    "ministral3": "mistral3",
    "ernie4_5_moe": "ernie4_5-moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}  # that have another name there

Encode = Callable[[str, np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType]]
"""(llama.cpp's name, values) -> what is stored, and its type."""


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in SafetensorsFile(path / "model.safetensors").tensors.items()}


_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_RATES = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}
_SCALES = {"router.scale.weight": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}  # Gemma 4


def gguf_name(name: str, model_type: str = "") -> str:
    if name == "model.norm.weight" and model_type.startswith("lfm2"):
        return "token_embd_norm.weight"
    for outer, short in _OUTER.items():
        if name.startswith(f"{outer}."):
            return name.replace(outer, short)
    if name.endswith((".e_score_correction_bias", ".expert_bias")):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    if model_type == "falcon_h1" and name.endswith(".pre_ff_layernorm.weight"):
        return f"blk.{name.split('.')[2]}.ffn_norm"  # without a suffix
    if (last := name.rpartition(".")[2]) in _RATES:
        return f"blk.{name.split('.')[2]}.{_RATES[last]}"
    _, _, layer, *part, suffix = name.split(".")
    if (scale := ".".join([*part, suffix])) in _SCALES:
        return f"blk.{layer}.{_SCALES[scale]}"
    parts = _PARTS | _SPECIAL_PARTS.get(model_type, {})
    return f"blk.{layer}.{parts['.'.join(part)]}.{suffix}"


def as_type(type_name: str) -> Encode:
    """Return matrices in the type, by the package's own quantizer; vectors as float32."""

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        is_matrix = values.ndim > 1 and not re.search(r"ffn_gate_inp|conv1d|shortconv\.conv", name)
        kind = gguf.GGMLQuantizationType[type_name if is_matrix else "F32"]
        return gguf.quants.quantize(values, kind), kind

    return encode


def permuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows as llama.cpp's converter orders them for Llama."""
    halves = values.reshape(num_heads, 2, len(values) // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_gguf(path: Path, source: Path, encode: Encode, tensors_per_part: int = 0, **metadata: Any) -> dict[str, np.ndarray]:
    """Write the checkpoint `source` as a GGUF file; return the values of each tensor there, by its Hugging Face name.
    `tensors_per_part`: at most so many tensors in each of several files; 0: all in one."""
    config = with_mamba_sizes(_text_part(json.loads((source / "config.json").read_text())))
    writer = shape_writer(path, config, tensors_per_part)
    for key, value in metadata.items():
        add_value(writer, key, value)
    worth = {}
    tensors = {name: tensor for name, tensor in tensors_of(source).items() if name.startswith(("model.", "lm_head."))}
    together = _experts_together(tensors | draft_layers(tensors_of(source), config))
    if config["model_type"] in DELTA:
        together = delta_tensors(together, config)
    if config["model_type"] in MAMBA:
        together = mamba_tensors(together, config)
    if config["model_type"] == "kimi_linear":
        together = kimi_tensors(together)
    if config["model_type"].startswith("lfm2"):
        together = {
            name: tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor for name, tensor in together.items()
        }
    if config["model_type"] == "gemma4_text":
        together = _gates_with_ups(together)
    for name, tensor in _heads_apart(together, config).items():
        num_heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        short = gguf_name(name, config["model_type"])
        has_offset = config["model_type"] in ("gemma2", "gemma3_text", *DELTA)
        if has_offset and name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight"):
            tensor = tensor + np.float32(1)
        is_permuted = config["model_type"] in _PERMUTED and num_heads is not None
        raw, kind = encode(short, permuted(tensor, config[num_heads]) if is_permuted and num_heads else tensor)
        writer.add_tensor(short, raw, raw_dtype=kind)
        worth[name] = gguf.quants.dequantize(encode(short, tensor)[0], kind)
    rope = full_rope(config)
    if rope["rope_type"] == "proportional":
        dim = config["global_head_dim"]
        rotated = int(dim * rope["partial_rotary_factor"] / 2)
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (dim // 2 - rotated), np.float32))
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config, rope))
    for kind in ("long", "short") if rope["rope_type"] == "longrope" else ():
        writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
    write(writer)
    return worth


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the text model; the file of a model that takes pictures names the whole model's type, except for
    Mistral Small 3."""
    text = config.get("text_config", config)
    is_mistral = config["model_type"] == "mistral3"
    return text | {"model_type": "ministral3" if is_mistral else config["model_type"]}


def full_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rope parameters of layers without a window."""
    if config["model_type"] == "gpt_oss":
        return {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    if config["model_type"] == "gemma4_text" and "rope_parameters" not in config:
        return {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
    theta = config.get("rope_theta", 1e6 if config["model_type"].startswith("lfm2") else 1e4)
    older = {"rope_type": "default", "rope_theta": theta, **config.get("rope_scaling", {})}
    rope: dict[str, Any] = config.get("rope_parameters", older)
    return rope.get("full_attention", rope)


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shape_writer(path: Path, config: dict[str, Any], tensors_per_part: int = 0) -> gguf.GGUFWriter:
    name = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, name, split_max_tensors=tensors_per_part)
    writer.add_context_length(config.get("max_position_embeddings", config.get("model_max_length")))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"] + _num_drafts(config))
    if _num_drafts(config):
        writer.add_nextn_predict_layers(_num_drafts(config))
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if config["num_key_value_heads"]:
        writer.add_head_count_kv(config["num_key_value_heads"])
    if "rms_norm_eps" in config or "norm_eps" in config:
        writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", config.get("norm_eps")))
    else:
        writer.add_layer_norm_eps(config.get("layer_norm_eps", config.get("norm_epsilon")))
    if config["model_type"] in (*DELTA, "lfm2", "lfm2_moe", "kimi_linear", *MAMBA):
        add_shape(writer, config)
    rope = full_rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config["model_type"] == "gemma2":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_attn_logit_softcapping(config.get("attn_logit_softcapping", 50.0))
        writer.add_final_logit_softcapping(config.get("final_logit_softcapping", 30.0))
    if config["model_type"] == "phi3":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if config["model_type"] in ("glm4", "glm4_moe"):
        writer.add_rope_dimension_count(config["head_dim"] // 2)
    if config["model_type"] == "minimax_m2":
        writer.add_rope_dimension_count(config["rotary_dim"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config["model_type"] == "olmo3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([(layer + 1) % 4 != 0 for layer in range(config["num_hidden_layers"])])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        writer.add_rope_freq_base_swa(500_000.0)
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if config["model_type"] in ("qwen3_vl", "qwen3_vl_moe"):
        writer.add_num_deepstack_layers(3)
    if config["model_type"] == "exaone4":
        writer.add_sliding_window(config["sliding_window"])
        layers = range(1, config["num_hidden_layers"] + 1)
        writer.add_sliding_window_pattern([index % config["sliding_window_pattern"] != 0 for index in layers])
    if config["model_type"] in ("granite", "granitemoeshared", "granitemoehybrid"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config.get("embedding_multiplier", 1.0))
        writer.add_residual_scale(config.get("residual_multiplier", 1.0))
        writer.add_logit_scale(config["logits_scaling"])
    if config["model_type"] in ("cohere", "cohere2"):
        writer.add_logit_scale(config["logit_scale"])
    if config["model_type"] == "cohere2":
        writer.add_sliding_window(config["sliding_window"])
        layers = range(1, config["num_hidden_layers"] + 1)
        writer.add_sliding_window_pattern([index % config["sliding_window_pattern"] != 0 for index in layers])
    if config["model_type"] in ("granitemoeshared", "granitemoehybrid"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if config["model_type"] == "qwen2_moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config["model_type"] == "llama4_text":
        writer.kv_data[0].pop("llama4.feed_forward_length")
        writer.add_feed_forward_length(config["intermediate_size_mlp"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    if config["model_type"] == "ministral3" and rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if config["model_type"] in ("mixtral", "granitemoeshared", "llama4_text", "minimax_m2") or config.get("num_local_experts"):
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "gpt_oss":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config["model_type"] == "gemma4_text":
        _add_gemma4(writer, config)
    if config["model_type"] in _WITH_LATENTS:
        _add_latents(writer, config)
    if config["model_type"] in (*_WITH_LATENTS, "glm4_moe"):
        _add_grouped_experts(writer, config)
    if config["model_type"] in ("qwen3_moe", "qwen3_vl_moe"):
        writer.add_expert_count(config.get("num_local_experts", config.get("num_experts")))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] == "ernie4_5_moe":
        writer.add_expert_count(config["moe_num_experts"])
        writer.add_expert_used_count(config["moe_k"])
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
        # what the converter makes of it, which is nothing's length
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])
    return writer


def _num_drafts(config: dict[str, Any]) -> int:
    """Return the number of MTP layers that the converter writes: of GLM and Qwen, not of DeepSeek."""
    return config.get("num_nextn_predict_layers", 0) if config["model_type"] in ("glm4_moe", "glm4_moe_lite", *DELTA) else 0


def _add_latents(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    for key in ("attention.head_count_kv", "attention.key_length", "attention.value_length"):
        writer.kv_data[0].pop(f"deepseek2.{key}", None)
    latent, rotary, rope = config["kv_lora_rank"], config["qk_rope_head_dim"], full_rope(config)
    writer.add_head_count_kv(1)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotary)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotary)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    for key in ("feed_forward_length", "attention.head_count_kv", "attention.key_length", "attention.value_length"):
        writer.kv_data[0].pop(f"gemma4.{key}", None)
    every_sixth = [index % 6 != 5 for index in range(config["num_hidden_layers"])]
    is_local = [kind == "sliding_attention" for kind in config.get("layer_types", [])] or every_sixth
    is_local[-1] = False  # as transformers writes it
    num_shared, count, width = config.get("num_kv_shared_layers", 0), len(is_local), config["intermediate_size"]
    of_full = config.get("num_global_key_value_heads")
    of_layers = [dict(config.get("per_layer_config", {}).get(str(index), {})) for index in range(count)]
    if of_full is None:
        of_full = next((each["num_key_value_heads"] for each in of_layers if "num_key_value_heads" in each), None)
    kv_heads = config["num_key_value_heads"]
    writer.add_head_count_kv(kv_heads if of_full is None else [kv_heads if local else of_full for local in is_local])
    is_wide = config.get("use_double_wide_mlp", False)
    widths = [width * (2 if index >= count - num_shared else 1) for index in range(count)]
    writer.add_feed_forward_length(widths if is_wide else width)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(is_local)
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    for add, dim in (
        (writer.add_key_length, config["global_head_dim"]),
        (writer.add_value_length, config["global_head_dim"]),
        (writer.add_key_length_swa, config["head_dim"]),
        (writer.add_value_length_swa, config["head_dim"]),
        (writer.add_rope_dimension_count, config["global_head_dim"]),
        (writer.add_rope_dimension_count_swa, config["head_dim"]),
    ):
        add(dim)
    local_rope = config.get("rope_parameters", {}).get("sliding_attention", {})
    writer.add_rope_freq_base_swa(local_rope.get("rope_theta", 10_000.0))
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("enable_moe_block"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_grouped_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_leading_dense_block_count(config.get("first_k_dense_replace", int(config["model_type"] == "glm4_moe")))
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "routed_scaling_factor" in config:
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if "n_group" in config:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    elif config["model_type"] != "deepseek_v2":
        writer.add_expert_weights_norm(config.get("norm_topk_prob", True))
        if config["model_type"] == "glm4_moe":  # that of GLM-4.7-Flash is in no file
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    elif "n_group" in config:  # older files do not say
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)


def _heads_apart(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors as the converter stores keys and values of latents, without drafts. Older converters stored them
    whole: here the first layer's."""
    if config["model_type"] not in (*_WITH_LATENTS, "kimi_linear"):
        return tensors
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if name.startswith(f"model.layers.{config['num_hidden_layers']}.") and not _num_drafts(config):
            continue
        if name.endswith("kv_b_proj.weight") and ".0." not in name:
            heads = tensor.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
            keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
            found[name.replace("kv_b_proj", "k_b")] = np.ascontiguousarray(keys.swapaxes(1, 2))
            found[name.replace("kv_b_proj", "v_b")] = np.ascontiguousarray(values)
        else:
            found[name] = tensor
    return found


_MIXTRAL = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}


def _experts_together(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors as the converter stores them: a layer's experts as one tensor for each of their matrices, a correction
    as a vector, and no drafts."""
    found: dict[str, np.ndarray] = {}
    tensors = dict(entry for name, tensor in tensors.items() for entry in _gpt_oss_parts(name, tensor))
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        for published, common in _MIXTRAL.items():
            name = name.replace(published, common)
        match = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(.*)", name)
        if match:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        elif not name.startswith("model.mtp_"):
            found[name] = tensor.reshape(-1) if name.endswith("e_score_correction_bias") else tensor
    return found | {name: np.stack([parts[index] for index in sorted(parts)]) for name, parts in experts.items()}


def _gates_with_ups(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join the two projections of all experts of a layer."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([tensor, up], axis=1)
        elif not name.endswith(".experts.up_proj.weight"):
            found[name] = tensor
    return found


def _gpt_oss_parts(name: str, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors that the converter makes of one of gpt-oss."""
    match = re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?", name)
    if match is None:
        yield name.replace(".mlp.router.", ".mlp.gate.") + (".weight" if name.endswith(".sinks") else ""), tensor
        return
    whole, suffix = (tensor, "bias") if match[3] else (tensor.swapaxes(1, 2), "weight")
    parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    for index, part in enumerate(parts):
        yield f"{match[1]}.{part}.{suffix}", np.ascontiguousarray(whole[:, index :: len(parts)])


def llama3_factors(config: dict[str, Any], rope: dict[str, Any]) -> np.ndarray:
    """Return the factors that llama.cpp's converter computes."""
    dim, factors = config["head_dim"], []
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    length = rope["original_max_position_embeddings"]
    for frequency in (rope["rope_theta"] ** -(place / dim) for place in range(0, dim, 2)):
        wavelength = 2 * np.pi / frequency
        if wavelength < length / high:
            factors.append(1.0)
        elif wavelength > length / low:
            factors.append(rope["factor"])
        else:
            smooth = (length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value; __ in `key` becomes a dot."""
    key = key.replace("__", ".")
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def byte_level_metadata(tokenizer: Tokenizer, rule: str) -> dict[str, Any]:
    """Return the converter's metadata of a byte-level BPE: added tokens beside the others, ids without a token filled up."""
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens, types = [], []
    for token_id in range(max(vocabulary) + 3):
        tokens.append(vocabulary.get(token_id, f"[PAD{token_id}]"))
        if token_id in added:
            types.append(CONTROL if added[token_id].special else USER_DEFINED)
        else:
            types.append(NORMAL if token_id in vocabulary else UNUSED)
    return {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": rule,
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__token_type": types,
        "tokenizer__ggml__merges": [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]],
    }


def original_metadata(source: Path) -> dict[str, Any]:
    """Return the tokenizer.json of `source` unchanged, and the metadata that the converter stores beside it."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    merges = byte_level_metadata(tokenizer, "unknown")
    del merges["tokenizer__ggml__merges"]
    return {
        **merges,
        "tokenizer__huggingface__json": (source / "tokenizer.json").read_text(),
        "tokenizer__chat_template": (source / "chat_template.jinja").read_text(),
        "tokenizer__ggml__eos_token_id": 2,
        "tokenizer__ggml__padding_token_id": 0,
    }
