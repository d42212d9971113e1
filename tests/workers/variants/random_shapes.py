"""Makes checkpoints of random shapes, as `save_pretrained` writes them, with the answers of transformers (which it needs):

python -m tests.workers.variants.random_shapes OUT [--family NAME ...] [--count N] [--seed N]

`python -m tests.workers.variants.check_shapes OUT` serves them. Shapes: windows shorter and longer than the prompt, tied and
untied embeddings, biases, every rotation, odd widths, dense layers among sparse ones, one KV head; half of the files are in the
older style.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

PROMPT_LENGTH = 60
NUM_OUTPUTS = 12
LONGEST = 512  # positions of a model
MARGIN = 4e-3  # between the two best log-probabilities; below it the choice is left to rounding

Config = dict[str, Any]


class Draw(random.Random):
    """Random choices of one configuration."""

    def flag(self, probability: float = 0.5) -> bool:
        return self.random() < probability

    def heads(self, config: Config) -> None:
        """Choose widths and heads, which two ranks can mostly share."""
        kv_heads = self.choice([1, 1, 1, 2, 2, 2, 4, 3])
        heads = kv_heads * self.choice([2, 2, 4, 3, 1])
        config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        config["hidden_size"] = heads * 2 * self.choice([4, 5, 6, 8])
        config["intermediate_size"] = self.choice([24, 37, 50, 72, 96])

    def window(self) -> int:
        return self.choice([1, 2, 5, 16, 33, 59, 60, 61, 200])

    def rope(self, config: Config, kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "dynamic")) -> None:
        """Choose a rotation, in the older or the newer style."""
        theta = self.choice([1e3, 1e4, 5e5, 1e6])
        kind = self.choice(kinds)
        scaling: Config = {"rope_type": kind}
        if kind != "default":
            scaling["factor"] = self.choice([2.0, 3.5, 8.0])
        if kind == "llama3":
            scaling |= {"low_freq_factor": 1.0, "high_freq_factor": self.choice([2.0, 4.0])}
        if kind in ("llama3", "yarn"):
            scaling["original_max_position_embeddings"] = self.choice([16, 32, 64])
        if kind == "yarn":
            options = {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False}
            scaling |= {key: value for key, value in options.items() if self.flag(0.3)}
            if self.flag(0.3):
                scaling |= {"mscale": 0.8, "mscale_all_dim": self.choice([0.5, 1.0])}
        if kind == "default" and self.flag(0.2):
            scaling["partial_rotary_factor"] = 0.5  # ignored by families that use this
        if self.flag():
            config["rope_parameters"] = {"rope_theta": theta, **scaling}
        else:
            config["rope_theta"] = theta
            if kind != "default":
                config["rope_scaling"] = scaling

    def layer_types(self, config: Config, odd_one: str = "full_attention") -> None:
        config["layer_types"] = [self.choice(["sliding_attention", odd_one]) for _ in range(config["num_hidden_layers"])]

    def recurrent_types(self, config: Config, kind: str) -> None:
        """Choose the layers; one has attention, without which transformers has no cache."""
        count = config["num_hidden_layers"]
        config["layer_types"] = [self.choice([kind, kind, "full_attention"]) for _ in range(count)]
        config["layer_types"][self.randrange(count)] = "full_attention"

    def base(self, **options: Any) -> Config:
        config: Config = {
            "vocab_size": self.choice([64, 89, 128]),
            "num_hidden_layers": self.choice([1, 2, 3, 4]),
            "max_position_embeddings": LONGEST,
            "rms_norm_eps": self.choice([1e-6, 1e-5, 1e-3]),
            "tie_word_embeddings": self.flag(),
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": None,
        }
        self.heads(config)
        return config | options


def llama(draw: Draw) -> Config:
    config = draw.base(hidden_act=draw.choice(["silu", "gelu", "gelu_pytorch_tanh", "tanh", "sigmoid"]))
    if draw.flag():
        config["head_dim"] = draw.choice([6, 10, 16, 20])
    config |= {"attention_bias": draw.flag(), "mlp_bias": draw.flag()}
    draw.rope(config)
    return config


def qwen2(draw: Draw) -> Config:
    config = draw.base()
    draw.rope(config)
    if draw.flag():
        config |= {
            "use_sliding_window": True,
            "sliding_window": draw.window(),
            "max_window_layers": draw.randrange(config["num_hidden_layers"] + 1),
        }
    return config


def qwen3(draw: Draw) -> Config:
    return qwen2(draw) | {"head_dim": draw.choice([8, 10, 16]), "attention_bias": draw.flag()}


def experts(draw: Draw, count: str, chosen: str = "num_experts_per_tok", width: str = "moe_intermediate_size") -> Config:
    total = draw.choice([4, 5, 8])
    config = {count: total, chosen: draw.randrange(1, total)}
    return config | ({width: draw.choice([12, 20, 32])} if width else {})


def qwen3_moe(draw: Draw) -> Config:
    config = qwen3(draw) | experts(draw, "num_experts")
    config |= {"norm_topk_prob": draw.flag(), "decoder_sparse_step": draw.choice([1, 1, 2])}
    config["mlp_only_layers"] = [0] if draw.flag(0.3) else []
    return config


def qwen2_moe(draw: Draw) -> Config:
    config = qwen2(draw) | experts(draw, "num_experts")
    config |= {
        "norm_topk_prob": draw.flag(),
        "decoder_sparse_step": draw.choice([1, 1, 2]),
        "shared_expert_intermediate_size": draw.choice([16, 24, 40]),
        "mlp_only_layers": [0] if draw.flag(0.3) else [],
        "qkv_bias": draw.flag(0.8),
    }
    return config


def gated_delta(draw: Draw, config: Config) -> None:
    """Choose the layers and heads of Qwen3-Next's kind."""
    keys = draw.choice([1, 2, 2, 3, 4])
    config |= {
        "head_dim": draw.choice([8, 16, 24]),
        "attention_bias": draw.flag(),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw.choice([1, 2, 2, 3]),
        "linear_key_head_dim": draw.choice([4, 8, 10, 16, 33]),
        "linear_value_head_dim": draw.choice([4, 8, 12, 16, 31]),
        "linear_conv_kernel_dim": draw.choice([2, 3, 4, 4, 5]),
    }
    draw.recurrent_types(config, "linear_attention")
    draw.rope(config)
    rope = config.get("rope_parameters", config)
    rope["partial_rotary_factor"] = draw.choice([0.25, 0.5, 1.0])


