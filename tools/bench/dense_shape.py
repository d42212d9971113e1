"""Writes a checkpoint of Qwen3-0.6B's shape with random weights, for benchmarks:

python -m tools.bench.dense_shape DIRECTORY [--seed 0]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tools.bench.shape import write

NUM_LAYERS = 28
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": NUM_LAYERS,
    "num_attention_heads": 16,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.dense_shape", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    options = parser.parse_args()
    write(options.directory, CONFIG, CHAT_TEMPLATE, options.seed)


if __name__ == "__main__":
    main()
