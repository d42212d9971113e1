"""A dense step of sentence-transformers, as the launcher reads it and the ranks compute it."""

from __future__ import annotations

from typing import Literal

import msgspec


class DenseModule(msgspec.Struct, frozen=True):
    """A linear after pooling, in a safetensors file: activation(weight @ vector + bias)."""

    path: str
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: Literal["none", "tanh"]