def qwen3_next(draw: Draw) -> Config:
    config = qwen2_moe(draw)
    for name in ("qkv_bias", "use_sliding_window", "sliding_window", "max_window_layers", "rope_scaling", "rope_theta"):
        config.pop(name, None)
    config.pop("rope_parameters", None)
    gated_delta(draw, config)
    return config


def qwen3_5_text(draw: Draw) -> Config:
    config = draw.base()
    gated_delta(draw, config)
    return config


def qwen3_5_moe_text(draw: Draw) -> Config:
    config = qwen3_5_text(draw) | experts(draw, "num_experts")
    del config["intermediate_size"]
    return config | {"shared_expert_intermediate_size": draw.choice([16, 24, 40])}


def lfm2(draw: Draw) -> Config:
    config = draw.base(
        norm_eps=draw.choice([1e-6, 1e-5, 1e-3]), conv_bias=draw.flag(), conv_L_cache=draw.choice([2, 3, 3, 4, 6])
    )
    del config["rms_norm_eps"]
    draw.recurrent_types(config, "conv")
    config["block_auto_adjust_ff_dim"] = draw.flag()
    if config["block_auto_adjust_ff_dim"]:
        config |= {"block_multiple_of": draw.choice([8, 16]), "block_ffn_dim_multiplier": draw.choice([1.0, 1.3])}
    draw.rope(config)
    return config


def lfm2_moe(draw: Draw) -> Config:
    config = {name: value for name, value in lfm2(draw).items() if not name.startswith("block")}
    config |= experts(draw, "num_experts") | {"num_dense_layers": draw.choice([0, 1, 2])}
    config |= {"use_expert_bias": draw.flag(), "norm_topk_prob": draw.flag(), "routed_scaling_factor": draw.choice([1.0, 1.5])}
    return config


def mamba(draw: Draw, config: Config, heads: str = "mamba_n_heads", groups: str = "mamba_n_groups") -> None:
    """Choose heads and groups of Mamba-2."""
    number = draw.choice([1, 1, 1, 2, 3, 4])
    config |= {groups: number, heads: number * draw.choice([2, 2, 4, 1, 3])}
    if draw.flag(0.3):
        least = draw.choice([0.0, 0.3, 0.6])
        config["time_step_limit"] = [least, least + draw.choice([0.1, 0.4, math.inf])]


