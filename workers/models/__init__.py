"""The models, one file per architecture, written straight-line against the op table. Read `llama.py` first.

`MODELS` is the registry: `ModelConfig.architecture` -> class.
"""

from __future__ import annotations

from engine.checkpoint.model_config import ModelConfig
from workers.models.ernie4_5 import Ernie4_5
from workers.models.llama import Llama
from workers.models.qwen2 import Qwen2
from workers.models.qwen3 import Qwen3
from workers.weights.declaration import Weights

Model = Llama  # what every model offers: `forward` and `logits`
MODELS: dict[str, type[Model]] = {"llama": Llama, "qwen2": Qwen2, "qwen3": Qwen3, "ernie4_5": Ernie4_5}


def declare_model(config: ModelConfig) -> tuple[Model, Weights]:
    """The model of `config`, its weights declared and empty."""
    weights = Weights()
    return MODELS[config.architecture](config, weights), weights
