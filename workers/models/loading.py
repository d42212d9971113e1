"""A model with its weights, from a checkpoint. Called by the runner at start and at each reload."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.checkpoint.model_config import ModelConfig
from ops.table import OpTable
from workers.models import Model, declare_model
from workers.rank_group.share import TensorShare
from workers.weights.loader import LoadOptions, LoadResult, load_weights
from workers.weights.packing import Progress


class LoadedModel(LoadResult, frozen=True, kw_only=True):
    """A model and the weights that were loaded into it."""

    model: Model


def load_model(
    path: Path,
    config: ModelConfig,
    ops: OpTable,
    num_positions: int,
    on_progress: Progress,
    options: LoadOptions = LoadOptions(),  # noqa: B008 - a frozen value
    *,
    share: TensorShare = TensorShare(),  # noqa: B008 - a frozen value
    has_encoder: bool = True,
    has_drafts: bool = False,
) -> LoadedModel:
    """Return the model of `config`, as a rank with this share computes it, with the weights of the checkpoint at `path`.

    Without `has_encoder` a vision-language model is loaded as a text model; `has_drafts`: with its MTP layers. Other arguments
    and errors are those of `load_weights`.
    """
    model, weights = declare_model(config, share, has_encoder=has_encoder, has_drafts=has_drafts)
    result = load_weights(path, config, weights, ops, num_positions, on_progress, options)
    return LoadedModel(model=model, **msgspec.structs.asdict(result))
