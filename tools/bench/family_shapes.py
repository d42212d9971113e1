"""Writes a checkpoint with the shape of a published model, some with fewer layers, and random weights, for benchmarks:

python -m tools.bench.family_shapes gemma3-1b|ministral3-3b|gpt-oss-20b|glm4.5-air|qwen3.5-0.8b|lfm2-1.2b \
    DIRECTORY [--seed 0]

gpt-oss gets random MXFP4 experts in tensors named as in the published checkpoint.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.dense_shape import CHAT_TEMPLATE
from tools.bench.shape import write
from workers.weights.safetensors import SafetensorsFile, header_of

_SAME: dict[str, Any] = {
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "vocab_size": 262_144,
    },
    "ministral3-3b": {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "max_position_embeddings": 262_144,
        "num_attention_heads": 32,
        "num_hidden_layers": 4,  # of 26
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1_000_000.0,
            "rope_type": "yarn",
        },
        "tie_word_embeddings": True,
        "vocab_size": 131_072,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,  # of 24
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201_088,
    },
    "glm4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131_072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 2,  # of 46: a dense one and a sparse one
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151_552,
    },
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262_144,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000.0,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": 248_320,
    },
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": True,
        "block_dim": 2048,
        "block_ff_dim": 12288,  # adjusted: 8192
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "block_norm_eps": 1e-5,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 2048,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "hidden_size": 2048,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "num_attention_heads": 32,
        "num_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "tie_embedding": True,
        "vocab_size": 65_536,
    },
}


PUBLISHED_NAMES = {
    "lfm2": {
        "model.norm.": "model.embedding_norm.",
        ".o_proj.": ".out_proj.",
        ".mlp.gate_proj.": ".feed_forward.w1.",
        ".mlp.down_proj.": ".feed_forward.w2.",
        ".mlp.up_proj.": ".feed_forward.w3.",
    }
}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
_BLOCK, _FIRST_EXPONENT = 32, 118  # values of a block; of its scale, 2^(exponent - 127)


def packed_experts(layer: str, shape: dict[str, Any], rng: np.random.Generator) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield name, dtype and bits of a layer's experts. Blocks are [experts, outputs, blocks, 16], scales without the last."""
    num_experts, hidden, inner = (shape[name] for name in ("num_local_experts", "hidden_size", "intermediate_size"))
    for name, outputs, inputs in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        size = (num_experts, outputs, inputs // _BLOCK)
        yield f"{layer}.mlp.experts.{name}_blocks", "U8", rng.integers(0, 256, (*size, _BLOCK // 2), np.uint8)
        yield f"{layer}.mlp.experts.{name}_scales", "U8", rng.integers(_FIRST_EXPONENT, _FIRST_EXPONENT + 3, size, np.uint8)
        yield f"{layer}.mlp.experts.{name}_bias", "BF16", np.zeros((num_experts, outputs), np.uint16)


def pack(directory: Path, shape: dict[str, Any], seed: int) -> None:
    """Replace the experts of a checkpoint by random ones in MXFP4, and the other names by the published ones."""
    path = directory / "model.safetensors"
    tensors: dict[str, tuple[str, np.ndarray]] = {
        name.replace(".mlp.gate.", ".mlp.router.").replace("sinks.weight", "sinks"): (tensor.dtype, tensor.read_stored())
        for name, tensor in SafetensorsFile(path).tensors.items()
        if ".mlp.experts." not in name
    }
    rng = np.random.default_rng(seed)
    for layer in range(shape["num_hidden_layers"]):
        tensors |= {name: (kind, bits) for name, kind, bits in packed_experts(f"model.layers.{layer}", shape, rng)}
    with (directory / "packed").open("xb") as file:
        file.write(header_of(((name, kind, bits.shape) for name, (kind, bits) in tensors.items()), {"format": "pt"}))
        for _, bits in tensors.values():
            file.write(bits.tobytes())
    (directory / "packed").replace(path)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | MXFP4, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.family_shapes", description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    published = PUBLISHED_NAMES.get(shape["model_type"], {})
    write(options.directory, _SAME | shape, CHAT_TEMPLATE, options.seed, published=published)
    if shape["model_type"] == "gpt_oss":
        pack(options.directory, shape, options.seed)


if __name__ == "__main__":
    main()
