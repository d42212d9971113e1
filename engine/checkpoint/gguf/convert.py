"""Conversion of a GGUF file to a checkpoint directory: config.json, the tokenizer's files, and a link to the file as
`model.gguf` (of several parts, a link to each).

Called by `locate.py` in the launcher and in clients, before any actor starts. Only the loader, which reads tensors from
`model.gguf`, needs to know the format. Directories are kept in the user's cache, one for each state (path, size, time) of a
file.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.checkpoint.families import FAMILIES, GGUF_NAMES, GGUF_NAMES_WITH_PICTURES
from engine.checkpoint.families.family import MAX_LAYERS, Family
from engine.checkpoint.files import user_cache
from engine.checkpoint.gguf.experts import expert_options, has_softmax_scores
from engine.checkpoint.gguf.file import shortest
from engine.checkpoint.gguf.latents import latent_options, latent_scaling
from engine.checkpoint.gguf.parts import GgufModel, link_names, part_paths, stem_of
from engine.checkpoint.gguf.tokenizer import end_token_ids, tokenizer_files
from engine.checkpoint.json_fields import JsonOptions
from engine.errors import CheckpointError

_LAYOUT = 2  # version of the converted directories; a new one creates new directories
_CHANGING = (  # options of other models with the same architecture name; none of them is supported
    *("attention.sliding_window", "attention.scale", "attn_logit_softcapping"),
    *("final_logit_softcapping", "logit_scale", "embedding_scale", "residual_scale", "attention.temperature_scale"),
)
_NORM_EPSILONS = {
    "rms": "layer_norm_rms_epsilon",
    "layer": "layer_norm_epsilon",
    "layer without bias": "layer_norm_epsilon",
}
_ONLY_PICTURES = ("clip", "paddleocr", "cogvlm")  # of encoders, and of models that are of no use without pictures
_TOKENS_OF_PICTURES = {  # of architectures that models with and without pictures have: a token of the former
    "gemma3": "<image_soft_token>",
    "gemma4": "<|image|>",
    "llama4": "<|image|>",
}
_UNROTATED = 1e30  # factor of frequencies of pairs that are not rotated
_ROPE_TYPES = {"none": "default", "linear": "linear", "yarn": "yarn"}


def gguf_checkpoint(path: Path) -> Path:
    """Return the directory for the file at `path`, or for the model of which it is a part, created if it does not exist. Raises
    CheckpointError."""
    paths = part_paths(path.absolute())
    try:
        identity = str(_LAYOUT) + "".join(f"\0{part}{_state(part)}" for part in paths)
        key = hashlib.sha256(identity.encode()).hexdigest()[:16]
        directory = user_cache() / "gguf" / f"{stem_of(path.name)}-{key}"
        if not (directory / "config.json").is_file():
            _write(directory, paths)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot write the converted tokenizer and config: {error}; set XDG_CACHE_HOME to a writable directory"
        ) from error
    return directory


def _state(path: Path) -> str:
    """Return what changes when the file is replaced or written to; empty if it is missing."""
    if not path.exists():
        return ""
    status = path.stat()
    return f"\0{status.st_ino}\0{status.st_size}\0{status.st_ctime_ns}"


def _write(directory: Path, paths: Sequence[Path]) -> None:
    """Create the directory atomically; of two concurrent writers the first wins."""
    model = GgufModel(paths)
    files = checkpoint_files(model)
    for mapped in model.mapped:
        mapped.check()
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=directory.parent))
    try:
        for name, path in zip(link_names(len(paths)), paths, strict=True):
            (made / name).symlink_to(path)
        for name, content in files.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_bytes(content)
        made.rename(directory)
    except OSError:
        if not (directory / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def checkpoint_files(file: GgufModel) -> dict[str, bytes]:
    """Return file contents by name. Raises CheckpointError that names an unsupported option."""
    options = JsonOptions(file.metadata, file.path)
    ends = end_token_ids(options)
    generation: dict[str, Any] = {"eos_token_id": list(ends)}
    files = {
        "config.json": json.dumps(model_options(file), indent=1).encode(),
        "generation_config.json": json.dumps(generation).encode(),
    }
    return files | tokenizer_files(options)


def model_options(file: GgufModel) -> dict[str, Any]:
    """Return the options of a config.json for the file. Raises CheckpointError that names an unsupported option."""
    options = JsonOptions(file.metadata, file.path)
    name = options.text("general.architecture", None)
    family = _family(file, options, name)
    num_layers, num_drafts = _num_layers(file, options, name)
    for key in _CHANGING:
        if key not in family.gguf_options and options.values.get(f"{name}.{key}"):
            raise options.error(f"{name}.{key}", f"{options.values[f'{name}.{key}']!r} is not supported")
    experts = expert_options(file, options, family.name, name, num_layers)
    if not experts and options.values.get(f"{name}.expert_count"):
        raise options.error(f"{name}.expert_count", f"{options.values[f'{name}.expert_count']!r} is not supported")
    num_heads = _count(options, family, name, "attention.head_count")
    hidden_size = options.count(f"{name}.embedding_length")
    latents = latent_options(options, name) if name in ("deepseek2", "kimi-linear") else {}
    head_dim = latents.get("qk_rope_head_dim") or options.count(f"{name}.attention.key_length", hidden_size // num_heads)
    if not head_dim:
        raise options.error(f"{name}.embedding_length", f"{hidden_size} is less than attention.head_count {num_heads}")
    if not latents and options.count(f"{name}.attention.value_length", head_dim) != head_dim:
        raise options.error(f"{name}.attention.value_length", f"differs from attention.key_length, {head_dim}")
    rope = _rope(file, options, name, head_dim) | family.rope_of_gguf(_within(options, name))
    if family.has_proportional_rope and rope["frequency_factors"]:
        rope |= _proportional(rope["frequency_factors"], head_dim)
    has_bias = any(re.fullmatch(r"blk\.\d+\.attn_q(kv)?\.bias", tensor) for tensor in file.tensors)
    has_conv_bias = any(re.fullmatch(r"blk\.\d+\.ssm_conv1d\.bias", tensor) for tensor in file.tensors)
    return {
        "architectures": [family.class_names[0]],
        "model_type": family.name,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": _count(options, family, name, "feed_forward_length", _width_of_experts(options, name)),
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": num_drafts,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _count(options, family, name, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        family.activation_name: "silu",
        "max_position_embeddings": options.count(f"{name}.context_length"),
        family.norm_epsilon_name: _norm_epsilon(options, family, name),
        "rope_parameters": {"full_attention": rope} if family.local_rope_theta else rope,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": has_bias,
        "use_bias": has_bias,
        "qkv_bias": has_bias,
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "mamba_conv_bias": has_conv_bias,
        "use_conv_bias": has_conv_bias,
        "use_sliding_window": False,
        "attention_k_eq_v": _has_keys_as_values(file),
        "lacks_encoder": _lacks_encoder(options, name),
        "dtype": "float32",
        **({"mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors} if family.name == "falcon_h1" else {}),
        **experts,
        **latents,
        **({family.head_norm_option: "blk.0.attn_q_norm.weight" in file.tensors} if family.head_norm_option else {}),
        **family.of_gguf(_within(options, name), num_layers),
    }


def _family(file: GgufModel, options: JsonOptions, name: str) -> Family:
    """Return the family of an architecture. Some names stand for several, that other options tell apart."""
    if name in _ONLY_PICTURES:
        raise options.error(
            "general.architecture",
            f"{name!r} reads pictures, which GGUF files are not supported for; use the model's safetensors checkpoint, or the "
            "GGUF file of the text model for text alone",
        )
    names = GGUF_NAMES | GGUF_NAMES_WITH_PICTURES | {"nemotron_h_moe": FAMILIES["nemotron_h"]}
    if name not in names:
        raise options.error("general.architecture", f"{name!r} is not supported; expected one of {', '.join(names)}")
    if name == "llama" and options.values.get("llama.expert_count"):
        return FAMILIES["mixtral"]
    if name == "granitehybrid" and "granitehybrid.attention.scale" not in options.values:
        return FAMILIES["bamba"]
    if name == "deepseek2":
        return FAMILIES["deepseek_v2" if has_softmax_scores(file, options, name) else "deepseek_v3"]
    if name == "olmo2" and options.values.get("olmo2.attention.sliding_window"):
        return FAMILIES["olmo3"]
    return names[name]


def _num_layers(file: GgufModel, options: JsonOptions, name: str) -> tuple[int, int]:
    """Return the number of layers, and of MTP layers, which files count as blocks behind the others, even if they lack them."""
    num_blocks = options.count(f"{name}.block_count", most=MAX_LAYERS)
    num_drafts = options.count(f"{name}.nextn_predict_layers", 0, least=0, most=num_blocks - 1)
    first = num_blocks - num_drafts
    if num_drafts and "blk.0.attn_norm.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} has only MTP layers; use the file with the whole model")
    has_drafts = f"blk.{first}.nextn.eh_proj.weight" in file.tensors
    return first, num_drafts if has_drafts else 0


def _lacks_encoder(options: JsonOptions, name: str) -> bool:
    """Return whether the model takes pictures, the encoder of which is in another file."""
    tokens = options.values.get("tokenizer.ggml.tokens")
    token = _TOKENS_OF_PICTURES.get(name)
    return name in GGUF_NAMES_WITH_PICTURES or (token is not None and isinstance(tokens, list) and token in tokens)


def _count(options: JsonOptions, family: Family, name: str, key: str, default: int | None = None) -> int:
    """Return a number; of a list with a number for each layer the first but 0, if the family reads the others. 1 in place of 0,
    if the family has no use for it."""
    values = options.values.get(f"{name}.{key}")
    if key in family.gguf_options and values == 0:
        return 1
    if key in family.gguf_options and isinstance(values, list) and values:
        first = next(filter(None, values), 0)
        return JsonOptions({f"{name}.{key}": first}, options.path).count(f"{name}.{key}")
    return options.count(f"{name}.{key}", default)


def _norm_epsilon(options: JsonOptions, family: Family, name: str) -> float:
    """Return the epsilon of norms, which some files have under the other name only."""
    other = options.values.get(f"{name}.attention.layer_norm_epsilon")
    return options.number(f"{name}.attention.{_NORM_EPSILONS[family.norm_kind]}", other)


def _width_of_experts(options: JsonOptions, name: str) -> int | None:
    """Return the width of an expert, in a file that may have no other MLPs."""
    key = f"{name}.expert_feed_forward_length"
    return options.count(key) if key in options.values else None


def _has_keys_as_values(file: GgufModel) -> bool:
    """Return whether some layer has keys, but no values of its own."""
    keys = (tensor for tensor in file.tensors if re.fullmatch(r"blk\.\d+\.attn_k\.weight", tensor))
    return any(tensor.replace("attn_k", "attn_v") not in file.tensors for tensor in keys)


def _proportional(factors: list[float], head_dim: int) -> dict[str, Any]:
    """Return the rope that rotates only the first pairs of a head, which files say by the factors of the others."""
    num_rotated = sum(factor < _UNROTATED for factor in factors)
    share = (2 * num_rotated + 0.5) / head_dim  # rounded down to pairs when it is read
    return {"rope_type": "proportional", "partial_rotary_factor": share, "frequency_factors": factors[:0]}


def _within(options: JsonOptions, name: str) -> JsonOptions:
    """Return the options of one architecture, without its name."""
    prefix = f"{name}."
    values = {key.removeprefix(prefix): value for key, value in options.values.items() if key.startswith(prefix)}
    return JsonOptions(values, options.path, prefix)


def _vocab_size(file: GgufModel) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise CheckpointError(f"{file.path} is not a language model: it has no token_embd.weight")
    return table.shape[0]


def _rope(file: GgufModel, options: JsonOptions, name: str, head_dim: int) -> dict[str, Any]:
    kind = options.text(f"{name}.rope.scaling.type", "none")
    if kind not in _ROPE_TYPES:
        raise options.error(f"{name}.rope.scaling.type", f"{kind!r} is not supported; expected one of {', '.join(_ROPE_TYPES)}")
    rope: dict[str, Any] = {
        "rope_type": _ROPE_TYPES[kind],
        "rope_theta": options.number(f"{name}.rope.freq_base", 10_000.0),
        "partial_rotary_factor": options.count(f"{name}.rope.dimension_count", head_dim) / head_dim,
        "frequency_factors": _factors(file, "rope_freqs.weight"),
    }
    long = _factors(file, "rope_factors_long.weight")
    if long:
        original = options.count(f"{name}.rope.scaling.original_context_length")
        short = _factors(file, "rope_factors_short.weight")
        return rope | {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "original_max_position_embeddings": original,
        }
    if kind != "none":
        rope["factor"] = options.number(f"{name}.rope.scaling.factor", None)
    if kind == "yarn":
        rope["original_max_position_embeddings"] = options.count(f"{name}.rope.scaling.original_context_length")
        rope["beta_fast"] = options.number(f"{name}.rope.scaling.yarn_beta_fast", 32.0)
        rope["beta_slow"] = options.number(f"{name}.rope.scaling.yarn_beta_slow", 1.0)
        rope["attention_factor"] = options.number(f"{name}.rope.scaling.yarn_attn_factor", 0.0)
        rope |= latent_scaling(options, name)
    return rope


def _factors(file: GgufModel, name: str) -> list[float]:
    """Return the divisor of each frequency that the tensor `name` has; none without such a tensor."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return []
    if tensor.type_name != "F32":
        raise CheckpointError(f"{file.path}: {name} has type {tensor.type_name}, expected F32")
    return [shortest(value) for (value,) in struct.iter_unpack("<f", tensor.file.data[tensor.begin : tensor.end])]
