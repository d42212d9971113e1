"""Prompts with pictures for tests of the runner: an encoder arena of their own, and the golden prompts with the features of
transformers' encoders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.vision_config import VisionConfig
from engine.messages import MediaUnit, SamplingParams
from engine.messages.media import Encode, EncoderCall
from ops.weight_format import bfloat16_bits
from shm.encoder_arena import EncoderArena
from shm.segment import MemoryFile
from shm.slab import SlabHandle
from tests.golden.make_units import pixels_of
from tests.workers.serving import GOLDEN, ServedSequence, Serving, encoder_of, golden_cases, make_runner
from workers.engine.runner import ModelRunner
from workers.extensions.media.features import Features

ARCHITECTURES = ("qwen2_5_vl", "qwen3_vl", "ernie4_5_vl_moe", "paddleocr_vl")
NUM_ROWS = 256


def shape_of_arena(path: Path, num_rows: int = NUM_ROWS, dtype: str = "float32") -> tuple[int, int, str]:
    vision = ModelConfig.read(path).vision
    assert vision is not None
    return num_rows, vision.feature_width, dtype


def make_arena(path: Path, num_rows: int = NUM_ROWS, dtype: str = "float32") -> EncoderArena:
    shape = shape_of_arena(path, num_rows, dtype)
    return EncoderArena(MemoryFile.create("encoder", EncoderArena.num_bytes_of(*shape)), *shape)


def no_slab(media: str) -> Any:
    raise AssertionError(f"{media} has no pixels here")


def make_seeing_runner(path: Path, **options: Any) -> tuple[ModelRunner, EncoderArena]:
    arena = make_arena(path, dtype=options.get("dtype", "float32"))
    return make_runner(path, features=Features(arena, no_slab), **options), arena


def store(arena: EncoderArena, first_row: int, unit_hash: bytes, features: np.ndarray, version: int = 1) -> None:
    """Store features as an encoder does."""
    arena.begin(first_row)
    rows = arena.rows[first_row : first_row + len(features)]
    if rows.dtype == np.uint16:
        bfloat16_bits(features, rows)
    else:
        rows[:] = features
    arena.publish(first_row, unit_hash, len(features), version)


def hash_of(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=32).digest()


def golden_prompts(name: str, first_row: int = 3) -> list[ServedSequence]:
    """Return the golden prompts, greedy; the features of their pictures are to be stored from `first_row` on."""
    config = ModelConfig.read(GOLDEN / name)
    assert config.vision is not None
    side = config.vision.spatial_merge_size
    sequences = []
    for case in golden_cases(name):
        sequence = ServedSequence(
            case["prompt_token_ids"], SamplingParams(temperature=0.0, num_logprobs=5, num_prompt_logprobs=0)
        )
        starts = runs_of(sequence.prompt, config.vision.image_token_id)
        units = []
        for index, (_, rows, columns) in enumerate(case["image_grid_thw"]):
            height, width = rows // side, columns // side
            units.append(MediaUnit(index, 0, starts[index], height * width, height, width))
            sequence.unit_rows.append(first_row)
            first_row += height * width + 1
        sequence.units = tuple(units)
        sequence.unit_hashes = tuple(hash_of(f"{name} {picture}") for picture in case["images"])
        sequences.append(sequence)
    return sequences


def picture_sequences(name: str, arena: EncoderArena, first_row: int = 3) -> list[ServedSequence]:
    """Return the golden prompts, with their features in `arena`."""
    sequences = golden_prompts(name, first_row)
    features = np.load(GOLDEN / name / "features.npz")
    for sequence, case in zip(sequences, golden_cases(name), strict=True):
        for row, unit_hash, picture in zip(sequence.unit_rows, sequence.unit_hashes, case["images"], strict=True):
            store(arena, row, unit_hash, features[picture])
    return sequences


def runs_of(token_ids: Sequence[int], token_id: int) -> list[int]:
    """Return the starts of runs of a token."""
    return [i for i, found in enumerate(token_ids) if found == token_id and (i == 0 or token_ids[i - 1] != token_id)]


def cut_at_units(serving: Serving, sequence: ServedSequence) -> None:
    """Run the prompt up to the end of its last picture, in chunks that end after each picture."""
    for unit in sequence.units:
        serving.chunk = unit.start + unit.num_tokens - sequence.num_computed
        serving.step([sequence])
    serving.chunk = 5


def encode_units(
    runner: ModelRunner, vision: VisionConfig, given: Sequence[dict[str, Any]]
) -> tuple[tuple[MediaUnit, ...], list[int], tuple[bytes, ...]]:
    """Encode the units of a variant, with the pixels of their sizes; return them with their rows in the arena and hashes."""
    encoder = encoder_of(runner)
    assert encoder is not None
    units, encodes, pixels, row = [], [], {}, 3
    for index, unit in enumerate(given):
        height, width = unit["height"], unit["width"]
        grid = (height * vision.spatial_merge_size, width * vision.spatial_merge_size)
        place = (unit["start"], vision.num_tokens_of(*grid), height, width, unit["time"], unit["is_continued"])
        units.append(MediaUnit(index, 0, *place, vision.sees_whole_units))
        encodes.append(Encode(hash_of(str(index)), row, units[-1].num_tokens, *grid, "media-0", SlabHandle(0, 0, 0, 0)))
        pixels[hash_of(str(index))] = pixels_of(unit["frames"], *grid, vision.patch_size)
        row += units[-1].num_tokens
    encoder.run(EncoderCall(1, encodes, 0, vision.num_passes, vision.num_passes), pixels)
    return tuple(units), [encode.first_row for encode in encodes], tuple(encode.unit_hash for encode in encodes)
