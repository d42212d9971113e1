"""Assembles a rank's step: the runner, with the parts for its model and options.

Called by the runners (`runners.py`) and by tests. Only this module knows all parts; the parts do not know each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.state_spec import StateSpec
from engine.config import EngineConfig
from engine.grammars.tokens import GrammarTokens
from engine.process.run_directory import Run
from workers.devices.device import Device
from workers.engine.batch_slots import BatchSlots
from workers.engine.extension import Extension
from workers.engine.inputs import InputSizes, RowColumns, StepInputs
from workers.engine.kv_cache import map_kv_cache, map_marks
from workers.engine.model_step import ModelStep
from workers.engine.output import Output
from workers.engine.plan import Plan
from workers.engine.runner import ModelRunner
from workers.engine.state_cache import map_states
from workers.engine.weights import ModelLoader
from workers.extensions.adapters.columns import AdapterColumns
from workers.extensions.drafts.drafting import make_drafting, mtp_kind
from workers.extensions.drafts.mtp import MtpDrafter
from workers.extensions.drafts.mtp_steps import MtpSteps
from workers.extensions.grammars.grammars import Grammars
from workers.extensions.media.features import Features
from workers.extensions.media.media import Media
from workers.extensions.media.media_columns import MediaColumns
from workers.extensions.pooling import StepPooling
from workers.extensions.states import StateSlots
from workers.extensions.typed_positions import TypedPositionColumns
from workers.rank_group.peers import Peers
from workers.sampling.slot_sampling import SlotSampling
from workers.sampling.step_sampling import StepSampling
from workers.selftest.op_choice import settle_ops
from workers.selftest.step_check import StepCheck

if TYPE_CHECKING:
    from engine.grammars.matching import Matching
    from workers.extensions.adapters.arena import AdapterArena


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """Everything that a rank's runner is built from.

    `arena`: its KV arena; `on_op` is called within a step (`make_plan`). `features`: for models with media; `adapters`: for
    rows with adapters. `device_arena`: descriptor of memory on the card that outlives this process, `weight_shelf`: sockets for
    descriptors of weights there; -1: none. `states`: the state arena of a model with recurrent layers.
    """

    config: EngineConfig
    model: ModelConfig
    arena: memoryview
    peers: Peers
    on_op: Callable[[], None] = lambda: None
    features: Features | None = None
    adapters: AdapterArena | None = None
    device_arena: int = -1
    states: memoryview | None = None
    weight_shelf: tuple[int, int] = (-1, -1)


class DeviceParts(msgspec.Struct, frozen=True):
    """Parts of a runner that depend on its device."""

    device: Device
    make_inputs: Callable[..., StepInputs]
    make_plan: Callable[..., Plan]


def build_runner(parts: RunnerParts, device_parts: DeviceParts) -> ModelRunner:
    """Return the core of a runner."""
    return _Assembly(parts, device_parts).runner()


class _Assembly:
    """The parts of one runner, in the order of their dependencies."""

    def __init__(self, parts: RunnerParts, device_parts: DeviceParts) -> None:
        config, model, peers, features = parts.config, parts.model, parts.peers, parts.features
        self._config, self._model, self._arena, self._device_parts = config, model, parts.arena, device_parts
        self._peers, self._on_op, self._features = peers, parts.on_op, features
        self._device = device = device_parts.device
        self._has_drafts = config.speculative_config.has_mtp
        settle_ops(config, model, device, peers, has_encoder=features is not None, has_drafts=self._has_drafts)
        self._spec = KVCacheSpec.of(model, config.block_size, config.kv_cache_dtype, self._has_drafts)
        self._cache = map_kv_cache(parts.arena, self._spec, config.num_kv_blocks, device)
        self._states = self._map_states(parts.states)
        self._media = [MediaColumns(model, features.arena.rows if features else None)] if model.vision else []
        self._positions = [TypedPositionColumns(model.max_position_embeddings)] if model.position_tables else []
        self._adapters = [AdapterColumns(parts.adapters)] if parts.adapters else []
        self._inputs = self._make_inputs()
        self._slots = self._make_slots()
        self._slot_sampling = SlotSampling(self._slots)

    def _map_states(self, arena: memoryview | None) -> list[StateSlots]:
        config = self._config
        spec = StateSpec.of(self._model, config.speculative_config.num_logged)
        if spec is None:
            return []
        assert arena is not None, f"{self._model.architecture} models need a state arena"
        map_states(self._cache, arena, spec, config.num_states, self._device)
        return [StateSlots(config)]

    def _make_inputs(self) -> StepInputs:
        config = self._config
        sizes = InputSizes(
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            row_tile=self._device.ops.row_tile,
            max_padded=config.max_cudagraph_capture_size,
            num_drafts=config.speculative_config.max_drafts,
            pads_prompts=config.graph_only_prefill,
            num_tables=self._spec.num_tables,
            same_inputs=self._model.same_inputs,
        )
        columns: list[RowColumns] = [*self._media, *self._positions, *self._adapters, *self._states]
        return self._device_parts.make_inputs(self._device, sizes, columns)

    def _make_slots(self) -> BatchSlots:
        # of MTP layers; those of devices have no draft tokens on the host
        hidden_size = self._model.hidden_size if self._has_drafts and not self._inputs.is_made_on_device else 0
        slots = BatchSlots(
            self._inputs.host_block_tables,
            self._config.max_model_len,
            self._model.vocab_size,
            self._config.speculative_config.max_drafts,
            hidden_size,
            self._model.is_bidirectional,
        )
        for positions in self._positions:
            positions.bind(slots)
        for adapters in self._adapters:
            adapters.bind(slots)
        return slots

    def runner(self) -> ModelRunner:
        config, peers = self._config, self._peers
        output, following = self._pooling() if config.pooling is not None else self._sampling()
        extensions: list[Extension] = [
            *self._states,
            *self._step_checks(),  # of the model alone, before adapters are bound to it
            *self._adapters,
            *self._media_extensions(),
            *following,
        ]
        has_encoder = self._features is not None
        return ModelRunner(
            config,
            self._device,
            ModelStep(self._inputs, self._slots, runs_without_rows=peers.share_experts),
            self._cache,
            ModelLoader(config, self._model, self._device, peers, has_encoder=has_encoder, has_drafts=self._has_drafts),
            self._make_plan,
            peers,
            output,
            extensions,
        )

    def _make_plan(self, model: Any, sizes: tuple[int, ...]) -> Plan:
        config, inputs = self._config, self._inputs
        # ranks that share experts exchange their numbers of rows, unless a graph fixes them
        is_sync_free = inputs.is_made_on_device and not self._peers.share_experts
        num_rows = config.max_num_seqs * (1 + config.speculative_config.max_drafts)
        return self._device_parts.make_plan(
            config.plan,
            model,
            self._device,
            inputs,
            self._cache,
            self._on_op,
            self._peers.rank_group,
            sizes,
            inputs.padded(num_rows) if is_sync_free else 0,
        )

    def _pooling(self) -> tuple[Output, list[Extension]]:
        config, rank = self._config, self._peers.rank % self._config.tensor_parallel_size
        assert config.pooling is not None
        output = StepPooling(rank, self._device, self._inputs, self._slots, config.pooling, self._model.hidden_size)
        return output, []

    def _sampling(self) -> tuple[Output, list[Extension]]:
        config, ranks = self._config, self._peers.ranks
        sampling = self._slot_sampling
        extensions: list[Extension] = []
        layers = self._draft_layers() if self._has_drafts else None
        drafting = make_drafting(config.speculative_config, self._slots, layers, ranks)
        extensions += [MtpSteps(layers)] if layers is not None else []
        extensions += [drafting] if drafting is not None else []
        max_drafts = config.speculative_config.max_drafts
        extensions.append(Grammars(sampling, max_drafts, lambda: _matching(config), ranks))
        rank, runs_ahead = self._peers.rank % config.tensor_parallel_size, drafting is None
        return StepSampling(rank, self._device, self._inputs, sampling, ranks, runs_ahead=runs_ahead), extensions

    def _draft_layers(self) -> MtpDrafter:
        marks = map_marks(self._arena, self._spec, self._config.num_kv_blocks)
        own = self._config, self._model, self._device, self._inputs, self._slots, self._cache, marks
        return mtp_kind(self._inputs)(*own, self._on_op, self._peers.rank_group)

    def _step_checks(self) -> list[Extension]:
        is_checked = self._config.ops in ("fused", "cuda") and self._peers.are_none
        return [StepCheck(self._config, self._device)] if is_checked else []

    def _media_extensions(self) -> list[Extension]:
        found: list[Extension] = []
        for columns in self._media:
            media = Media(self._features, self._slots, self._device, self._peers.ranks, self._config.plan, self._on_op)
            columns.bind(media.slots, self._slots.token_ids)
            found.append(media)
        return found


def _matching(config: EngineConfig) -> Matching:
    """Return a matching with the vocabulary that a tokenizer wrote into the run directory."""
    from engine.grammars.matching import Matching

    return Matching(GrammarTokens.read(Run(config.run_id, Path(config.run_dir)).vocabulary_path))
