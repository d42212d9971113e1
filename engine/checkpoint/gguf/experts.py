"""Experts of a GGUF file, as the options of the family's config.json. Called by `convert.py`.

Layers with experts are recognized by their tensors. The rest is fixed in llama.cpp's graphs, see the comments; a file with
other values is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine.checkpoint.gguf.parts import GgufModel
from engine.checkpoint.json_fields import JsonOptions
from engine.errors import CheckpointError

_SOFTMAX, _SIGMOID = 1, 2
_SCORING = {0: "", _SOFTMAX: "softmax", _SIGMOID: "sigmoid"}
_FIXED = {"expert_gating_func": (0, _SOFTMAX), "expert_weights_scale": (0, 1.0), "expert_weights_norm": (True,)}
_FIXED |= {"expert_group_count": (0, 1), "expert_group_used_count": (0, 1)}
_FOLLOWING = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "minimax_m2",
    "lfm2_moe",
    "kimi_linear",
    "nemotron_h",
)  # families that read these options


_OPTIONAL = ("gemma4_text", "granitemoehybrid", "nemotron_h")  # families of models with and without experts


def expert_options(file: GgufModel, options: JsonOptions, family: str, name: str, num_layers: int) -> dict[str, Any]:
    """Return the options. `name`: the architecture's name in the file."""
    if family not in _OPTIONS or (family in _OPTIONAL and not options.values.get(f"{name}.expert_count")):
        return {}
    for key, followed in _FIXED.items() if family not in _FOLLOWING else ():
        value = options.values.get(f"{name}.{key}")
        if value is not None and value not in followed:
            raise options.error(f"{name}.{key}", f"{value!r} is not supported; supported: {', '.join(map(repr, followed))}")
    sparse = [index for index in range(num_layers) if f"blk.{index}.ffn_gate_inp.weight" in file.tensors]
    if not sparse:
        raise CheckpointError(f"{file.path} has no blk.N.ffn_gate_inp.weight, so none of its layers has experts")
    return _OPTIONS[family](file, options, name, sparse)


