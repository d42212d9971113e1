"""One rank's step from message to result: slots, inputs, plan, sampling. No process, ring or clock of the engine in it.

Owned by the worker actor (and by tests, directly). Steps are idempotent: a row's tokens, its keys and values and what it
samples depend on the step and the slots alone, so a step that was lost with a worker is run again after its SlotStarts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.messages import PromptLogprobs, Step, StepResult
from engine.model_config import ModelConfig
from workers import sampler
from workers.device import make_device
from workers.inputs import StepInputs
from workers.kv_cache import map_kv_cache
from workers.loader import CacheOutcome, Progress, load_model
from workers.plan import Plan, make_plan
from workers.precision import Precision
from workers.sampler import Draw
from workers.slots import Slots
from workers.weight_cache import WeightCache


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What the runner serves with now. Version 0: none (cleared)."""

    path: str
    version: int
    num_bytes: int
    plan: Plan | None
    cache: CacheOutcome = "off"


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a Step as arrays."""

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    is_sampling: np.ndarray

    @staticmethod
    def of(step: Step) -> _Rows:
        return _Rows(
            np.frombuffer(step.slots, np.int32),
            np.frombuffer(step.start, np.int32),
            np.frombuffer(step.num_tokens, np.int32),
            np.frombuffer(step.is_sampling, np.int8).astype(np.bool_),
        )

    @property
    def ends(self) -> np.ndarray:
        return self.starts + self.counts


class Runner:
    """Weights, slots and inputs of one rank over its KV arena."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, arena: memoryview, rank: int = 0) -> None:
        self._config = config
        self._model_config = model_config
        self._rank = rank
        device = make_device(config.device, config.ops, config.threads)
        self._ops = device.ops
        self._cache = map_kv_cache(arena, model_config, config.num_kv_blocks, config.block_size, device)
        self.inputs = StepInputs(
            device,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            config.block_size,
            self._ops.row_tile,
        )
        self.slots = Slots(self.inputs.host_block_tables, config.max_model_len, model_config.vocab_size)
        cache_directory = config.weight_cache_dir
        self._weight_cache = WeightCache(Path(cache_directory), config.weight_cache_limit) if cache_directory else None
        self.weights = LoadedWeights("", 0, 0, None)

    # ------------------------------------------------------------------------------------------------------ weights

    def load(self, path: str, version: int, on_progress: Progress) -> None:
        """Load the checkpoint at `path` beside the present weights, then take its place. On an error (CheckpointError) the
        present ones stay."""
        found = ModelConfig.read(path)
        differences = self._model_config.shape_differences(found)
        if differences:
            raise CheckpointError(
                f"{path} is another model than the engine was started with ({'; '.join(differences)}); "
                "start a new engine for it"
            )
        is_random = self._config.load_format == "dummy"
        seed = self._config.seed + version - 1 if is_random else None
        loaded = load_model(
            Path(path),
            found,
            self._ops,
            self._config.max_model_len,
            on_progress,
            precision=Precision(self._config.dtype, self._config.quantization),
            random_seed=seed,
            cache=self._weight_cache,
        )
        self._clear_dummy_block()
        plan = make_plan(self._config.plan, loaded.model, self._ops, self.inputs, self._cache)
        self.weights = LoadedWeights(path, version, loaded.num_bytes, plan, loaded.cache)

    def clear(self) -> None:
        """Let go of the weights."""
        self.weights = LoadedWeights("", 0, 0, None)

    def _clear_dummy_block(self) -> None:
        """Masked keys are read there: what weights that went wrong (NaN) left must not reach those that follow."""
        for layer in self._cache.layers:
            layer.keys[: self._cache.block_size] = 0.0
            layer.values[: self._cache.block_size] = 0.0

    # --------------------------------------------------------------------------------------------------------- steps

    def run(self, step: Step) -> StepResult:
        """Run one step. Calling it without weights is the scheduler's bug (AssertionError)."""
        plan = self.weights.plan
        assert plan is not None, f"step {step.step_id} came while the weights are cleared"
        begin_ns = time.monotonic_ns()
        rows = self._take(step)
        sampling_rows = np.flatnonzero(rows.is_sampling)
        prompt_rows = self._prompt_rows(rows)
        self._fill_inputs(rows, sampling_rows, prompt_rows)
        logits = plan.replay() if self.inputs.num_tokens else None
        values = np.empty((0, self._model_config.vocab_size), np.float32) if logits is None else logits.numpy()
        run_ns = time.monotonic_ns()
        result = self._sample(step, rows, sampling_rows, values)
        self._add_prompt_logprobs(result, rows, prompt_rows, values[len(sampling_rows) :])
        result.num_tokens = self.inputs.num_tokens
        result.run_ns, result.sample_ns = run_ns - begin_ns, time.monotonic_ns() - run_ns
        return result

    def _take(self, step: Step) -> _Rows:
        """Put the step's new samples and block-table growth into the slots."""
        for start in step.starts:
            self.slots.start(start)
        block_slots = np.frombuffer(step.block_slots, np.int32)
        indexes = np.frombuffer(step.block_indexes, np.int32)
        self.slots.block_tables[block_slots, indexes] = np.frombuffer(step.block_ids, np.int32)
        if step.starts or len(block_slots):
            self.inputs.set_block_tables_changed()
        return _Rows.of(step)

    def _prompt_rows(self, rows: _Rows) -> dict[int, int]:
        """Rows whose prompt log-probabilities are wanted -> how many of their positions (the first ones) give one: position p
        gives that of token p + 1, so the prompt's last gives none."""
        result = {}
        for row in np.flatnonzero(self.slots.wants_prompt_logprobs[rows.slots]).tolist():
            last = int(self.slots.num_prompt_tokens[rows.slots[row]]) - 1
            count = min(int(rows.ends[row]), last) - int(rows.starts[row])
            if count > 0:
                result[row] = count
        return result

    def _fill_inputs(self, rows: _Rows, sampling_rows: np.ndarray, prompt_rows: dict[int, int]) -> None:
        self.inputs.set_rows(rows.slots, rows.starts, rows.counts, self.slots.token_ids)
        ends = np.cumsum(rows.counts)
        first_rows = ends - rows.counts
        wanted = [ends[sampling_rows] - 1]
        wanted += [first_rows[row] + np.arange(count) for row, count in prompt_rows.items()]
        self.inputs.set_logit_rows(np.concatenate(wanted))

    def _sample(self, step: Step, rows: _Rows, sampling_rows: np.ndarray, logits: np.ndarray) -> StepResult:
        token_ids = np.full(len(rows.slots), -1, np.int32)
        logprobs, ranks = np.zeros(len(rows.slots), np.float32), np.zeros(len(rows.slots), np.int32)
        top_rows: dict[int, tuple[bytes, bytes]] = {}
        if len(sampling_rows):
            logits = logits[: len(sampling_rows)]
            draws = [self._draw(int(rows.slots[row]), int(rows.ends[row])) for row in sampling_rows]
            drawn = sampler.sample(logits, draws)
            norms = sampler.normalizers(logits)
            with_ranks = any(draw.sampling.params.num_logprobs >= 0 for draw in draws)
            of_drawn = sampler.token_logprobs(logits, drawn, norms, with_ranks)
            token_ids[sampling_rows], logprobs[sampling_rows], ranks[sampling_rows] = drawn, of_drawn.logprobs, of_drawn.ranks
            for index, (row, draw) in enumerate(zip(sampling_rows.tolist(), draws, strict=True)):
                self.slots.append(int(rows.slots[row]), int(rows.ends[row]), int(drawn[index]))
                if draw.sampling.params.num_logprobs > 0:
                    ids, values = sampler.top_logprobs(logits[index], norms[index], draw.sampling.params.num_logprobs)
                    top_rows[row] = ids.tobytes(), values.tobytes()
        return StepResult(
            step_id=step.step_id,
            rank=self._rank,
            weight_version=self.weights.version,
            token_ids=token_ids.tobytes(),
            logprobs=logprobs.tobytes(),
            ranks=ranks.tobytes(),
            top_rows=top_rows,
            dispatch_ns=step.dispatch_ns,
        )

    def _draw(self, slot: int, position: int) -> Draw:
        return Draw(self.slots.sampling[slot], self.slots.token_ids[slot, :position], int(self.slots.num_prompt_tokens[slot]))

    def _add_prompt_logprobs(self, result: StepResult, rows: _Rows, prompt_rows: dict[int, int], logits: np.ndarray) -> None:
        begin = 0
        for row, count in prompt_rows.items():
            slot, first = int(rows.slots[row]), int(rows.starts[row]) + 1
            row_logits = logits[begin : begin + count]
            begin += count
            norms = sampler.normalizers(row_logits)
            of_tokens = sampler.token_logprobs(row_logits, self.slots.token_ids[slot, first : first + count], norms, True)
            num_top = min(self.slots.sampling[slot].params.num_prompt_logprobs, self._model_config.vocab_size)
            tops = [sampler.top_logprobs(values, norm, num_top) for values, norm in zip(row_logits, norms, strict=True)]
            result.prompt_rows[row] = PromptLogprobs(
                start=first,
                num_top=num_top,
                token_logprobs=of_tokens.logprobs.tobytes(),
                token_ranks=of_tokens.ranks.tobytes(),
                top_token_ids=b"".join(token_ids.tobytes() for token_ids, _ in tops),
                top_logprobs=b"".join(values.tobytes() for _, values in tops),
            )