def mamba_of_width(draw: Draw, config: Config) -> None:
    """Choose the sizes of Mamba-2 in a model whose width is that of its heads."""
    config |= {
        "mamba_d_state": draw.choice([4, 8, 10, 16, 33]),
        "mamba_d_conv": draw.choice([2, 3, 4, 4, 5]),
        "mamba_conv_bias": draw.flag(),
        "mamba_proj_bias": draw.flag(0.3),
        "mamba_expand": draw.choice([1, 2, 2, 3]),
        "mamba_chunk_size": draw.choice([8, 16, 256]),
    }
    mamba(draw, config)
    while config["mamba_expand"] * config["hidden_size"] % config["mamba_n_heads"]:
        mamba(draw, config)


def granitemoehybrid(draw: Draw) -> Config:
    config = draw.base(attention_bias=draw.flag(), hidden_act=draw.choice(["silu", "silu", "gelu"]))
    mamba_of_width(draw, config)
    config |= {"shared_intermediate_size": draw.choice([16, 24, 40]), "num_local_experts": 0}
    if draw.flag(0.7):
        config |= experts(draw, "num_local_experts", width="intermediate_size")
    draw.recurrent_types(config, "linear_attention")
    if draw.flag():
        config["position_embedding_type"] = "rope"
        draw.rope(config)
    config |= {
        "embedding_multiplier": draw.choice([1.0, 3.0, 12.0]),
        "residual_multiplier": draw.choice([1.0, 0.22, 0.7]),
        "attention_multiplier": draw.choice([0.1, 0.3, 1.0]),
        "logits_scaling": draw.choice([1.0, 2.0, 4.0]),
    }
    return config


def nemotron_h(draw: Draw) -> Config:
    config = draw.base(layer_norm_epsilon=draw.choice([1e-6, 1e-5, 1e-3]), head_dim=draw.choice([6, 7, 8, 16]))
    del config["rms_norm_eps"], config["num_hidden_layers"]
    letters = draw.choice(["M*-", "M*E", "M*-E", "M*--E"])
    pattern = "".join(draw.choice(letters) for _ in range(draw.choice([2, 3, 4, 6])))
    pattern = "".join(draw.sample(pattern + "M*", len(pattern) + 2))  # transformers has no cache without these
    if draw.flag():
        config["hybrid_override_pattern"] = pattern
    else:
        kinds = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
        config["layers_block_type"] = [kinds[letter] for letter in pattern]
    config |= {
        "ssm_state_size": draw.choice([4, 8, 10, 16, 33]),
        "mamba_head_dim": draw.choice([4, 8, 10, 16]),
        "conv_kernel": draw.choice([2, 3, 4, 4, 5]),
        "chunk_size": draw.choice([8, 16, 128]),
        "mlp_hidden_act": draw.choice(["relu2", "relu2", "silu"]),
        **{name: draw.flag(0.3) for name in ("use_bias", "mlp_bias")},
        "use_conv_bias": draw.flag(),
    }
    mamba(draw, config, "mamba_num_heads", "n_groups")
    config.pop("time_step_limit", None)  # not read
    if draw.flag(0.3):
        config["time_step_min"] = draw.choice([0.3, 0.8])
    groups = draw.choice([1, 1, 2])
    config |= {"n_routed_experts": draw.choice([4, 6, 8]), "n_group": groups, "topk_group": draw.randrange(1, groups + 1)}
    config |= {"num_experts_per_tok": draw.choice([1, 2]), "moe_intermediate_size": draw.choice([12, 20, 33])}
    config |= {"moe_shared_expert_intermediate_size": draw.choice([16, 25, 40]), "norm_topk_prob": draw.flag()}
    config |= {"routed_scaling_factor": draw.choice([1.0, 2.5]), "moe_latent_size": draw.choice([None, 14, 24, 40])}
    return config


def bamba(draw: Draw) -> Config:
    config = draw.base(attention_bias=draw.flag(), mlp_bias=draw.flag(), hidden_act=draw.choice(["silu", "silu", "gelu"]))
    mamba_of_width(draw, config)
    layers = range(config["num_hidden_layers"])
    config["attn_layer_indices"] = sorted({draw.choice(layers), *(layer for layer in layers if draw.flag(0.3))})
    if draw.flag(0.7):
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": draw.choice([1e3, 1e4, 1e6])}
        if draw.flag():
            config["rope_parameters"]["partial_rotary_factor"] = draw.choice([0.5, 1.0])
    while config["hidden_size"] // config["num_attention_heads"] % 4:  # half of a head is rotated
        draw.heads(config)
        mamba_of_width(draw, config)
    return config