def _qwen3_moe(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    num_layers = options.count(f"{name}.block_count") - options.count(f"{name}.nextn_predict_layers", 0, least=0)
    return {
        "num_experts": options.count(f"{name}.expert_count"),
        "num_experts_per_tok": options.count(f"{name}.expert_used_count"),
        "moe_intermediate_size": options.count(f"{name}.expert_feed_forward_length"),
        "mlp_only_layers": [index for index in range(num_layers) if index not in sparse],
        "norm_topk_prob": True,  # always
    }


def _qwen2_moe(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    shared = options.count(f"{name}.feed_forward_length")
    return _qwen3_moe(file, options, name, sparse) | {
        "shared_expert_intermediate_size": options.count(f"{name}.expert_shared_feed_forward_length", shared),
        "norm_topk_prob": False,  # always
    }


def _qwen3_next(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    return _qwen3_moe(file, options, name, sparse) | {
        "shared_expert_intermediate_size": options.count(f"{name}.expert_shared_feed_forward_length"),
    }


def _qwen3_5_moe(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    """Return the options of Qwen3.5. All layers are sparse, and weights of experts are always normalized."""
    found = _qwen3_next(file, options, name, sparse)
    return {key: value for key, value in found.items() if key not in ("mlp_only_layers", "norm_topk_prob")}


def _lfm2_moe(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    """Return the options of LFM2-MoE. Weights of experts are always normalized, and not scaled."""
    if _scoring(options, name, "softmax") != "sigmoid":
        raise options.error(f"{name}.expert_gating_func", f"should be {_SIGMOID}, sigmoid")
    return {
        "num_experts": options.count(f"{name}.expert_count"),
        "num_experts_per_tok": options.count(f"{name}.expert_used_count"),
        "moe_intermediate_size": options.count(f"{name}.expert_feed_forward_length"),
        "num_dense_layers": options.count(f"{name}.leading_dense_block_count", 0, least=0),
        "use_expert_bias": any(tensor.endswith(".exp_probs_b.bias") for tensor in file.tensors),
    }


def _granitemoe(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    return {
        "num_local_experts": options.count(f"{name}.expert_count"),
        "num_experts_per_tok": options.count(f"{name}.expert_used_count"),
        "shared_intermediate_size": options.count(f"{name}.expert_shared_feed_forward_length", 0, least=0),
    }


def _llama4(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    return {
        "num_local_experts": options.count(f"{name}.expert_count"),
        "num_experts_per_tok": options.count(f"{name}.expert_used_count"),
        "intermediate_size": options.count(f"{name}.expert_feed_forward_length"),
        "moe_layers": sparse,
    }


def _mixtral(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    return {
        "num_local_experts": options.count(f"{name}.expert_count"),
        "num_experts_per_tok": options.count(f"{name}.expert_used_count"),
        "sliding_window": None,
    }


def _gpt_oss(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    return {
        "num_local_experts": options.count(f"{name}.expert_count"),
        "num_experts_per_tok": options.count(f"{name}.expert_used_count"),
        "intermediate_size": options.count(f"{name}.expert_feed_forward_length"),
    }


def _ernie4_5_moe(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    """Return the options of ERNIE 4.5. Weights of experts are always normalized. The file's length of shared experts has
    another meaning, so it is taken from the tensor."""
    intermediate_size = options.count(f"{name}.expert_feed_forward_length")
    shared = file.tensors.get(f"blk.{sparse[0]}.ffn_gate_shexp.weight")
    return {
        "moe_num_experts": options.count(f"{name}.expert_count"),
        "moe_k": options.count(f"{name}.expert_used_count"),
        "moe_intermediate_size": intermediate_size,
        "moe_num_shared_experts": 0 if shared is None else shared.shape[0] // intermediate_size,
        "moe_layer_interval": options.count(f"{name}.interleave_moe_layer_step", 1),
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_use_aux_free": any(re.fullmatch(r"blk\.\d+\.exp_probs_b\.bias", tensor) for tensor in file.tensors),
    }


def _deepseek_v3(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    """Return the options of DeepSeek-V3. Keys missing in the file have no effect."""
    return {
        "n_routed_experts": options.count(f"{name}.expert_count"),
        "num_experts_per_tok": options.count(f"{name}.expert_used_count"),
        "moe_intermediate_size": options.count(f"{name}.expert_feed_forward_length"),
        "n_shared_experts": options.count(f"{name}.expert_shared_count", 0, least=0),
        "first_k_dense_replace": options.count(f"{name}.leading_dense_block_count", 0, least=0),
        "scoring_func": "softmax" if has_softmax_scores(file, options, name) else _scoring(options, name, "sigmoid"),
        "norm_topk_prob": options.flag(f"{name}.expert_weights_norm", False),
        "routed_scaling_factor": options.number(f"{name}.expert_weights_scale", 0.0) or 1.0,
        "n_group": options.count(f"{name}.expert_group_count", 0, least=0) or 1,
        "topk_group": options.count(f"{name}.expert_group_used_count", 0, least=0) or 1,
    }


def _kimi_linear(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    """Return the options of Kimi Linear. Weights of experts are always normalized."""
    return _deepseek_v3(file, options, name, sparse) | {"norm_topk_prob": True}


def _nemotron_h(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    """Return the options of Nemotron-H. Scores are sigmoids."""
    found = _deepseek_v3(file, options, name, sparse)
    own = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "routed_scaling_factor")
    return {key: found[key] for key in (*own, "n_group", "topk_group")} | {
        "moe_shared_expert_intermediate_size": options.count(f"{name}.expert_shared_feed_forward_length"),
        "moe_latent_size": options.count(f"{name}.moe_latent_size", 0, least=0) or None,
    }


def _deepseek_v2(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    """Return the options of DeepSeek-V2, with the groups of its config.json."""
    found = _deepseek_v3(file, options, name, sparse)
    return found | {"topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


def _glm4_moe(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    return _deepseek_v3(file, options, name, sparse) | {"scoring_func": _scoring(options, name, "sigmoid")}


def _minimax_m2(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    """Return the options of MiniMax-M2. Weights of experts are always normalized, and not scaled."""
    return {
        "num_local_experts": options.count(f"{name}.expert_count"),
        "num_experts_per_tok": options.count(f"{name}.expert_used_count"),
        "intermediate_size": options.count(f"{name}.expert_feed_forward_length"),
        "scoring_func": _scoring(options, name, "sigmoid"),
    }


def _gemma4(file: GgufModel, options: JsonOptions, name: str, sparse: list[int]) -> dict[str, Any]:
    return {
        "enable_moe_block": True,
        "num_experts": options.count(f"{name}.expert_count"),
        "top_k_experts": options.count(f"{name}.expert_used_count"),
        "moe_intermediate_size": options.count(f"{name}.expert_feed_forward_length"),
    }


def has_softmax_scores(file: GgufModel, options: JsonOptions, name: str) -> bool:
    """Return whether experts are chosen by softmax scores. Files that do not say are of DeepSeek-V2, or of GLM-4.7-Flash, which
    corrects scores."""
    default = "sigmoid" if any(tensor.endswith(".exp_probs_b.bias") for tensor in file.tensors) else "softmax"
    return _scoring(options, name, default) == "softmax"


def _scoring(options: JsonOptions, name: str, default: str) -> str:
    """Return the function of scores; `default`: if the file does not say."""
    return _SCORING.get(options.count(f"{name}.expert_gating_func", 0, least=0), "unknown") or default


_Options = Callable[[GgufModel, JsonOptions, str, list[int]], dict[str, Any]]
_OPTIONS: dict[str, _Options] = {
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "lfm2_moe": _lfm2_moe,
    "granitemoeshared": _granitemoe,
    "granitemoehybrid": _granitemoe,
    "llama4_text": _llama4,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "ernie4_5_moe": _ernie4_5_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "kimi_linear": _kimi_linear,
    "nemotron_h": _nemotron_h,
    "minimax_m2": _minimax_m2,
    "gemma4_text": _gemma4,
}
