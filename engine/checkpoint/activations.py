"""Names of activations in config.json. Used by every process that reads a checkpoint."""

from __future__ import annotations

from engine.checkpoint.json_fields import JsonOptions

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}


def read_activation(options: JsonOptions, key: str, default: str) -> str:
    """Return our name for the activation under `key`."""
    name = options.text(key, default)
    if name not in ACTIVATIONS:
        raise options.error(key, f"{name!r} is not supported; expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
