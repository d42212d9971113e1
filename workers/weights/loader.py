"""From a checkpoint directory to weights, or an error that names everything wrong with it.

Called by the runner at start and at each reload. Weights are packed for the op table once and stored in the weight cache
(`cache.py`), from which later loads map them; those read only the headers of the checkpoint.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError, ContentsError
from ops.modules import Experts, Linear
from ops.table import OpTable
from ops.weight_format import Memory
from workers.weights.cache import WeightCache
from workers.weights.calibration import Calibration
from workers.weights.checksums import Checksums
from workers.weights.declaration import Weights
from workers.weights.packed_file import PackedFile
from workers.weights.packing import CacheOutcome, Progress, WeightPacking
from workers.weights.precision import ROUNDING, Precision
from workers.weights.random import RandomWeights
from workers.weights.reader import Checkpoint, digest_of
from workers.weights.rotary import query_factors, rotary_tables


class LoadOptions(msgspec.Struct, frozen=True):
    """How weights are stored, and where they come from instead of the checkpoint.

    With `random_seed` they are random and nothing of the checkpoint is read; nor is it if `cache` has the requested `contents`.
    """

    precision: Precision = Precision()
    calibration: Calibration | None = None
    random_seed: int | None = None
    cache: WeightCache | None = None
    contents: str = ""
    node: int = 0  # memory node of this rank's weights; each but the first has its own file in the cache
    part: tuple[int, int] = (0, 1)  # rank and ranks that share matrices; files of tables with `stored` have a rank's part


class LoadResult(msgspec.Struct, frozen=True):
    """Loaded weights. `num_bytes`: as packed; `contents`: digest of their values; `packed`: the mapped file, if any."""

    mixtures: list[Experts]  # of sparse layers, in order; of several sets the first
    num_bytes: int
    cache: CacheOutcome
    contents: str
    linears: list[Linear]  # without encoders and experts
    routers: list[Linear]  # those that are stored as linears
    experts: list[Experts]  # of all sets
    packed: PackedFile | None


def load_weights(
    path: Path,
    config: ModelConfig,
    weights: Weights,
    ops: OpTable,
    num_positions: int,
    on_progress: Progress,
    options: LoadOptions,
) -> LoadResult:
    """Fill `weights`, declared by a model of `config`, from the checkpoint at `path`.

    Raises CheckpointError if the checkpoint does not fit, and ContentsError if it was overwritten and the cache does not have
    the requested contents.
    """
    largest = max(config.largest_head_dim, config.latents.latent_dim if config.latents else 0)
    if ops.max_head_dim is not None and largest > ops.max_head_dim:
        raise CheckpointError(
            f"{path}: {'latents' if config.latents else 'heads'} have {largest} elements, the limit of the {ops.name} ops is "
            f"{ops.max_head_dim}; use --ops reference"
        )
    outcome: CacheOutcome = "off"
    precision, calibration, random_seed, cache, contents, node, part = msgspec.structs.astuple(options)
    found = ""
    directory = cache if ops.layout is not None or (ops.stored is not None and cache is not None and not cache.is_run) else None
    layout = digest_of(ops.layout()) if ops.layout is not None else ops.stored and ops.stored.layout()
    description = {"model": _shape(config, weights), "layout": layout, "rounding": ROUNDING} | msgspec.structs.asdict(precision)
    source = {"path": str(path), "architecture": config.architecture}

    if ops.stored is not None:
        description["part"] = part
    if node:
        description["node"] = node
    if calibration is not None:
        description["calibration"] = calibration.digest

    def calibrate() -> None:
        if calibration is not None:
            calibration.apply(weights, config)

    def of(contents: str) -> dict[str, Any]:
        return {"contents": contents} | description

    if random_seed is not None:
        found = f"random {random_seed}"
        is_narrow = precision != Precision() and ops.layout is not None
        loading = WeightPacking(
            source, weights, RandomWeights(weights, random_seed, is_narrow), ops, precision, on_progress, calibrate
        )
        if directory is not None and directory.is_shared:
            loading.pack_with(directory, of(found))
        else:
            loading.pack_into_memory()
    else:
        loading = WeightPacking(source, weights, None, ops, precision, on_progress, calibrate)
        outcome = loading.map_from(directory, of(contents)) if contents and directory else "miss"
        if outcome in ("held", "hit"):
            found = contents
        else:
            loading.stored = checkpoint = Checkpoint(path, config, weights)
            found = checkpoint.contents(Checksums(cache.directory if cache else None), on_progress)
            if contents not in ("", found):
                raise ContentsError(
                    f"{path} was overwritten with other weights than those in use, and their packed file is gone; reload it "
                    "to use the new weights"
                )
            try:
                outcome = loading.pack_with(directory, of(found))
            except Exception:
                checkpoint.check_unchanged()  # zeros in a truncated file are not the cause
                raise
    for rope, rotary in weights.rotaries:
        tables = rotary_tables(rope, rotary.head_dim, 0 if rotary.is_by_row else num_positions)
        factors = query_factors(rope, num_positions)
        named = zip(("cosines", "sines", "partners", "query_factors"), (*tables, factors), strict=True)
        sources = {name: partial(np.ascontiguousarray, values) for name, values in named if values is not None}
        ops.pack(rotary, sources, Memory())
    mixtures = [mixture for mixture in weights.mixtures if not mixture.is_local]
    routers = [router.linear for router in weights.routers if not router.weight_name]
    linears = [*weights.linears, *weights.exact_linears]
    return LoadResult(mixtures, loading.num_bytes, outcome, found, linears, routers, weights.mixtures, loading.packed)


def _shape(config: ModelConfig, weights: Weights) -> str:
    """Return a digest of everything except the checkpoint's contents that determines packed bytes: its tensors, and how they
    are cut into heads and modules (an embedding may also be the head). Settings of the computation are excluded, so that models
    with the same weights share a file."""
    heads = (config.num_attention_heads, config.num_kv_heads)
    vision = config.vision if weights.patch_linears else None
    pixels = [msgspec.structs.astuple(vision.pixels)] if vision else []  # are folded into weights
    linears = [list(linear.names) for linear in weights.linears]
    return digest_of([config.architecture, heads, config.tie_word_embeddings, weights.shapes(), linears, *pixels])
