"""The weights in use, and loading others beside them. Owned by the runner."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.checkpoint.gguf.parts import GgufModel
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.errors import OutsideError
from engine.process.run_directory import Run
from ops.modules import Experts
from workers.devices.device import Device
from workers.engine.plan import Plan
from workers.models.loading import LoadedModel, load_model
from workers.rank_group.peers import Peers
from workers.weights.cache import WeightCache
from workers.weights.calibration import Calibration
from workers.weights.loader import LoadOptions
from workers.weights.packed_file import PackedFile
from workers.weights.packing import CacheOutcome, Progress
from workers.weights.precision import precision_of


class LoadedWeights(msgspec.Struct, frozen=True):
    """Weights in use. Version 0: none (cleared)."""

    path: str = ""
    version: int = 0
    num_bytes: int = 0
    plan: Plan | None = None
    cache: CacheOutcome = "off"
    contents: str = ""  # LoadedModel.contents
    packed: PackedFile | None = None  # LoadedModel.packed
    mixtures: list[Experts] = []  # of sparse layers

    @staticmethod
    def of(path: str, version: int, plan: Plan, loaded: LoadedModel) -> LoadedWeights:
        return LoadedWeights(
            path, version, loaded.num_bytes, plan, loaded.cache, loaded.contents, loaded.packed, loaded.mixtures
        )

    def check(self) -> None:
        """Raise OutsideError if the mapped file is no longer what was loaded."""
        trouble = self.packed.trouble() if self.packed is not None else ""
        if trouble:
            raise OutsideError(f"{trouble}; reloading the weights")


class ModelLoader:
    """Loads checkpoints of the shape `model` for a rank with `peers`. `has_encoder`: with the vision encoder, if the model has
    one; `has_drafts`: with its MTP layers."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        device: Device,
        peers: Peers,
        *,
        has_encoder: bool,
        has_drafts: bool,
    ) -> None:
        self._config, self._model, self._device, self._peers = config, model, device, peers
        self._has_encoder, self._has_drafts = has_encoder, has_drafts
        self._cache = _weight_cache(config)

    def load(self, path: str, version: int, on_progress: Progress, contents: str = "") -> LoadedModel:
        """Raises CheckpointError, and ContentsError if `contents` are given and the checkpoint has others. Random weights only
        need the right shape, which was checked when they were first loaded, before their contents were known."""
        config, peers = self._config, self._peers
        is_random = config.load_format == "dummy"
        if is_random and path != config.model and not contents:
            self._model.of_same_shape(Path(path), GgufModel.of_checkpoint(Path(path)))
        options = LoadOptions(
            precision=precision_of(config),
            calibration=_calibration(config),
            random_seed=config.seed + version - 1 if is_random else None,
            cache=self._cache,
            contents=contents,
            node=peers.seat.node,
            part=(peers.share.rank, peers.share.size),
        )
        with self._device.threads_of(peers.seat.count):
            return load_model(
                Path(path),
                self._model,
                self._device.ops,
                config.max_model_len,
                on_progress,
                options,
                share=peers.share,
                has_encoder=self._has_encoder,
                has_drafts=self._has_drafts,
            )


def _calibration(config: EngineConfig) -> Calibration | None:
    path = config.quantization_calibration
    return Calibration(Path(path), config.calibration_digest) if path else None


def _weight_cache(config: EngineConfig) -> WeightCache | None:
    """Return the cache of packed weights. Several ranks share one packed file, which is in the run directory if it is not to be
    kept."""
    is_shared = config.num_ranks > 1
    if config.weight_cache_dir and config.load_format != "dummy":
        return WeightCache(Path(config.weight_cache_dir), config.weight_cache_limit, is_shared)
    if not is_shared:
        return None
    return WeightCache(Run(config.run_id, Path(config.run_dir)).packed_path, config.weight_cache_limit, is_shared, is_run=True)
