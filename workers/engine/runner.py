"""One rank's step from message to result: slots, inputs, plan, sampling. No process, ring or clock of the engine in it.

Owned by the worker actor (and by tests, directly). Steps are idempotent: a row's tokens, its keys and values and what it
samples depend on the step and the slots alone, so a step that was lost with a worker is run again after its SlotStarts. (Rows
that follow drafts begin where the slot ends: those are run once after a SlotStart.)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.checkpoint.gguf.file import GgufFile
from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.errors import OutsideError
from engine.grammars.tokens import GrammarTokens
from engine.messages import Step, StepResult
from engine.process.run_directory import Run
from ops.modules import Experts
from workers.devices.capabilities import DeviceError
from workers.devices.card_ops import CardRows
from workers.devices.device import Device
from workers.engine.captures import Captures, Phase, StepMode, StepShape
from workers.engine.inputs import StepInputs
from workers.engine.kv_cache import DUMMY_BLOCK, map_kv_cache, map_marks
from workers.engine.plan import Plan
from workers.engine.rows import NO_ROWS, StepRows
from workers.engine.slots import Slots
from workers.engine.step_trace import StepTrace
from workers.engine.tape_plan import TapePlan
from workers.extensions.drafts.drafting import make_drafting, mtp_kind
from workers.extensions.drafts.mtp import MtpDrafter
from workers.extensions.grammars.constraints import Constraints
from workers.extensions.media.encoder import Encoder
from workers.extensions.media.features import Features, Missing, together
from workers.extensions.media.media_rows import MediaRows
from workers.extensions.pooling import StepPooling
from workers.models import Model, declare_model
from workers.models.loading import load_model
from workers.rank_group.peers import Peers
from workers.sampling.step_sampling import StepRun, StepSampling
from workers.selftest.op_choice import ChosenOps, check_steps, choose_ops, take_rows
from workers.weights.cache import WeightCache
from workers.weights.packed_file import PackedFile
from workers.weights.packing import CacheOutcome, Progress
from workers.weights.precision import Precision

if TYPE_CHECKING:
    from engine.grammars.matching import Matching
    from workers.extensions.adapters.arena import AdapterArena

_NONE = np.zeros(0, np.int32)
Accepted = tuple[StepRows, np.ndarray, np.ndarray, np.ndarray]  # as `MtpDrafter.keep` takes them


class LoadedWeights(msgspec.Struct, frozen=True):
    """What the runner serves with now. Version 0: none (cleared)."""

    path: str
    version: int
    num_bytes: int
    plan: Plan | None
    cache: CacheOutcome = "off"
    contents: str = ""  # LoadedModel.contents
    packed: PackedFile | None = None  # LoadedModel.packed

    def check(self) -> None:
        """OutsideError where they are not any more what was loaded."""
        trouble = self.packed.trouble() if self.packed is not None else ""
        if trouble:
            raise OutsideError(f"{trouble}; the weights are loaded again")


def _matching(config: EngineConfig) -> Matching:
    """Of the vocabulary that a tokenizer has written into the run's directory."""
    from engine.grammars.matching import Matching

    return Matching(GrammarTokens.read(Run(config.run_id, Path(config.run_dir)).vocabulary_path))


def _weight_cache(config: EngineConfig) -> WeightCache | None:
    """Several ranks share one packed file; what is not to be kept is in the directory of the run."""
    is_shared = config.num_ranks > 1
    if config.weight_cache_dir and config.load_format != "dummy":
        return WeightCache(Path(config.weight_cache_dir), config.weight_cache_limit, is_shared)
    if not is_shared:
        return None
    return WeightCache(Run(config.run_id, Path(config.run_dir)).packed_path, config.weight_cache_limit, is_shared, is_run=True)


class Parts(msgspec.Struct, frozen=True):
    """What a runner puts together."""

    device: Device
    make_inputs: Callable[..., StepInputs]
    make_plan: Callable[..., Plan]
    rows: CardRows | None = None  # to be tried before the device's ops


