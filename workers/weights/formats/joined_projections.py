"""Splits projections that are stored as one tensor (`engine/checkpoint/joined_projections.py`). Called by the reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from engine.checkpoint.joined_projections import JoinedProjection, joined_projections
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from workers.weights.formats.rows import Rows, rows_of
from workers.weights.formats.tensor import Tensor


def parts_of(joined: JoinedProjection) -> Iterator[tuple[str, Rows]]:
    """Yield the name and the rows of each part."""
    ends = np.cumsum(joined.widths).tolist()
    pieces = list(zip(ends, joined.widths, joined.part_numbers, strict=True))
    for number, name in enumerate(joined.part_names):
        spans = [slice(end - width, end) for end, width, part in pieces if part == number]
        if joined.count == 1:
            yield name, slice(spans[0].start, spans[-1].stop)
        else:
            runs = np.arange(joined.num_rows).reshape(joined.count, -1)
            yield name, np.concatenate([runs[:, span].ravel() for span in spans])


def split_projections(tensors: Mapping[str, Tensor], config: ModelConfig) -> Mapping[str, Tensor]:
    """Return `tensors` with the parts of joined projections in their place. Raises CheckpointError."""
    joined = {(each.module, each.name): each for each in joined_projections(config)}
    if not joined:
        return tensors
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        *place, module, projection, kind = ["", "", *name.split(".")]
        own = joined.get((module, projection)) if kind in ("weight", "bias") else None
        if own is None:
            found[name] = tensor
            continue
        if tensor.shape[0] != own.num_rows:
            raise CheckpointError(f"{name} has {tensor.shape[0]} rows, expected {own.num_rows}")
        for part, rows in parts_of(own):
            found[".".join([*place[2:], module, part, kind])] = rows_of(tensor, rows)
    return found
