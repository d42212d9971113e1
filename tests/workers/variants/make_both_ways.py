"""Writes `both_ways.json`: decoders that attend both ways, each with the mean of its hidden states by transformers 5.23 (torch
and transformers are not needed to run the tests):

python -m tests.workers.variants.make_both_ways
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModel

from tests.workers.variants.make import values_of
from tests.workers.variants.make_seeing import write

TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
}
GEMMA = {"model_type": "gemma3_text", "architectures": ["Gemma3TextModel"], **TEXT, "use_bidirectional_attention": True}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **TEXT, "is_causal": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3_text, windows of 4": {**GEMMA, "head_dim": 20, "sliding_window": 7, "sliding_window_pattern": 2},
    "gemma3_text, wide windows, one KV head": {**GEMMA, "head_dim": 16, "sliding_window": 256, "num_key_value_heads": 1},
    "qwen2 without windows": QWEN2,
    "qwen2 with windows": {**QWEN2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "llama": {"model_type": "llama", "architectures": ["LlamaModel"], **TEXT, "is_causal": False},
}
PROMPT_LENGTH = 45


def expected_of(config: dict[str, Any]) -> dict[str, Any]:
    plain = AutoConfig.for_model(**json.loads(json.dumps(config)))
    model = AutoModel.from_config(plain, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(values_of(f"model.{name}", tuple(parameter.shape), config).copy()))
    prompt = np.random.default_rng(1).integers(3, config["vocab_size"], PROMPT_LENGTH).tolist()
    with torch.no_grad():
        hidden = model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
    mean = [round(float(value), 6) for value in hidden.mean(0)]
    return {"config": config, "prompt_token_ids": prompt, "mean": mean}


if __name__ == "__main__":
    write("both_ways.json", {name: expected_of(config) for name, config in CONFIGS.items()})
