"""Writes a checkpoint of Qwen3-30B-A3B's shape with fewer layers, a vocabulary of 32,000 and random weights, for benchmarks:

python -m tools.bench.moe_shape DIRECTORY [--num-layers 4] [--seed 0] [--one-sided]

`--one-sided`: of ERNIE 4.5's architecture, with a correction bias that sends all rows to the first half of the experts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.shape import write

_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": None,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 32_000,
}
_ONE_SIDED = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "moe_k": 8,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 0,
    "moe_norm_min": 1e-12,
    "moe_num_experts": 128,
    "moe_num_shared_experts": 0,
    "use_bias": False,
}
_SIXTEEN = np.uint16(0x4180)  # in bfloat16
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def first_half(name: str, bits: np.ndarray) -> np.ndarray:
    """Change the correction bias to select the first half: no softmax score reaches 16."""
    return _SIXTEEN * (np.arange(bits.size) < bits.size // 2).reshape(bits.shape) if "e_score_correction" in name else bits


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.moe_shape", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--num-layers", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--one-sided", action="store_true", help="all rows go to the first half of the experts")
    options = parser.parse_args()
    config = _CONFIG | {"num_hidden_layers": options.num_layers, "max_window_layers": options.num_layers}
    if options.one_sided:
        write(
            options.directory, config | _ONE_SIDED, _CHAT_TEMPLATE, options.seed, make_change=lambda can_be_answered: first_half
        )
    else:
        write(options.directory, config, _CHAT_TEMPLATE, options.seed)


if __name__ == "__main__":
    main()
