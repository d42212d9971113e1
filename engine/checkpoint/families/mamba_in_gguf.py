"""Mamba-2's layers in GGUF files, as llama.cpp writes them: names of tensors, and options of config.json. Used by families."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.families.recurrence import MambaNames
from engine.checkpoint.json_fields import JsonOptions


def tensor_names(module: str) -> dict[str, str]:
    """Return the names of a layer's tensors: in GGUF files -> in checkpoints, under the layer's `module`."""
    names = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    names |= {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    return {name: f"{module}.{own}" for name, own in names.items()}


def sizes(options: JsonOptions, names: MambaNames) -> dict[str, Any]:
    """Return the options of the sizes."""
    heads = options.count("ssm.time_step_rank")
    return {
        names.num_heads[0]: heads,
        names.head_dim[0]: options.count("ssm.inner_size") // heads,
        names.num_groups[0]: options.count("ssm.group_count"),
        names.state_dim[0]: options.count("ssm.state_size"),
        names.kernel[0]: options.count("ssm.conv_kernel"),
    }


def are_attending(options: JsonOptions, num_layers: int) -> list[bool]:
    """Return whether each layer has attention: the others have no key heads."""
    return [count > 0 for count in by_layer(options, "attention.head_count_kv", num_layers)]


def by_layer(options: JsonOptions, key: str, num_layers: int) -> tuple[int, ...]:
    """Return a number for each layer. Files may have more, of MTP layers."""
    values = options.counts(key, (), or_one=num_layers)
    if len(values) < num_layers:
        raise options.error(key, f"{list(values)} should be {num_layers} integers or more")
    return values[:num_layers]
