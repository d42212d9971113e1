"""Steps without an engine: a runner in this process, with random sequences in its slots or a picture for its encoder, and
timings.

Used by `tokamak bench step`. A step is idempotent, so the same one is run repeatedly. Keys and values of the context are zeros:
no kernel's time depends on them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.vision_config import VisionConfig
from engine.config import EngineConfig
from engine.messages import Encode, EncoderCall, SamplingParams, SlotStart, Step
from ops.cpu.executors import OpProfile, Tape
from shm.encoder_arena import EncoderArena
from shm.extent_slab import ExtentSlab
from shm.segment import MemoryFile
from shm.slab import SlabHandle
from workers.assembly import RunnerParts
from workers.engine.tape_plan import TapePlan
from workers.extensions.media.encoder import Encoder
from workers.extensions.media.features import Features
from workers.extensions.media.media import Media
from workers.rank_group.peers import Peers
from workers.runners import cpu_runner

_UNIT = bytes(32)  # the hash of the picture

Jobs = list[list[int]]  # nanoseconds of the tasks of each job


@dataclass(frozen=True, slots=True)
class Case:
    """Step with `batch` sequences that each compute `num_tokens` positions, of which the last `num_drafts` are drafts, up to a
    length of `context`; or a call of the encoder for an image of `num_tokens` patches."""

    phase: str  # "decode" | "prefill" | "encode"
    batch: int
    num_tokens: int
    context: int
    grid: tuple[int, int] = (0, 0)  # patches of the picture in height and width
    num_drafts: int = 0

    @staticmethod
    def of_picture(size: tuple[int, int], vision: VisionConfig) -> Case:
        """Return the case of a picture of this width and height in pixels, rounded to whole tokens."""
        merge, pixels = vision.spatial_merge_size, vision.merged_pixels
        rows, columns = (merge * max(1, round(side / pixels)) for side in reversed(size))
        return Case("encode", 1, rows * columns, 0, (rows, columns))

    @property
    def unit(self) -> str:
        return "patches" if self.phase == "encode" else "rows" if self.num_drafts else "tokens"

    @property
    def num_kept(self) -> int:
        """Number of rows with logits."""
        return self.batch * (1 + self.num_drafts)

    def num_blocks(self, block_size: int) -> int:
        return self.batch * -(-(self.context + 1) // block_size)

    @property
    def title(self) -> str:
        if self.phase == "decode":
            drafts = f", {self.num_drafts} drafts each" if self.num_drafts else ""
            return f"decode, batch {self.batch}, context {self.context - self.num_drafts}{drafts}"
        if self.phase == "encode":
            return f"encode, {self.grid[0]} x {self.grid[1]} patches"
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
    replay_s: float  # part of it in tapes
    sample_s: float  # part of it in sampling
    ops: list[TimedOp]

    @property
    def rest_s(self) -> float:
        """Time of Python around the replay: inputs and results."""
        return max(0.0, self.step_s - self.replay_s - self.sample_s)


class Replays:
    """Runner with weights, for cases that fit `config`; pictures have at most `encoder_cache_size` tokens."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._model = ModelConfig.read(config.model)
        self._arena = MemoryFile.create("bench", config.kv_cache_bytes)
        features = None
        if config.encoder_cache_size:
            shape = config.encoder_cache_size, config.encoder_row_width, config.dtype
            memory = MemoryFile.create("bench-encoder", EncoderArena.num_bytes_of(*shape))
            features = Features(EncoderArena(memory, *shape), _no_slab)
        self._states = MemoryFile.create("bench-states", config.state_bytes) if config.state_bytes else None
        states = self._states.buffer if self._states else None
        parts = RunnerParts(config, self._model, self._arena.buffer, Peers(config), features=features, states=states)
        self._runner = cpu_runner(parts).core
        self._runner.load(config.model, 1, lambda num_done, num_bytes: None)
        plan = self._runner.weights.plan
        assert isinstance(plan, TapePlan), f"{type(plan).__name__} has no tape"
        self._plan = plan

    def close(self) -> None:
        self._runner.clear()

    def kinds(self) -> set[str]:
        """Formats of the linears' weights."""
        profiles = [profile for tape in (self._plan.tape, self._plan.head) for profile in tape.profile()]
        return {profile.work.format.kind for profile in profiles if profile.kind == "linear"}

    def time(self, case: Case, repeat: int, sampling: SamplingParams) -> Timed:
        run = self._begun(case, sampling)
        steps_ns, replays_ns, samples_ns, ops_ns = [], [], [], []
        for _ in range(repeat):
            begin_ns = time.monotonic_ns()
            samples_ns.append(run())
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
        """Return the tasks of each op in each repetition, divided for `num_threads`."""
        self._begun(case, SamplingParams(temperature=0.0))
        times = [[op for tape in self._tapes(case) for op in tape.replay_alone(num_threads)] for _ in range(repeat)]
        profiles = [profile for tape in self._tapes(case) for profile in tape.profile()]
        return list(zip(profiles, map(list, zip(*times, strict=True)), strict=True))

    def _begun(self, case: Case, sampling: SamplingParams) -> Callable[[], int]:
        """Run the step once, and return a function that runs it again and returns the nanoseconds of sampling."""
        if case.phase == "encode":
            call, pixels = self._call(case)

            def encode() -> int:
                self._encoder.run(call, pixels)
                return 0

            encode()
            return encode
        again = self._step(case, None)

        def run(step: Step) -> int:
            slots = self._runner.slots
            slots.num_tokens[: case.batch] = case.context - case.num_drafts
            slots.num_drafts[: case.batch] = case.num_drafts
            return self._runner.run(step).sample_ns

        self._runner.run(self._step(case, sampling))
        run(again)
        return lambda: run(again)

    @property
    def _encoder(self) -> Encoder:
        media = self._runner.find(Media)
        assert media is not None
        assert media.encoder is not None, "the model takes no pictures"
        return media.encoder

    def _call(self, case: Case) -> tuple[EncoderCall, dict[bytes, np.ndarray]]:
        """Return the call of an encoder with random pixels."""
        config, (height, width) = self._encoder.config, case.grid
        sides = height * config.patch_size, width * config.patch_size
        encode = Encode(_UNIT, 0, config.num_tokens_of(height, width), height, width, "", SlabHandle(0, 0, 0, 0))
        pixels = np.random.default_rng(0).integers(0, 256, (1, *sides, 3), np.uint8)
        return EncoderCall(1, [encode], 0, config.num_passes, config.num_passes), {_UNIT: pixels}

    def _tapes(self, case: Case) -> Iterator[Tape]:
        """Yield the tapes of the step in order, each with its own rows: the model, then the head for some rows at a time."""
        if case.phase == "encode":
            yield from self._encoder.tapes
            return
        yield self._plan.tape
        inputs = self._runner.inputs
        kept_rows = np.arange(case.num_kept)
        for begin in range(0, case.num_kept, inputs.max_logit_rows):
            inputs.set_logit_rows(kept_rows[begin : begin + inputs.max_logit_rows])
            yield self._plan.head

    def _step(self, case: Case, sampling: SamplingParams | None) -> Step:
        """Return the step; with `sampling`, its sequences are first added to the slots."""
        return Step(
            step_id=1,
            starts=list(self._starts(case, sampling)) if sampling else [],
            slots=_int32(range(case.batch)),
            start=_int32([case.context - case.num_tokens] * case.batch),
            num_tokens=_int32([case.num_tokens - case.num_drafts] * case.batch),
            num_drafts=_int32([case.num_drafts] * case.batch) if case.num_drafts else b"",
            is_sampling=np.ones(case.batch, np.int8).tobytes(),
            block_slots=b"",
            block_indexes=b"",
            block_ids=b"",
            states=_int32(self._state_numbers(case)),
        )

    def _state_numbers(self, case: Case) -> Iterator[int]:
        """Yield the slots of each sequence's states: it reads one up to its rows, and writes the next one."""
        for slot in range(case.batch if self._states else 0):
            position = max(0, case.context - case.num_tokens - self._config.speculative_config.num_overlap)
            yield from (2 * slot + 1, position, 2 * slot + 2, 0, 0)

    def _starts(self, case: Case, sampling: SamplingParams) -> Iterable[SlotStart]:
        generator = np.random.default_rng(0)
        num_blocks = case.num_blocks(self._config.block_size) // case.batch
        num_tables = self._runner.slots.block_tables.shape[1]
        for slot in range(case.batch):
            token_ids = generator.integers(0, self._model.vocab_size, case.context - case.num_drafts, np.int32)
            pages = 1 + num_tables * (slot * num_blocks + np.arange(num_blocks, dtype=np.int32))
            tables = [(pages + number).astype(np.int32).tobytes() for number in range(num_tables)]
            start = SlotStart(slot, f"{slot}", token_ids.tobytes(), len(token_ids), sampling, tables[0])
            start.other_block_ids = tuple(tables[1:])
            start.max_total_tokens = case.context + 1
            yield start


def _no_slab(name: str) -> ExtentSlab:
    raise AssertionError(f"pixels come with the call, not from {name}")


def _int32(values: Iterable[int]) -> bytes:
    return np.array(list(values), np.int32).tobytes()