class ModelRunner:
    """The core of every runner (`workers/runners/`): weights, slots and inputs of one rank over its KV arena, and a step in two
    parts: `begin` enqueues it, `end` waits for it and draws. `on_op` is called within a step (`make_plan`). With `features` it
    takes media, with `adapters` rows may have one of these."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        parts: Parts,
        arena: memoryview,
        peers: Peers,
        on_op: Callable[[], None] = lambda: None,
        features: Features | None = None,
        adapters: AdapterArena | None = None,
    ) -> None:
        self._adapters = adapters
        self._communicator, self._experts, self._rank_group = peers.communicator, peers.experts, peers.rank_group
        self._share, self._rank, self._seat = peers.share, peers.rank, peers.seat
        self.config = config
        self._on_op = on_op
        self._model_config = model_config
        self._parts = parts
        self._features = features
        self.device = device = parts.device
        if config.ops in ("fused", "cuda"):
            chosen = self._chosen_ops(parts.rows)
            device.ops, device.fallbacks = chosen.ops, chosen.fallbacks
        self._are_steps_checked = (
            config.ops not in ("fused", "cuda") or self._communicator is not None or self._experts is not None
        )
        self._ops = device.ops
        has_mtp = config.speculative_config.has_mtp
        spec = KVCacheSpec.of(model_config, config.block_size, config.kv_cache_dtype, has_mtp)
        self._cache = map_kv_cache(arena, spec, config.num_kv_blocks, device)
        max_drafts = config.speculative_config.max_drafts
        self.inputs = parts.make_inputs(
            device,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            config.block_size,
            self._ops.row_tile,
            MediaRows(model_config, features.arena.rows if features else None) if model_config.vision else None,
            config.max_cudagraph_capture_size,
            max_drafts,
            model_config.max_position_embeddings if model_config.bidirectional else 0,
            adapters is not None,
            config.graph_only_prefill,
        )
        # ranks that share experts ask each other how many rows they have, where no graph has that fixed
        may_sync = self.inputs.in_place is None or self._experts is not None
        self._max_sync_free_rows = 0 if may_sync else self.inputs.padded(config.max_num_seqs * (1 + max_drafts))
        phase = Phase.PREFILL if config.graph_only_prefill else Phase.DECODE
        sizes = config.cudagraph_capture_sizes
        self._captures = Captures(sizes, max_drafts, phase)
        self._is_warm, self._are_warm = False, True  # what is to be replayed is there: of this rank, of those that it runs with
        self.mode = StepMode(Phase.NONE, max_drafts)  # of the last step
        self.ran: list[tuple[int, bool]] | None = None  # rows of steps, and whether as captured; None: all are alike
        if config.plan == "captured" or config.ops != "native":
            self.ran = []
        # of layers that draft; those of devices stay there
        hidden_size = model_config.hidden_size if has_mtp and self.inputs.in_place is None else 0
        pooled_size = model_config.hidden_size if config.pooling and config.pooling.needs_all_tokens else 0
        sizes = (
            config.max_model_len,
            model_config.vocab_size,
            max_drafts,
            hidden_size,
            pooled_size,
            model_config.bidirectional is not None,
        )
        self.slots = Slots(self.inputs.host_block_tables, *sizes)
        self.mtp: MtpDrafter | None = None
        if has_mtp:
            marks = map_marks(arena, spec, config.num_kv_blocks)
            make_mtp = mtp_kind(self.inputs)
            self.mtp = make_mtp(config, model_config, device, self.inputs, self.slots, self._cache, marks)
        self.drafting = make_drafting(config.speculative_config, self.slots, self.mtp, self._communicator)
        self.constraints = Constraints(
            self.slots, model_config.vocab_size, max_drafts, lambda: _matching(config), self._communicator
        )
        tensor_rank = self._rank % config.tensor_parallel_size
        self._sampling: StepSampling | StepPooling
        if config.pooling is not None:
            self._sampling = StepPooling(tensor_rank, device, self.inputs, self.slots, config.pooling)
        else:
            self._sampling = StepSampling(
                tensor_rank, device, self.inputs, self.slots, self._communicator, self.drafting, self.constraints
            )
        self._accepted: Accepted | None = None  # of the last step, for the layers that draft
        self.encode_ns = 0  # of all steps so far
        self.encoder: Encoder | None = None  # of the weights, in models that take media
        self._weight_cache = _weight_cache(config)
        self.weights = LoadedWeights("", 0, 0, None)
        self.mixtures: list[Experts] = []  # of the weights that were loaded last, where ranks share them
        self.trace: StepTrace | None = None  # of the worker that it works for
        self._step_ns = 0  # of the last one
        self._draft_ns = 0  # of it, for guesses that layers made when it began

    def _chosen_ops(self, rows: CardRows | None) -> ChosenOps:
        """Those that are right on this device, for this model."""
        config, device = self.config, self.device
        fallbacks: tuple[tuple[str, str], ...] = ()
        if rows is not None:
            precision = Precision(config.dtype, config.quantization)
            taken = take_rows(device, rows, self._model_config, precision, config.kv_cache_dtype)
            if taken is not None:
                return taken
            fallbacks = (("all", "cuda"),)
        elif config.ops == "cuda":
            device.agreed_fault("they are not built")
        has_encoder, has_drafts = self._features is not None, config.speculative_config.has_mtp
        _, declared = declare_model(self._model_config, self._share, has_encoder=has_encoder, has_drafts=has_drafts)
        name, allows_variant = device.capabilities.place, config.allow_variant_ops
        chosen = choose_ops(device.ops, name, self._model_config, declared, allows_variant=allows_variant)
        return msgspec.structs.replace(chosen, fallbacks=fallbacks + chosen.fallbacks)

    # ------------------------------------------------------------------------------------------------------ weights

    def load(self, path: str, version: int, on_progress: Progress, contents: str = "") -> None:
        """Load the checkpoint at `path` beside the present weights, which it then replaces. On an error (CheckpointError) the
        present ones stay. ContentsError where `contents` are asked for and it holds others. Random weights need nothing of the
        checkpoint but that its shape was right when they were loaded first, before their contents were known."""
        is_random = self.config.load_format == "dummy"
        if is_random and path != self.config.model and not contents:
            self._model_config.of_same_shape(Path(path), GgufFile.of_checkpoint(Path(path)))
        seed = self.config.seed + version - 1 if is_random else None
        with self.device.threads_of(self._seat.count):
            loaded = load_model(
                Path(path),
                self._model_config,
                self._ops,
                self.config.max_model_len,
                on_progress,
                precision=Precision(self.config.dtype, self.config.quantization, self.config.vision_quantization),
                random_seed=seed,
                cache=self._weight_cache,
                contents=contents,
                share=self._share,
                has_encoder=self._features is not None,
                has_drafts=self.mtp is not None,
                node=self._seat.node,
            )
        if self._adapters is not None:
            self._adapters.bind(loaded.linears)
        if self._experts is not None:
            for layer, mixture in enumerate(loaded.mixtures):
                mixture.owners = self._experts.owners[layer]
                mixture.counts = None if self._experts.counts is None else self._experts.counts[layer]
            self.mixtures = loaded.mixtures
        # padded rows write the dummy block, masked keys are read there: what weights that went wrong (NaN) left must not
        # reach those that follow
        self._ops.clear_block(self._cache, DUMMY_BLOCK)
        if not self._are_steps_checked:
            limit, allows_variant = self.config.max_model_len, self.config.allow_variant_ops
            check_steps(self.device, loaded.model, self.config.kv_cache_dtype, limit, allows_variant=allows_variant)
            self._are_steps_checked = True
        self.encoder = self._make_encoder(loaded.model, version)
        name, sizes = self.config.plan, self._captures.sizes
        of_device = self._on_op, self._rank_group, sizes, self._max_sync_free_rows
        plan = self._parts.make_plan(name, loaded.model, self.device, self.inputs, self._cache, *of_device)
        if self.mtp is not None:
            self.mtp.load(loaded.model, self._on_op, self._rank_group)
        self._is_warm = self._communicator is None and self._experts is None
        if self._is_warm:  # ranks of a rank group load at times of their own, and a replay takes all of them
            self._warm_up(plan)
        self.weights = LoadedWeights(path, version, loaded.num_bytes, plan, loaded.cache, loaded.contents, loaded.packed)

    def _warm_up(self, plan: Plan) -> None:
        """Run a step of the most rows, where nobody knows yet that it fits beside the cache, and replay what was captured once,
        layers that draft too: with padded rows alone, so only the dummy block is written."""
        if self.config.is_cache_estimated and self._communicator is None:  # else it would wait for ranks that load
            self._rehearse(plan)
        for size in self._captures.sizes:
            mode = StepMode(Phase.NONE, self._captures.num_drafts, size)
            self._set_rows(NO_ROWS, _NONE, mode)
            self._run_rows(plan, mode)
            if self.mtp is not None:
                self.mtp.store(plan, mode)
        if self.mtp is not None:
            self.mtp.warm_up()

    def _warm_up_together(self, plan: Plan) -> None:
        """In the first step of all ranks that is replayed, and of those after one of them has loaded weights alone: what the
        others had captured is captured anew with it."""
        self._is_warm = True
        self._warm_up(plan)

    def _rehearse(self, plan: Plan) -> None:
        """DeviceError: a step of the most rows does not fit."""
        inputs = self.inputs
        try:
            inputs.set_rows(_NONE, _NONE, _NONE, _NONE, self.slots.token_ids, self.slots)
            inputs.pad(inputs.max_rows)
            inputs.set_logit_rows(np.arange(inputs.max_logit_rows))
            plan.replay()
            self.device.fetch("logits", plan.logits()).wait()
        except (RuntimeError, MemoryError) as error:
            raise DeviceError(
                f"{self.device.capabilities.place}: a step of {inputs.max_rows} rows does not fit beside the weights and "
                f"{self.config.num_kv_blocks} KV blocks: {error}; lower --gpu-memory-utilization or --max-num-batched-tokens, "
                "or give --num-kv-blocks"
            ) from error

    def clear(self) -> None:
        """Let go of the weights."""
        self.weights = LoadedWeights("", 0, 0, None)
        self.mixtures = []
        self.encoder = None
        self._accepted = None
        if self.mtp is not None:
            self.mtp.clear()

    def _make_encoder(self, model: Model, version: int) -> Encoder | None:
        """None: the model takes no media, or is not to."""
        if self._features is None or model.encoder is None:
            return None
        place, count = (0, 1) if self._communicator is None else (self._communicator.place, self._communicator.count)
        arena, plan = self._features.arena, self.config.plan
        return Encoder(model.encoder, self.device, arena, version, plan, place, count, self._on_op)

    # --------------------------------------------------------------------------------------------------------- steps

    @property
    def can_run_ahead(self) -> bool:
        """Whether a step may begin before the result of the last one is taken: nobody has to know or to guess in between."""
        return self.drafting is None and self._communicator is None and self._experts is None

    def run(self, step: Step) -> StepResult:
        """Begin a step and end it."""
        return self.end(self.begin(step))

    def begin(self, step: Step) -> StepRun | StepResult:
        """Enqueue a step up to its first logits; the result of one that cannot be run. The one before must have ended, since
        what it drew is read, but where the device has that (`StepRun.is_drawn_there`). Calling it without weights is the
        scheduler's bug (AssertionError)."""
        plan = self.weights.plan
        assert plan is not None, f"step {step.step_id} came while the weights are cleared"
        begin_ns = time.monotonic_ns()
        if self._communicator is not None:
            self._communicator.begin_step(step.step_id)
        rows = self._take(step)
        encoded, missing = self._encode(step, rows)
        if missing:
            return self._not_run(step, missing)
        self.mode = self._mode(rows)
        if self._is_cold(plan):
            self._warm_up_together(plan)
        is_drafting: np.ndarray | None = None
        self._draft_ns = 0
        if self.mtp is not None and (step.starts or step.block_slots):
            self.mtp.begin(rows, step)
        if self.mtp is not None and (step.num_drafts or step.wants_drafts):  # else nothing of it is run, nor kept
            draft_ns = time.monotonic_ns()
            is_drafting = self.mtp.are_drafting(rows, step.wants_drafts)
            self.mtp.prepare(rows, self.mode, is_drafting)
            self._draft_ns = time.monotonic_ns() - draft_ns
        prompt_rows = self._sampling.prompt_rows(rows)
        kept_counts = self._sampling.kept_counts(rows, prompt_rows)
        if is_drafting is not None:
            kept_counts = np.where(is_drafting, rows.counts, kept_counts)
        run = StepRun.of(step, rows, plan, prompt_rows, kept_counts.cumsum(), is_drafting, encoded)
        self._set_rows(rows, kept_counts, self.mode, self._sampling.flags(run))
        if self.mtp is not None and is_drafting is not None:
            self.mtp.draft_token()
            run.has_draft_tokens = self.mtp.has_draft_tokens
        if self.constraints.is_used:
            if run.has_draft_tokens and self.mtp is not None:
                self.mtp.tell()
            self.constraints.look_ahead(rows)
        self._run_rows(plan, self.mode)
        run.num_tokens = self.inputs.num_tokens
        self._sampling.begin(run)
        if self.mtp is not None and is_drafting is not None and is_drafting.any() and run.num_tokens:
            self.mtp.store(plan, self.mode)
        if self.ran is not None:
            self.ran.append((self.mode.size or self.inputs.num_tokens, self.mode.size in plan.captured))
        run.run_ns = time.monotonic_ns() - begin_ns
        return run

    def end(self, run: StepRun | StepResult) -> StepResult:
        """Wait for a step that was begun: its tokens, which are the slots' then."""
        if isinstance(run, StepResult):
            return run
        begin_ns = time.monotonic_ns()
        result = self._sampling.end(run)
        self._accepted = None
        if run.is_drafting is not None and run.is_drafting.any():
            counts = np.frombuffer(result.counts, np.int32)
            self._accepted = run.rows, counts, run.is_drafting, run.kept_ends
        result.weight_version = self.weights.version
        result.encoded = run.encoded
        result.num_tokens = run.num_tokens
        result.sample_ns = run.sample_ns
        self._step_ns = run.run_ns + time.monotonic_ns() - begin_ns
        result.run_ns = self._step_ns - run.sample_ns
        return result

    def draft(self) -> int:
        """Guess what comes next in each slot, for the rows of later steps. To be called when the result of a step is sent. The
        nanoseconds that it took, with what the step itself took for guesses; 0: there was nothing to do."""
        if self.drafting is None or (self._accepted is None and self.drafting.has_passed):
            return 0
        begin_ns = time.monotonic_ns()
        plan = self.weights.plan
        if self.mtp is not None and self._accepted is not None and plan is not None:
            self.mtp.keep(*self._accepted, plan)
            self._accepted = None
        if self.drafting.has_passed:
            return time.monotonic_ns() - begin_ns + self._draft_ns
        self.drafting.propose()
        draft_ns = time.monotonic_ns() - begin_ns
        if self.inputs.num_tokens:
            self.drafting.took(self.inputs.num_tokens, self._step_ns + draft_ns)
        return draft_ns + self._draft_ns

    def run_without_rows(self) -> None:
        """This rank's part in a step of the rank group in which its own replica has nothing to do: experts for the others'
        rows."""
        plan = self.weights.plan
        assert plan is not None, "a rank without weights serves nobody"
        self.mode = self._mode(NO_ROWS)
        if self._is_cold(plan):
            self._warm_up_together(plan)
        self._set_rows(NO_ROWS, _NONE, self.mode)
        self._run_rows(plan, self.mode)

    def _mode(self, rows: StepRows) -> StepMode:
        """How these rows are run. Ranks that share experts learn of each other's where it matters."""
        own, others = StepShape.of(rows.counts, rows.num_sampled, can_replay=self._can_replay(rows)), []
        if self._captures.sizes and self._experts is not None:
            communicator = self._experts.communicator
            told = np.array([own.phase, own.num_tokens, own.can_replay, self._is_warm], np.int64)
            shapes = communicator.all_gather(told)[list(communicator.members)]
            others = [StepShape(Phase(phase), count, bool(can_replay)) for phase, count, can_replay, _ in shapes.tolist()]
            self._are_warm = bool(shapes[:, 3].all())
        return self._captures.mode(own, others)

    def _is_cold(self, plan: Plan) -> bool:
        """Whether the ranks of the rank group are to capture what this step replays. All have to: a rank that has loaded
        weights again, which a peer could not load, would else exchange what the others do not."""
        if not self.mode.size or self._rank_group is not None:  # tapes are there
            return False
        if self._communicator is not None and self._experts is None:  # else they have told it with their shapes
            self._are_warm = bool(self._communicator.all_gather(np.array([self._is_warm])).all())
        if not self._are_warm and self._is_warm:
            plan.forget()
            if self.mtp is not None:
                self.mtp.cool()
        return not self._are_warm

    def _can_replay(self, rows: StepRows) -> bool:
        """Tapes read bounds of keys, graphs do not."""
        if self.config.ops == "native" or not self._captures.sizes:
            return True
        return not ((self.slots.bounds_ends[rows.slots] > rows.starts) & (rows.counts > 0)).any()

    def _set_rows(self, rows: StepRows, kept_counts: np.ndarray, mode: StepMode, flags: np.ndarray | None = None) -> None:
        """Padding comes when all inputs of the rows are there."""
        self.inputs.set_rows(rows.slots, rows.starts, rows.counts, kept_counts, self.slots.token_ids, self.slots, flags)
        if mode.size:
            self.inputs.pad(mode.size)

    def _run_rows(self, plan: Plan, mode: StepMode) -> None:
        """Those that are set, up to the hidden states of what is kept."""
        if self.inputs.num_tokens or mode.size or self._experts is not None:
            if self.trace is not None and self.trace.is_on:
                tape = plan.tape if isinstance(plan, TapePlan) and not mode.size else None
                self.trace.replay(tape, lambda: plan.replay(mode.size))
            else:
                plan.replay(mode.size)

    def _take(self, step: Step) -> StepRows:
        """Put the step's new sequences and block-table growth into the slots."""
        if self.drafting is not None:
            self.drafting.begin_step(step)
        for start in step.starts:
            self.slots.start(start)
            self.inputs.start(self.slots, start.slot)
            self.constraints.start(start)
            if self.drafting is not None:
                self.drafting.start(start)
        block_slots = np.frombuffer(step.block_slots, np.int32)
        indexes = np.frombuffer(step.block_indexes, np.int32)
        self.slots.block_tables[block_slots, indexes] = np.frombuffer(step.block_ids, np.int32)
        self.inputs.grow(block_slots, indexes)
        units = (np.frombuffer(each, np.int32) for each in (step.unit_slots, step.unit_indexes, step.unit_rows))
        self.slots.set_unit_rows(*units)
        return StepRows.of(step, self.slots, None if self.drafting is None else self._choose)

    def _choose(self, slots: np.ndarray, granted: np.ndarray, num_rows: int, num_sampled: int) -> np.ndarray:
        """How many guesses are verified: those that pay, and that may stand."""
        assert self.drafting is not None
        counts = self.drafting.choose(slots, granted, num_rows, num_sampled)
        return self.constraints.cut(slots, counts) if self.constraints.is_used else counts

    def _encode(self, step: Step, rows: StepRows) -> tuple[list[bytes], Missing]:
        """The encoder's part of a step: units that are complete now, and those that the rows cannot read. Several ranks learn
        what any of them lacks: none runs a step that another does not."""
        reading = [
            (slot, start, start + count)
            for slot, start, count in zip(rows.slots.tolist(), rows.starts.tolist(), rows.counts.tolist(), strict=True)
            if count and start < self.slots.media_ends[slot]
        ]
        if self._features is None or (step.encoder is None and not reading):
            return [], {}
        encoded: list[bytes] = []
        missing: Missing = {}
        if step.encoder is not None:
            assert self.encoder is not None, f"step {step.step_id} encodes, and the weights have no encoder"
            begin_ns = time.monotonic_ns()
            encoded, missing = self._features.encode(step.encoder, self.encoder)
            self.encode_ns += time.monotonic_ns() - begin_ns
            if self._communicator is not None:
                self._communicator.barrier()  # the others' units are complete too
        missing |= self._features.missing(self.slots, reading, self.weights.version)
        return encoded, missing if self._communicator is None else together(self._communicator, missing)

    def _not_run(self, step: Step, missing: Missing) -> StepResult:
        if self._experts is not None:  # the rank group needs this rank all the same
            self.run_without_rows()
        return StepResult(
            step_id=step.step_id,
            rank=self._rank % self.config.tensor_parallel_size,
            weight_version=self.weights.version,
            token_ids=b"",
            logprobs=b"",
            ranks=b"",
            dispatch_ns=step.dispatch_ns,
            missing=missing,
        )
