"""Steps of an engine's shape without an engine: a runner in this process, random samples in its slots, and what takes how long.

Used by `tokamak bench step`. A step is idempotent, so one and the same is run over and over. Keys and values of the context are
those that the arena begins with, zeros: no kernel's time depends on them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.messages import SamplingParams, SlotStart, Step
from ops.cpu.executors import OpProfile, Tape
from ops.weight_format import WeightFormat
from shm.segment import MemoryFile
from workers.runner import ModelRunner
from workers.step.execution import TapePlan

Jobs = list[list[int]]  # nanoseconds of the tasks that threads share, job by job


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` sequences that each compute `num_tokens` positions and then have `context`."""

    phase: str  # "decode" | "prefill"
    batch: int
    num_tokens: int
    context: int

    def num_blocks(self, block_size: int) -> int:
        return self.batch * -(-(self.context + 1) // block_size)

    @property
    def title(self) -> str:
        if self.phase == "decode":
            return f"decode, batch {self.batch}, context {self.context}"
        return f"prefill, {self.num_tokens} tokens"


@dataclass(frozen=True, slots=True)
class TimedOp:
    profile: OpProfile
    seconds: float  # median


@dataclass(frozen=True, slots=True)
class Timed:
    """Medians over the repetitions, in seconds."""

    case: Case
    step_s: float  # from the message to the result
    replay_s: float  # of it in the tapes
    sample_s: float  # of it in sampling
    ops: list[TimedOp]

    @property
    def rest_s(self) -> float:
        """Python around the replay: inputs, results."""
        return max(0.0, self.step_s - self.replay_s - self.sample_s)


class Replays:
    """A runner with its weights, for cases that fit `config`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._model = ModelConfig.read(config.model)
        self._arena = MemoryFile.create("bench", config.kv_cache_bytes)
        self._runner = ModelRunner(config, self._model, self._arena.buffer)
        self._runner.load(config.model, 1, lambda num_done, num_bytes: None)
        plan = self._runner.weights.plan
        assert isinstance(plan, TapePlan), f"{type(plan).__name__} has no tape"
        self._plan = plan

    def close(self) -> None:
        self._runner.clear()

    def formats(self) -> set[WeightFormat]:
        """Of the weights that the ops multiply with."""
        return {profile.work.format for tape in (self._plan.tape, self._plan.head) for profile in tape.profile()}

    def time(self, case: Case, repeat: int, sampling: SamplingParams) -> Timed:
        self._runner.run(self._step(case, sampling))
        again = self._step(case, None)
        steps_ns, replays_ns, samples_ns, ops_ns = [], [], [], []
        for _ in range(repeat):
            begin_ns = time.monotonic_ns()
            samples_ns.append(self._runner.run(again).sample_ns)
            steps_ns.append(time.monotonic_ns() - begin_ns)
            begin_ns = time.monotonic_ns()
            for tape in self._tapes(case):
                tape.replay()
            replays_ns.append(time.monotonic_ns() - begin_ns)
            ops_ns.append([time_ns for tape in self._tapes(case) for time_ns in tape.replay_timed()])
        profiles = [profile for tape in self._tapes(case) for profile in tape.profile()]
        medians = [statistics.median(times) / 1e9 for times in zip(*ops_ns, strict=True)]
        ops = [TimedOp(profile, median_s) for profile, median_s in zip(profiles, medians, strict=True)]
        step_s, replay_s, sample_s = (statistics.median(times) / 1e9 for times in (steps_ns, replays_ns, samples_ns))
        return Timed(case, step_s, replay_s, sample_s, ops)

    def time_alone(self, case: Case, repeat: int, num_threads: int) -> list[tuple[OpProfile, list[Jobs]]]:
        """Of each op its tasks in each repetition, as so many threads would share them."""
        self._runner.run(self._step(case, SamplingParams(temperature=0.0)))
        times = [[op for tape in self._tapes(case) for op in tape.replay_alone(num_threads)] for _ in range(repeat)]
        profiles = [profile for tape in self._tapes(case) for profile in tape.profile()]
        return list(zip(profiles, map(list, zip(*times, strict=True)), strict=True))

    def _tapes(self, case: Case) -> Iterator[Tape]:
        """What the step that the inputs hold replays, in order, each with its own rows: the model, and the head for some rows
        at a time."""
        yield self._plan.tape
        inputs = self._runner.inputs
        kept_rows = np.arange(case.batch)  # one of each sequence
        for begin in range(0, case.batch, inputs.max_logit_rows):
            inputs.set_logit_rows(kept_rows[begin : begin + inputs.max_logit_rows])
            yield self._plan.head

    def _step(self, case: Case, sampling: SamplingParams | None) -> Step:
        """The step; with `sampling` its samples are put into the slots first."""
        return Step(
            step_id=1,
            starts=list(self._starts(case, sampling)) if sampling else [],
            slots=_int32(range(case.batch)),
            start=_int32([case.context - case.num_tokens] * case.batch),
            num_tokens=_int32([case.num_tokens] * case.batch),
            is_sampling=np.ones(case.batch, np.int8).tobytes(),
            block_slots=b"",
            block_indexes=b"",
            block_ids=b"",
        )

    def _starts(self, case: Case, sampling: SamplingParams) -> Iterable[SlotStart]:
        generator = np.random.default_rng(0)
        num_blocks = case.num_blocks(self._config.block_size) // case.batch
        for slot in range(case.batch):
            token_ids = generator.integers(0, self._model.vocab_size, case.context, np.int32)
            blocks = 1 + slot * num_blocks + np.arange(num_blocks, dtype=np.int32)
            yield SlotStart(slot, f"{slot}", token_ids.tobytes(), case.context, sampling, blocks.tobytes())


def _int32(values: Iterable[int]) -> bytes:
    return np.array(list(values), np.int32).tobytes()
