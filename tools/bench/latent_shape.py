"""Writes a checkpoint of Moonlight-16B-A3B's shape, which has DeepSeek-V3's latent attention and mixtures, with fewer layers, a
vocabulary of 32,000 and random weights, for benchmarks:

python -m tools.bench.latent_shape DIRECTORY [--num-layers 3] [--query-rank N] [--seed 0]

llama.cpp supports queries without a rank only in models of 26 or 27 layers: to compare with it, use `--query-rank 1536`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tools.bench.dense_shape import CHAT_TEMPLATE
from tools.bench.shape import write

_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "kv_lora_rank": 512,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 16,
    "pad_token_id": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50_000.0,
    "routed_scaling_factor": 2.446,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 32_000,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.latent_shape", description=__doc__.partition(":")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--num-layers", type=int, default=3, metavar="N", help="the first is dense; default: %(default)s")
    parser.add_argument("--query-rank", type=int, metavar="N", help="of the queries' latent; default: they have none")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    options = parser.parse_args()
    config = _CONFIG | {"num_hidden_layers": options.num_layers, "q_lora_rank": options.query_rank}
    write(options.directory, config, CHAT_TEMPLATE, options.seed)


if __name__ == "__main__":
    main()
