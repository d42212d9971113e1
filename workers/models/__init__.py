"""The models, written straight-line against the op table. Read `llama.py` first; its configuration covers most families.

`engine/checkpoint/families` maps each family to its class.
"""

from __future__ import annotations

from importlib import import_module

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import ModelConfig
from workers.encoders import declare_encoder
from workers.models.llama import Llama
from workers.models.mtp import declare_drafts
from workers.rank_group.share import TensorShare
from workers.weights.declaration import Weights

Model = Llama  # interface of every model: `forward` and `logits`


def declare_model(
    config: ModelConfig,
    share: TensorShare = TensorShare(),  # noqa: B008 - frozen
    *,
    has_encoder: bool = True,
    has_drafts: bool = False,
) -> tuple[Model, Weights]:
    """Declare the model of `config`, as a rank with this share computes it, with its weights declared and empty. `has_encoder`:
    with its vision encoder, if any; `has_drafts`: with its MTP layers."""
    module_name, _, class_name = FAMILIES[config.architecture].model.partition(":")
    model_class: type[Model] = getattr(import_module(module_name), class_name)
    weights = Weights(share, FAMILIES[config.architecture].norm_offset)
    model = model_class(config, weights)
    if config.vision is not None and has_encoder:
        model.encoder = declare_encoder(config.vision, weights)
    if has_drafts:
        model.drafts = declare_drafts(model, weights)
    return model, weights