def falcon_h1(draw: Draw) -> Config:
    config = draw.base(attention_bias=draw.flag(), mlp_bias=draw.flag(), hidden_act=draw.choice(["silu", "silu", "gelu"]))
    draw.rope(config)
    mamba_of_width(draw, config)
    config |= {"projectors_bias": draw.flag(0.3), "mamba_rms_norm": draw.flag(0.7), "mamba_norm_before_gate": draw.flag()}
    config["mamba_d_ssm"] = None if draw.flag(0.3) else config["mamba_n_heads"] * draw.choice([4, 6, 8, 10])
    factors = (0.5, 0.8, 1.0, 1.3, 2.0)
    names = ["embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out"]
    config |= {f"{name}_multiplier": draw.choice(factors) for name in names if draw.flag(0.8)}
    for name, count in (("ssm", 5), ("mlp", 2)):
        if draw.flag(0.7):
            config[f"{name}_multipliers"] = [draw.choice(factors) for _ in range(count)]
    return config


def mamba2(draw: Draw) -> Config:
    config = draw.base(layer_norm_epsilon=draw.choice([1e-6, 1e-5, 1e-3]), hidden_act=draw.choice(["silu", "silu", "gelu"]))
    for name in ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"):
        del config[name]
    mamba(draw, config, "num_heads", "n_groups")
    config |= {"head_dim": draw.choice([4, 6, 8, 16]), "expand": draw.choice([1, 2, 2, 3])}
    while config["num_heads"] * config["head_dim"] % config["expand"]:
        config["expand"] = draw.choice([1, 2, 3])
    config["hidden_size"] = config["num_heads"] * config["head_dim"] // config["expand"]
    config |= {"state_size": draw.choice([4, 8, 10, 16, 33]), "conv_kernel": draw.choice([2, 3, 4, 4, 5])}
    config |= {"chunk_size": draw.choice([8, 16, 256]), "use_bias": draw.flag(0.3), "use_conv_bias": draw.flag()}
    return config


def ernie4_5(draw: Draw) -> Config:
    config = draw.base(head_dim=draw.choice([8, 12, 16]), use_bias=draw.flag())
    draw.rope(config, ("default", "linear", "dynamic"))
    return config


def mistral(draw: Draw) -> Config:
    config = draw.base(sliding_window=draw.choice([None, draw.window()]))
    if draw.flag():
        config["head_dim"] = draw.choice([6, 10, 16, 20])
    draw.rope(config)
    return config


def ministral3(draw: Draw) -> Config:
    config = mistral(draw)
    config.pop("rope_theta", None)
    config.pop("rope_scaling", None)
    config["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": draw.choice([16, 32]),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": draw.choice([0.1, 0.3]),
    }
    return config


def mixtral(draw: Draw) -> Config:
    return mistral(draw) | experts(draw, "num_local_experts", width="")


def gemma2(draw: Draw) -> Config:
    config = draw.base(head_dim=draw.choice([8, 10, 16]), sliding_window=draw.window())
    config["query_pre_attn_scalar"] = draw.choice([4, 8, 16, 24])
    draw.rope(config, ("default", "linear"))
    config["attn_logit_softcapping"] = draw.choice([None, 1.0, 50.0])
    config["final_logit_softcapping"] = draw.choice([None, 2.0, 30.0])
    if draw.flag():
        draw.layer_types(config)
    config["hidden_activation"] = draw.choice(["gelu_pytorch_tanh", "gelu_pytorch_tanh", "silu"])
    config["attention_bias"] = draw.flag(0.3)
    return config


