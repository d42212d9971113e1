"""Adds results of new and changed configurations to `tests/golden/drawn/variants.json`, computed by transformers on torch
(neither is needed to run the tests):

python -m tests.workers.variants.make
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.paths import DRAWN
from tests.workers.variants import dequantized, joined, mxfp4, stacked, values

COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": 2,
}
UNPADDED = {**COMMON, "pad_token_id": None}
LLAMA = {**COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QWEN2 = {**COMMON, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**COMMON, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
PHI3 = {**UNPADDED, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "sliding_window": None}
SMOLLM3 = {**UNPADDED, "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 3}
GRANITE = {**UNPADDED, "model_type": "granite", "architectures": ["GraniteForCausalLM"]}
EXAONE4 = {**UNPADDED, "model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], "head_dim": 12, "sliding_window": 9}
GEMMA3 = {
    **{key: value for key, value in UNPADDED.items() if key != "hidden_act"},
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 20,
    "sliding_window": 9,
}
GEMMA2 = {
    **{key: value for key, value in UNPADDED.items() if key != "hidden_act"},
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 20,
    "sliding_window": 9,
}
GEMMA4 = {
    **{key: value for key, value in UNPADDED.items() if key != "hidden_act"},
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "head_dim": 12,
    "global_head_dim": 24,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 96,
}
OLMO2 = {**UNPADDED, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
GLM4_MOE = {
    **UNPADDED,
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
}
GPT_OSS = {
    **UNPADDED,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "swiglu_limit": 1.5,
}
ERNIE = {**COMMON, "model_type": "ernie4_5", "architectures": ["Ernie4_5ForCausalLM"], "head_dim": 16}

COHERE = {
    **{key: value for key, value in UNPADDED.items() if key != "rms_norm_eps"},
    "layer_norm_eps": 1e-5,
    "model_type": "cohere2",
    "architectures": ["Cohere2ForCausalLM"],
    "sliding_window": 9,
}
QWEN2_MOE = {
    **COMMON,
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_hidden_layers": 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
HUNYUAN = {**UNPADDED, "model_type": "hunyuan_v1_dense", "architectures": ["HunYuanDenseV1ForCausalLM"], "head_dim": 16}
STARCODER2 = {
    **{key: value for key, value in UNPADDED.items() if key not in ("rms_norm_eps", "hidden_act")},
    "model_type": "starcoder2",
    "architectures": ["Starcoder2ForCausalLM"],
    "norm_epsilon": 1e-5,
    "hidden_act": "gelu_pytorch_tanh",
}
GRANITEMOE = {
    **UNPADDED,
    "model_type": "granitemoe",
    "architectures": ["GraniteMoeForCausalLM"],
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "attention_multiplier": 0.25,
    "logits_scaling": 2.0,
}
LLAMA4 = {
    **UNPADDED,
    "model_type": "llama4_text",
    "architectures": ["Llama4ForCausalLM"],
    "num_hidden_layers": 4,
    "head_dim": 12,
    "intermediate_size": 20,
    "intermediate_size_mlp": 36,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "rope_theta": 500000.0,
}
QWEN3_NEXT = {
    **UNPADDED,
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
QWEN3_5 = {
    **{key: value for key, value in QWEN3_NEXT.items() if "expert" not in key and key != "moe_intermediate_size"},
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
}
KIMI_LINEAR = {
    **{key: value for key, value in UNPADDED.items() if key != "max_position_embeddings"},
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
        "num_heads": 4,
        "head_dim": 12,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 512,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 20,
    "num_shared_experts": 1,
}
LFM2 = {
    **{key: value for key, value in UNPADDED.items() if key not in ("rms_norm_eps", "hidden_act")},
    "model_type": "lfm2",
    "architectures": ["Lfm2ForCausalLM"],
    "num_hidden_layers": 4,
    "norm_eps": 1e-5,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
LFM2_MOE = {
    **{key: value for key, value in LFM2.items() if not key.startswith("block")},
    "model_type": "lfm2_moe",
    "architectures": ["Lfm2MoeForCausalLM"],
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}
GRANITE_HYBRID = {
    **UNPADDED,
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 20,
    "shared_intermediate_size": 28,
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
NEMOTRON_H = {
    **{name: value for name, value in UNPADDED.items() if name not in ("num_hidden_layers", "rms_norm_eps", "hidden_act")},
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe", "mlp"],
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 10,
    "n_groups": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
    "use_mamba_kernels": False,
}
BAMBA = {
    **UNPADDED,
    "model_type": "bamba",
    "architectures": ["BambaForCausalLM"],
    "num_hidden_layers": 4,
    "attn_layer_indices": [2],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
}
MAMBA2 = {
    "model_type": "mamba2",
    "architectures": ["Mamba2ForCausalLM"],
    **{
        name: UNPADDED[name]
        for name in ("vocab_size", "hidden_size", "hidden_act", "bos_token_id", "eos_token_id", "pad_token_id")
    },
    "num_hidden_layers": 3,
    "num_heads": 6,
    "head_dim": 16,
    "state_size": 12,
    "n_groups": 2,
}
FALCON_H1 = {
    **UNPADDED,
    "model_type": "falcon_h1",
    "architectures": ["FalconH1ForCausalLM"],
    "num_hidden_layers": 3,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.6, 1.4, 0.9, 1.2, 0.8],
    "mlp_multipliers": [0.9, 0.6],
}
MINISTRAL3 = {**UNPADDED, "model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"], "head_dim": 12}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama multi-head, odd sizes, gelu": {
        **LLAMA,
        "hidden_size": 30,
        "intermediate_size": 37,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-3,
        "vocab_size": 89,
    },
    "llama multi-query, biases, wide heads, tied": {
        **LLAMA,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "llama linear, older style": {**LLAMA, "rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "llama llama3, older style": {
        **LLAMA,
        "rope_theta": 1000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama yarn": {
        **LLAMA,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama yarn, every option, older style": {
        **LLAMA,
        "rope_theta": 500.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 24,
            "beta_fast": 8,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "truncate": False,
        },
    },
    "llama yarn, attention factor": {
        **LLAMA,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.5,
        },
    },
    "llama dynamic, within its length": {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
    "llama dynamic, growing beyond its length": {
        **LLAMA,
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "factor": 3.0,
        },
    },
    "qwen2 sliding windows by layer index": {
        **QWEN2,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen2 sliding windows off": {
        **QWEN2,
        "use_sliding_window": False,
        "sliding_window": 8,
        "max_window_layers": 0,
        "tie_word_embeddings": True,
    },
    "qwen3 sliding windows by layer type, biases": {
        **QWEN3,
        "use_sliding_window": True,
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_bias": True,
    },
    "qwen3 yarn, tied": {
        **QWEN3,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 40,
        },
        "rope_theta": 1000000.0,
    },
    "ernie4_5 biases, multi-query, untied": {
        **ERNIE,
        "use_bias": True,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "tie_word_embeddings": False,
        "rope_theta": 500000.0,
    },
    "ernie4_5 linear": {
        **ERNIE,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "mistral windows in all layers": {
        **UNPADDED,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "head_dim": 20,
        "sliding_window": 7,
    },
    "mistral without windows, untied, one KV head": {
        **UNPADDED,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "num_key_value_heads": 1,
        "sliding_window": None,
        "rope_theta": 1000000.0,
    },
    "phi3 windows": {**PHI3, "sliding_window": 9, "num_key_value_heads": 4},
    "phi3 long context, part of each head rotated": {
        **PHI3,
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.5, 4.0]},
    },
    "phi3 longrope within its length": {
        **PHI3,
        "original_max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5],
            "long_factor": [1.5, 2.5, 4.0, 5.0, 6.0, 7.0],
        },
    },
    "smollm3 every second layer unrotated, biases": {
        **SMOLLM3,
        "no_rope_layer_interval": 2,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "smollm3 listed layers, windows where nothing is rotated": {
        **SMOLLM3,
        "no_rope_layers": [0, 1, 1],
        "use_sliding_window": True,
        "sliding_window": 6,
        "tie_word_embeddings": False,
    },
    "smollm3": {**SMOLLM3, "num_hidden_layers": 4, "rope_theta": 500000.0},
    "granite multipliers": {
        **GRANITE,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.09,
        "tie_word_embeddings": True,
    },
    "granite defaults, biases": {**GRANITE, "attention_bias": True, "mlp_bias": True},
    "seed_oss": {
        **UNPADDED,
        "model_type": "seed_oss",
        "architectures": ["SeedOssForCausalLM"],
        "head_dim": 16,
        "attention_out_bias": True,
    },
    "exaone4 local layers rotated, global ones not": {**EXAONE4, "num_hidden_layers": 3, "sliding_window_pattern": 2},
    "exaone4 without windows": {
        **EXAONE4,
        "sliding_window": None,
        "sliding_window_pattern": 0,
        "layer_types": ["full_attention"] * 2,
    },
    "gemma3_text": {**GEMMA3, "num_hidden_layers": 3, "sliding_window_pattern": 3},
    "gemma3_text linear, another scale, listed layers": {
        **GEMMA3,
        "layer_types": ["full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 7,
        "rope_local_base_freq": 500.0,
        "rope_theta": 20000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "gemma2": {**GEMMA2, "num_hidden_layers": 3, "query_pre_attn_scalar": 20},
    "gemma2 other caps and scale, all layers alike": {
        **GEMMA2,
        "layer_types": ["full_attention", "full_attention"],
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 5,
        "tie_word_embeddings": False,
    },
    "gemma2 without caps": {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma4_text inputs of each layer, shared keys, wide MLP": {
        **GEMMA4,
        "num_hidden_layers": 7,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
            *["sliding_attention"] * 3,
        ],
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 10,
        "final_logit_softcapping": 2.0,
    },
    "gemma4_text keys as values": {
        **GEMMA4,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "attention_bias": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 20000.0},
        },
        "use_bidirectional_attention": "vision",
        "tie_word_embeddings": False,
    },
    "gemma4_text experts beside an MLP, odd head sizes": {
        **GEMMA4,
        "num_hidden_layers": 3,
        "head_dim": 10,
        "global_head_dim": 16,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
        "per_layer_config": {"2": {"head_dim": 16, "num_key_value_heads": 4}},
    },
    "olmo2 biases": {**OLMO2, "attention_bias": True},
    "olmo2 odd width": {**OLMO2, "hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3},
    "olmo3 windows, yarn in the other layers": {
        **OLMO2,
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "num_hidden_layers": 4,
        "sliding_window": 9,
        "rope_theta": 20000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.2},
    },
    "mixtral windows": {
        **UNPADDED,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 9,
    },
    "minimax_m2": {
        **UNPADDED,
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": 16,
        "rotary_dim": 8,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_theta": 5000000.0,
    },
    "glm4_moe head norms, groups": {
        **GLM4_MOE,
        "use_qk_norm": True,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "glm4_moe biases, all layers sparse, plain weights": {
        **GLM4_MOE,
        "attention_bias": True,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
    },
    "minimax_m2 heads of 9": {
        **UNPADDED,
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": 9,
        "rotary_dim": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
    },
    "deepseek_v2 MLP biases, normalization that is not applied": {
        **UNPADDED,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 10,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 20,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "mlp_bias": True,
        "norm_topk_prob": True,
    },
    "deepseek_v2": {
        **UNPADDED,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.3,
    },
    "deepseek_v2 groups": {
        **UNPADDED,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 16,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.5,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "glm4_moe_lite": {
        **{key: value for key, value in GLM4_MOE.items() if key != "head_dim"},
        "model_type": "glm4_moe_lite",
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 16,
        "mlp_layer_types": ["sparse", "dense"],
    },
    "gpt_oss": {**GPT_OSS, "swiglu_limit": 7.0},
    "gpt_oss yarn truncated, one KV head, wide heads, tied, long window": {
        **GPT_OSS,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "sliding_window": 100,
        "tie_word_embeddings": True,
        "rope_theta": 1000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": True},
    },
    "gpt_oss without biases of attention, other gate, listed layers": {
        **GPT_OSS,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "attention_bias": False,
        "swiglu_alpha": 1.1,
        "num_experts_per_tok": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gpt_oss mxfp4": {
        **GPT_OSS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    },
    "glm4": {
        **UNPADDED,
        "model_type": "glm4",
        "architectures": ["Glm4ForCausalLM"],
        "head_dim": 24,
    },
    "qwen2_moe": QWEN2_MOE,
    "qwen2_moe dense layers, windows": {
        **QWEN2_MOE,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
    },
    "qwen2_moe every second layer sparse, normalized, no biases": {
        **QWEN2_MOE,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
        "qkv_bias": False,
        "tie_word_embeddings": True,
    },
    "cohere2": {**COHERE, "num_hidden_layers": 3, "sliding_window_pattern": 2, "logit_scale": 0.6},
    "cohere2 biases, untied, listed layers": {
        **COHERE,
        "layer_types": ["full_attention", "sliding_attention"],
        "attention_bias": True,
        "tie_word_embeddings": False,
        "num_key_value_heads": 1,
        "logit_scale": 1.0,
    },
    "cohere norms of heads": {
        **{key: value for key, value in COHERE.items() if key != "sliding_window"},
        "model_type": "cohere",
        "architectures": ["CohereForCausalLM"],
        "use_qk_norm": True,
        "logit_scale": 0.5,
        "rope_theta": 10000.0,
    },
    "cohere": {
        **{key: value for key, value in COHERE.items() if key != "sliding_window"},
        "model_type": "cohere",
        "architectures": ["CohereForCausalLM"],
        "logit_scale": 0.5,
    },
    "hunyuan_v1_dense": {**HUNYUAN, "attention_bias": True, "tie_word_embeddings": True},
    "hunyuan_v1_dense scaled base": {
        **HUNYUAN,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0},
    },
    "starcoder2": STARCODER2,
    "starcoder2 windows": {**STARCODER2, "sliding_window": 9, "num_key_value_heads": 1},
    "starcoder2 without biases, untied, plain gelu": {
        **STARCODER2,
        "use_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "gelu",
        "intermediate_size": 37,
    },
    "granitemoe": {**GRANITEMOE, "embedding_multiplier": 3.0, "residual_multiplier": 0.3},
    "granitemoeshared": {
        **GRANITEMOE,
        "model_type": "granitemoeshared",
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "shared_intermediate_size": 28,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "ministral3 scaled queries, yarn": {
        **MINISTRAL3,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
        },
    },
    "qwen3_next": QWEN3_NEXT,
    "qwen3_next one value head for each key head, dense layer, recurrent last": {
        **QWEN3_NEXT,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 3,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
    "qwen3_5": QWEN3_5,
    "qwen3_5 tied, one KV head, odd sizes": {
        **QWEN3_5,
        "hidden_size": 42,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 9,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "linear_conv_kernel_dim": 2,
        "tie_word_embeddings": True,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    },
    "qwen3_5_moe": {
        **{key: value for key, value in QWEN3_NEXT.items() if key != "intermediate_size"},
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
    },
    "kimi_linear": KIMI_LINEAR,
    "kimi_linear compressed queries, groups, dense layers, recurrent last": {
        **{key: value for key, value in KIMI_LINEAR.items() if key != "linear_attn_config"},
        "num_hidden_layers": 3,
        "q_lora_rank": 16,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "linear_conv_kernel_dim": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "num_expert_group": 4,
        "topk_group": 2,
        "moe_renormalize": False,
        "routed_scaling_factor": 1.5,
        "num_shared_experts": 2,
        "attention_bias": True,
    },
    "lfm2": LFM2,
    "lfm2 biases, untied, adjusted width, longer kernel, convolution last": {
        **LFM2,
        "num_hidden_layers": 3,
        "full_attn_idxs": [0],
        "layer_types": None,
        "conv_bias": True,
        "conv_L_cache": 5,
        "tie_word_embeddings": False,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.3,
        "num_key_value_heads": 1,
    },
    "lfm2_moe": LFM2_MOE,
    "lfm2_moe without a correction, scaled": {
        **LFM2_MOE,
        "use_expert_bias": False,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
        "num_dense_layers": 0,
    },
    "granitemoehybrid": GRANITE_HYBRID,
    "granitemoehybrid no experts, rotated, biases, groups, limits of time steps, odd sizes": {
        **{name: value for name, value in GRANITE_HYBRID.items() if "expert" not in name},
        "hidden_size": 42,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_local_experts": 0,
        "tie_word_embeddings": True,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "position_embedding_type": "rope",
        "attention_bias": True,
        "mamba_n_heads": 6,
        "mamba_n_groups": 3,
        "mamba_d_state": 7,
        "mamba_d_conv": 3,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "hidden_act": "gelu",
        "time_step_limit": [0.6, 0.9],
    },
    "nemotron_h": NEMOTRON_H,
    "nemotron_h pattern of letters, latent experts in groups, biases, attention last": {
        **{name: value for name, value in NEMOTRON_H.items() if name != "layers_block_type"},
        "hybrid_override_pattern": "EM-EM*",
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "mamba_num_heads": 3,
        "n_groups": 1,
        "use_bias": True,
        "use_conv_bias": False,
        "mlp_bias": True,
        "moe_latent_size": 22,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
        "mlp_hidden_act": "silu",
        "time_step_min": 0.6,
    },
    "bamba": BAMBA,
    "bamba tied, biases, one group, attention first": {
        **BAMBA,
        "num_hidden_layers": 3,
        "attn_layer_indices": [0],
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "mamba_n_groups": 1,
        "mamba_n_heads": 6,
        "mamba_expand": 1,
        "mamba_d_conv": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
    },
    "mamba2": MAMBA2,
    "mamba2 tied, biases, one group, odd sizes": {
        **MAMBA2,
        "hidden_size": 42,
        "num_heads": 7,
        "head_dim": 6,
        "expand": 1,
        "n_groups": 1,
        "state_size": 9,
        "conv_kernel": 2,
        "use_bias": True,
        "use_conv_bias": False,
        "tie_word_embeddings": True,
    },
    "falcon_h1": FALCON_H1,
    "falcon_h1 norm after the gate, one group, biases, odd sizes, default factors": {
        **{name: value for name, value in FALCON_H1.items() if "multiplier" not in name},
        "hidden_size": 42,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "mamba_d_ssm": None,
        "mamba_n_heads": 6,
        "mamba_n_groups": 1,
        "mamba_d_conv": 3,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama4_text": LLAMA4,
    "llama4_text chunks, scaled queries, two experts": {
        **LLAMA4,
        "num_hidden_layers": 3,
        "attention_chunk_size": 17,
        "no_rope_layers": [1, 0, 1],
        "floor_scale": 8,
        "attn_scale": 0.4,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "llama4_text llama3, one factor for low and high frequencies": {
        **LLAMA4,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 16,
        },
    },
    "glm4 without biases, wholly rotated": {
        **UNPADDED,
        "model_type": "glm4",
        "architectures": ["Glm4ForCausalLM"],
        "head_dim": 12,
        "attention_bias": False,
        "partial_rotary_factor": 1.0,
    },
}
# names of transformers' parameters -> ours
RENAMES = {
    ".block_sparse_moe.": ".mlp.",
    ".feed_forward.": ".mlp.",
    ".mlp.router.": ".mlp.gate.",
    ".router.proj.": ".mlp.gate.",
    ".mlp.shared_expert.": ".mlp.shared_experts.",
    ".shared_mlp.output_linear.": ".mlp.shared_experts.down_proj.",
    "backbone.": "model.",
    "model.embeddings.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
    "model.final_layernorm.": "model.norm.",
    ".mlp.w1.": ".mlp.gate_proj.",
    ".mlp.w2.": ".mlp.down_proj.",
    ".mlp.w3.": ".mlp.up_proj.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".self_attn.forget_gate.": ".self_attn.",
    "model.embedding_norm.": "model.norm.",
}
PROMPT_LENGTH = 60
NUM_OUTPUTS = 12


def correction_buffers(model: Any) -> list[tuple[str, Any]]:
    return [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if name.endswith(("e_score_correction_bias", "layer_scalar", "expert_bias"))
    ]


def values_of(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> np.ndarray:
    """Return the values of a parameter of transformers, which has the experts of a layer as one."""
    if config["model_type"] == "gpt_oss":
        return values_of_gpt_oss(name, shape, "quantization_config" in config)
    if name.endswith(".self_attn.conv1d.weight"):  # Kimi Linear stores it in three parts
        own = (shape[0] // 3, *shape[1:])
        return np.concatenate([values(name.replace("conv1d", f"{part}_conv1d"), own) for part in "qkv"])
    if config["model_type"].startswith(("qwen3_next", "qwen3_5")) and re.search("q_proj|in_proj_(qkvz|ba)", name):
        return joined(name, shape, values, config)
    if re.search(r"\.(mamba|mixer)\.in_proj\.", name):
        num_steps = next(config[each] for each in ("mamba_n_heads", "mamba_num_heads", "num_heads") if each in config)
        name = re.sub(r".*(\.layers\.\d+)\.(mamba|mixer)", r"model\1.mamba", name)
        rows, other = (shape[0] - num_steps, *shape[1:]), name.replace(".in_proj.", ".dt_proj.")
        return np.concatenate([values(name, rows), values(other, (num_steps, *shape[1:]))])
    is_turned = config["model_type"] == "llama4_text"  # experts as [in, out]
    if config["model_type"].startswith("gemma4"):
        name = re.sub(r"(layer_scalar|router\.scale)$", r"\1.weight", name.replace(".experts.", ".mlp.experts."))
    for theirs, ours in RENAMES.items():
        name = name.replace(theirs, ours)
    name = re.sub(r"\.mixer\.(conv1d|A_log|D|dt_bias|norm|out_proj)\b", r".mamba.\1", name)
    name = re.sub(r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1.", name).replace(".mixer.", ".mlp.")
    if name.endswith(".shared_mlp.input_linear.weight"):
        prefix = name.replace(".shared_mlp.input_linear.weight", ".mlp.shared_experts")
        own = (shape[0] // 2, shape[1])
        return np.concatenate([values(f"{prefix}.{each}.weight", own) for each in ("gate_proj", "up_proj")])
    prefix, _, part = name.rpartition(".experts.")
    if part not in ("gate_up_proj", "up_proj", "down_proj"):
        return values(name, shape)
    names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    width, inputs = shape[:0:-1] if is_turned else shape[1:]
    own = (width // len(names), inputs)
    experts = [[values(f"{prefix}.experts.{index}.{each}.weight", own) for each in names] for index in range(shape[0])]
    found = np.stack([np.concatenate(parts) for parts in experts])
    return found.swapaxes(1, 2) if is_turned else found


def values_of_gpt_oss(name: str, shape: tuple[int, ...], is_packed: bool) -> np.ndarray:
    """Return the same for gpt-oss, with experts as MXFP4 represents them if `is_packed`."""
    found = stacked(name, shape, values)
    return dequantized(*mxfp4(found.swapaxes(1, 2))).swapaxes(1, 2) if is_packed and found.ndim == 3 else found


def expected_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return greedy tokens, token by token with a cache, and the 3 best log-probabilities of each."""
    plain = AutoConfig.for_model(**json.loads(json.dumps(config)))
    model = AutoModelForCausalLM.from_config(plain, attn_implementation="eager", experts_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *correction_buffers(model)):
            parameter.copy_(torch.from_numpy(values_of(name, tuple(parameter.shape), config).copy()))
    model.tie_weights()
    prompt = np.random.default_rng(1).integers(3, config["vocab_size"], PROMPT_LENGTH).tolist()
    tokens, tops, cache, new = [], [], None, prompt
    name_of_cache = "cache_params" if config["model_type"] == "mamba2" else "past_key_values"
    # with its cache transformers leaves out limits of time steps, and counts Bamba's positions from 0
    is_cached = config["model_type"] != "bamba" and not {"time_step_limit", "time_step_min"} & set(config)
    for _ in range(NUM_OUTPUTS):
        with torch.no_grad():
            own = torch.tensor(new if is_cached else prompt + tokens)[None]
            output = model(own, **{name_of_cache: cache}, use_cache=is_cached)
        cache = getattr(output, name_of_cache) if is_cached else None
        best = torch.log_softmax(output.logits[0, -1], -1).topk(3)
        tops.append([[int(index), round(float(value), 6)] for value, index in zip(*best, strict=True)])
        new = [tops[-1][0][0]]
        tokens += new
    return {"config": config, "prompt_token_ids": prompt, "greedy_token_ids": tokens, "top_logprobs": tops}


if __name__ == "__main__":
    place = DRAWN / "variants.json"
    stored = json.loads(place.read_text())
    results = {
        name: stored[name] if stored.get(name, {}).get("config") == config else expected_of(config)
        for name, config in CONFIGS.items()
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(result)}" for name, result in results.items())
    place.write_text("{\n" + lines + "\n}\n")