def gemma3_text(draw: Draw) -> Config:
    config = gemma2(draw)
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        config.pop(name, None)
    if draw.flag():
        config |= {"rope_theta": draw.choice([1e4, 1e6]), "rope_local_base_freq": draw.choice([500.0, 1e4])}
        if draw.flag():
            config["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
        if "layer_types" not in config:
            config["sliding_window_pattern"] = draw.choice([2, 3, 6])
    else:
        full = draw.choice([{"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}])
        config["rope_parameters"] = {
            "full_attention": {"rope_theta": 1e6, **full},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        draw.layer_types(config)
    return config


def gemma4_text(draw: Draw) -> Config:
    config = draw.base(head_dim=draw.choice([8, 10, 16]), global_head_dim=draw.choice([8, 12, 16, 20]))
    config |= {
        "sliding_window": draw.window(),
        "hidden_activation": draw.choice(["gelu_pytorch_tanh", "gelu_pytorch_tanh", "silu"]),
    }
    config |= {"attention_bias": draw.flag(0.3), "final_logit_softcapping": draw.choice([None, 2.0, 30.0])}
    config["num_hidden_layers"] = layers = draw.choice([1, 2, 4, 6, 7])
    if draw.flag(0.8):
        draw.layer_types(config)
        config["layer_types"][-1] = "full_attention"
    kinds = config.get("layer_types") or ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(layers)]
    kinds[-1] = "full_attention"
    shared = draw.randrange(layers) if draw.flag(0.7) else 0
    while set(kinds[: layers - shared]) != set(kinds):
        shared -= 1
    config |= {"num_kv_shared_layers": shared, "use_double_wide_mlp": draw.flag(), "attention_k_eq_v": draw.flag()}
    if draw.flag():
        heads = config["num_attention_heads"]
        config["num_global_key_value_heads"] = draw.choice([each for each in (1, 2, 3) if heads % each == 0])
    config |= {"hidden_size_per_layer_input": draw.choice([0, 6, 16]), "vocab_size_per_layer_input": config["vocab_size"]}
    if draw.flag():
        config |= {"enable_moe_block": True, **experts(draw, "num_experts", "top_k_experts")}
    if draw.flag():
        full = {"rope_type": "proportional", "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0])}
        full = draw.choice([full, full, {"rope_type": "linear", "factor": 8.0}, {"rope_type": "default"}])
        config["rope_parameters"] = {
            "full_attention": {"rope_theta": 1e6, **full},
            "sliding_attention": {"rope_type": "default", "rope_theta": draw.choice([500.0, 1e4])},
        }
    return config


def phi3(draw: Draw) -> Config:
    config = draw.base(sliding_window=draw.choice([None, draw.window()]), intermediate_size=draw.choice([24, 38, 50]))
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    share = draw.choice([1.0, 1.0, 0.5])
    if share != 1.0 and (head_dim // 2) % 2:
        share = 1.0
    half = int(head_dim * share) // 2
    original = draw.choice([16, 48, 512])
    if draw.flag():
        config["original_max_position_embeddings"] = original
        config["rope_scaling"] = {
            "type": "longrope",
            "short_factor": [1 + 0.1 * i for i in range(half)],
            "long_factor": [1.5 + 0.5 * i for i in range(half)],
        }
        config["max_position_embeddings"] = 512
    else:
        config["original_max_position_embeddings"] = config["max_position_embeddings"]
    config |= {"rope_theta": draw.choice([1e4, 1e5]), "partial_rotary_factor": share}
    return config


def glm4(draw: Draw) -> Config:
    config = draw.base(head_dim=draw.choice([8, 12, 16]), attention_bias=draw.flag())
    config |= {"partial_rotary_factor": draw.choice([0.5, 1.0]), "rope_theta": 1e4}
    return config


def glm4_moe(draw: Draw) -> Config:
    config = draw.base(head_dim=draw.choice([8, 12, 16]), attention_bias=draw.flag(), use_qk_norm=draw.flag())
    config |= {"partial_rotary_factor": draw.choice([0.5, 1.0]), "rope_theta": 1e4}
    total = draw.choice([4, 8])
    config |= {
        "n_routed_experts": total,
        "moe_intermediate_size": draw.choice([12, 20]),
        "num_experts_per_tok": draw.choice([1, 2]),
    }
    config |= {
        "n_shared_experts": draw.choice([1, 2]),
        "first_k_dense_replace": draw.choice([0, 1]),
        "norm_topk_prob": draw.flag(),
    }
    config |= {"n_group": draw.choice([1, 2]), "routed_scaling_factor": draw.choice([1.0, 2.5])}
    config["topk_group"] = draw.randrange(1, config["n_group"] + 1)
    return config


def latent(draw: Draw, config: Config) -> None:
    config["num_key_value_heads"] = config["num_attention_heads"]
    config |= {
        "q_lora_rank": draw.choice([None, 12, 20]),
        "kv_lora_rank": draw.choice([16, 24]),
        "qk_rope_head_dim": draw.choice([4, 8]),
        "qk_nope_head_dim": draw.choice([8, 12]),
        "v_head_dim": draw.choice([8, 12]),
    }


def glm4_moe_lite(draw: Draw) -> Config:
    config = glm4_moe(draw)
    for name in ("head_dim", "use_qk_norm", "first_k_dense_replace", "partial_rotary_factor"):
        config.pop(name)
    latent(draw, config)
    config["q_lora_rank"] = config["q_lora_rank"] or 16
    config["mlp_layer_types"] = [draw.choice(["sparse", "dense"]) for _ in range(config["num_hidden_layers"])]
    return config


def deepseek_v2(draw: Draw) -> Config:
    config = draw.base(attention_bias=draw.flag(0.3))
    latent(draw, config)
    total = draw.choice([4, 8])
    config |= {
        "n_routed_experts": total,
        "moe_intermediate_size": draw.choice([12, 20]),
        "num_experts_per_tok": draw.choice([1, 2]),
    }
    config |= {"n_shared_experts": draw.choice([1, 2]), "first_k_dense_replace": draw.choice([0, 1])}
    config["routed_scaling_factor"] = draw.choice([1.0, 2.5])
    config["topk_method"] = "greedy"
    if draw.flag():
        config |= {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": draw.choice([1, 2])}
    draw.rope(config, ("default", "yarn"))
    return config


def deepseek_v3(draw: Draw) -> Config:
    config = deepseek_v2(draw)
    config.pop("topk_method")
    config |= {
        "n_group": 2,
        "topk_group": draw.choice([1, 2]),
        "norm_topk_prob": draw.flag(),
        "rope_interleave": draw.flag(0.7),
    }
    return config


def kimi_linear(draw: Draw) -> Config:
    config = draw.base(attention_bias=draw.flag(), tie_word_embeddings=False)
    config["model_max_length"] = config.pop("max_position_embeddings")
    config["num_key_value_heads"] = config["num_attention_heads"]
    config |= {
        "q_lora_rank": draw.choice([None, 16]),
        "kv_lora_rank": draw.choice([12, 16, 24]),
        "qk_nope_head_dim": draw.choice([8, 12]),
        "qk_rope_head_dim": draw.choice([4, 8]),
        "v_head_dim": draw.choice([8, 10]),
        "num_experts": draw.choice([4, 8]),
        "num_experts_per_token": draw.choice([1, 2]),
        "moe_intermediate_size": draw.choice([12, 20]),
        "num_shared_experts": draw.choice([1, 2]),
        "num_expert_group": draw.choice([1, 2]),
        "moe_renormalize": draw.flag(),
        "routed_scaling_factor": draw.choice([1.0, 2.446]),
        "first_k_dense_replace": draw.choice([0, 1]),
    }
    config["topk_group"] = draw.randrange(1, config["num_expert_group"] + 1)
    draw.recurrent_types(config, "linear_attention")
    heads, dim, kernel = draw.choice([1, 2, 3, 4]), draw.choice([4, 8, 10, 16, 33]), draw.choice([2, 3, 4, 4, 5])
    if draw.flag():
        config |= {"linear_num_heads": heads, "linear_head_dim": dim, "linear_conv_kernel_dim": kernel}
        return config
    kinds = config.pop("layer_types")
    layers = {
        kind: [1 + at for at, each in enumerate(kinds) if each == kind] for kind in ("full_attention", "linear_attention")
    }
    config["linear_attn_config"] = {"num_heads": heads, "head_dim": dim, "short_conv_kernel_size": kernel}
    config["linear_attn_config"] |= {"full_attn_layers": layers["full_attention"], "kda_layers": layers["linear_attention"]}
    return config


def smollm3(draw: Draw) -> Config:
    config = draw.base(attention_bias=draw.flag(), mlp_bias=draw.flag())
    draw.rope(config)
    if draw.flag():
        config["no_rope_layers"] = [draw.choice([0, 1]) for _ in range(config["num_hidden_layers"])]
    else:
        config["no_rope_layer_interval"] = draw.choice([2, 3, 4])
    if draw.flag():
        config |= {"use_sliding_window": True, "sliding_window": draw.window()}
    return config


def granite(draw: Draw) -> Config:
    config = draw.base(attention_bias=draw.flag(), mlp_bias=draw.flag())
    draw.rope(config)
    config |= {
        "embedding_multiplier": draw.choice([1.0, 12.0]),
        "logits_scaling": draw.choice([1.0, 3.0]),
        "residual_multiplier": draw.choice([1.0, 0.22]),
        "attention_multiplier": draw.choice([1.0, 0.1]),
    }
    return config


def granitemoe(draw: Draw) -> Config:
    config = granite(draw) | experts(draw, "num_local_experts", width="")
    config.pop("mlp_bias")
    return config


def granitemoeshared(draw: Draw) -> Config:
    return granitemoe(draw) | {"shared_intermediate_size": draw.choice([16, 20, 36])}


def ernie4_5_moe(draw: Draw) -> Config:
    config = draw.base(use_bias=draw.flag())
    if draw.flag():
        config["head_dim"] = draw.choice([8, 12, 16])
    draw.rope(config, ("default", "linear", "dynamic"))
    total, layers = draw.choice([4, 6]), config["num_hidden_layers"]
    config |= {
        "moe_num_experts": total,
        "moe_k": draw.randrange(1, total),
        "moe_num_shared_experts": draw.choice([1, 2]),
        "moe_intermediate_size": draw.choice([12, 20]),
        "moe_layer_interval": draw.choice([1, 1, 2]),
        "moe_layer_start_index": draw.randrange(layers + 1),
    }
    if draw.flag():
        config["moe_layer_end_index"] = draw.choice([-1, layers - 1])
    return config


def olmo2(draw: Draw) -> Config:
    config = draw.base(attention_bias=draw.flag())
    draw.rope(config)
    return config


def olmo3(draw: Draw) -> Config:
    config = draw.base(attention_bias=draw.flag(), sliding_window=draw.window())
    draw.rope(config, ("default", "yarn"))
    for name in ("rope_parameters", "rope_scaling"):
        config.get(name, {}).pop("truncate", None)  # transformers looks for it beside the entries of the layer kinds
    flat = config.pop("rope_parameters", None)
    if flat is not None:
        config["rope_parameters"] = {"full_attention": flat, "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}
    if draw.flag():
        draw.layer_types(config)
    return config


def exaone4(draw: Draw) -> Config:
    config = draw.base(head_dim=draw.choice([8, 12, 16]), sliding_window=draw.choice([None, draw.window()]))
    draw.rope(config, ("default", "llama3"))
    if config["sliding_window"] is None:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    elif draw.flag():
        draw.layer_types(config)
    else:
        config["sliding_window_pattern"] = draw.choice([2, 4])
    return config


def seed_oss(draw: Draw) -> Config:
    config = draw.base(head_dim=draw.choice([8, 12, 16]), attention_bias=draw.flag(), attention_out_bias=draw.flag())
    config["mlp_bias"] = draw.flag()
    draw.rope(config)
    return config


def minimax_m2(draw: Draw) -> Config:
    config = draw.base(head_dim=draw.choice([8, 16])) | experts(draw, "num_local_experts", width="")
    return config | {"rotary_dim": draw.choice([4, 8]), "rope_theta": 1e6}


def gpt_oss(draw: Draw) -> Config:
    config = draw.base(head_dim=draw.choice([8, 16]), sliding_window=draw.window()) | experts(
        draw, "num_local_experts", width=""
    )
    config |= {"attention_bias": draw.flag(0.7), "tie_word_embeddings": False}
    draw.rope(config, ("default", "yarn"))
    if draw.flag():
        draw.layer_types(config)
    return config


def cohere2(draw: Draw) -> Config:
    config = draw.base(sliding_window=draw.window(), logit_scale=draw.choice([0.0625, 0.5, 1.0]))
    config["layer_norm_eps"] = config.pop("rms_norm_eps")
    config["attention_bias"] = draw.flag()
    draw.rope(config, ("default",))
    if draw.flag():
        draw.layer_types(config)
    return config


def cohere(draw: Draw) -> Config:
    config = cohere2(draw)
    for name in ("sliding_window", "layer_types"):
        config.pop(name, None)
    return config | {"use_qk_norm": draw.flag()}


def hunyuan_v1_dense(draw: Draw) -> Config:
    config = draw.base(attention_bias=draw.flag(), head_dim=draw.choice([8, 16]))
    config["rope_theta"] = 1e4
    if draw.flag():
        config["rope_scaling"] = {"type": "dynamic", "alpha": 100.0, "factor": 1.0}
    return config


def starcoder2(draw: Draw) -> Config:
    config = draw.base(use_bias=draw.flag(), sliding_window=draw.choice([None, draw.window()]))
    config["norm_epsilon"] = config.pop("rms_norm_eps")
    draw.rope(config, ("default", "linear"))
    return config


def llama4_text(draw: Draw) -> Config:
    config = draw.base(head_dim=draw.choice([8, 16]), attention_bias=draw.flag(0.3)) | experts(
        draw, "num_local_experts", width=""
    )
    config |= {
        "intermediate_size_mlp": draw.choice([20, 36]),
        "interleave_moe_layer_step": draw.choice([1, 2]),
        "attention_chunk_size": draw.choice([16, 33, 128]),
        "use_qk_norm": draw.flag(),
        "attn_temperature_tuning": draw.flag(),
        "floor_scale": 16,
        "attn_scale": 0.1,
    }
    draw.rope(config, ("default", "llama3"))
    return config


FAMILIES: dict[str, Callable[[Draw], Config]] = {
    maker.__name__: maker
    for maker in (
        *(llama, qwen2, qwen3, qwen3_moe, qwen2_moe, ernie4_5, mistral, ministral3, mixtral, gemma2, gemma3_text),
        *(phi3, gemma4_text, glm4, glm4_moe, glm4_moe_lite, deepseek_v2, deepseek_v3, smollm3, granite, granitemoe),
        *(olmo2, olmo3, exaone4, seed_oss, minimax_m2, gpt_oss, cohere, cohere2, hunyuan_v1_dense),
        *(starcoder2, llama4_text, granitemoeshared, ernie4_5_moe),
        *(qwen3_next, qwen3_5_text, qwen3_5_moe_text, kimi_linear, lfm2, lfm2_moe),
        *(granitemoehybrid, nemotron_h, falcon_h1, bamba, mamba2),
    )
}


def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Give every parameter values that make answers differ: linears keep the scale of their input, norms vary around theirs."""
    buffers = [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if name.endswith(("e_score_correction_bias", "layer_scalar", "expert_bias"))
    ]
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *buffers):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter.add_(0.2 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise * 0.5)
            else:
                parameter.copy_(noise * (1.2 / math.sqrt(parameter.shape[-1])))


def answer(model: Any, prompt: list[int]) -> Config | None:
    """Return greedy tokens, token by token with a cache, and the 3 best log-probabilities of each. None: too close to call.
    There is no cache for a window of 1: that of transformers keeps too much then; none with limits of time steps, which it
    leaves out with a cache; and none for Bamba, whose positions it then counts from 0."""
    tokens, tops, cache, new = [], [], None, prompt
    limits = [getattr(module, "time_step_limit", None) for module in model.modules()]
    has_limits = any(each is not None and tuple(each) != (0.0, math.inf) for each in limits)
    name = "cache_params" if model.config.model_type == "mamba2" else "past_key_values"
    has_cache = getattr(model.config, "sliding_window", None) != 1 and not has_limits and model.config.model_type != "bamba"
    for _ in range(NUM_OUTPUTS):
        with torch.no_grad():
            own = torch.tensor(new if has_cache else prompt + tokens)[None]
            output = model(own, **{name: cache}, use_cache=has_cache)
        cache = getattr(output, name) if has_cache else None
        best = torch.log_softmax(output.logits[0, -1].float(), -1).topk(3)
        tops.append([[int(index), float(value)] for value, index in zip(*best, strict=True)])
        if tops[-1][0][1] - tops[-1][1][1] < MARGIN:
            return None
        new = [tops[-1][0][0]]
        tokens += new
    return {"prompt_token_ids": prompt, "greedy_token_ids": tokens, "top_logprobs": tops}


def make(family: str, seed: int, place: Path) -> str:
    """Write one checkpoint; return what was refused, or nothing."""
    draw = Draw(f"{family} {seed}")
    config = FAMILIES[family](draw) | {"model_type": family}
    try:
        plain = AutoConfig.for_model(**json.loads(json.dumps(config)))
        model = AutoModelForCausalLM.from_config(plain, attn_implementation="eager", experts_implementation="eager").eval()
    except Exception as error:  # combinations that transformers refuses
        return f"{type(error).__name__}: {error}"
    randomize(model, torch.Generator().manual_seed(seed))
    model.tie_weights()
    try:
        prompts = ([draw.randrange(3, config["vocab_size"]) for _ in range(PROMPT_LENGTH)] for _ in range(20))
        expected = next(filter(None, (answer(model, prompt) for prompt in prompts)), None)
    except Exception as error:  # shapes that transformers cannot compute
        return f"{type(error).__name__}: {error}"
    if expected is None:
        return "no prompt with a clear answer"
    model.save_pretrained(place)
    if draw.flag():  # keep the file as somebody wrote it, instead of with every option
        (place / "config.json").write_text(json.dumps(config | {"architectures": [type(model).__name__]}, indent=1))
    (place / "expected.json").write_text(json.dumps(expected))
    return ""


def main(families: Iterable[str] = tuple(FAMILIES), make: Callable[[str, int, Path], str] = make) -> None:
    """Make checkpoints as the command line says; `make` returns why a seed gives none."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", nargs="+", default=list(families), choices=list(families))
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for family in options.family:
        refused = []
        for seed in range(options.seed, options.seed + options.count):
            reason = make(family, seed, options.out / f"{family}-{seed}")
            refused += [f"{seed}: {reason[:300]}"] if reason else []
        print(f"{family}: {options.count - len(refused)} of {options.count}", *refused, sep="\n    ", flush=True)


if __name__ == "__main__":
    main()
