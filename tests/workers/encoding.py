"""Pixels of golden pictures in a slab, and steps that encode them, for tests of the runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from engine.checkpoint.model_config import ModelConfig
from engine.messages import Encode, EncoderCall, Step
from shm.extent_slab import ExtentSlab, SlabProducer
from shm.segment import MemoryFile
from tests.workers.serving import GOLDEN, ServedSequence, golden_cases

SLAB_BYTES = 4 << 20


def make_slab() -> SlabProducer:
    memory = MemoryFile.create("pixels", ExtentSlab.num_bytes_of(SLAB_BYTES))
    ExtentSlab.lay_out(memory, "0", 1, SLAB_BYTES)
    return SlabProducer(memory)


def pixels_of(path: Path, height: int, width: int) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB").resize((width, height), Image.Resampling.BICUBIC))[None]


def units_of(
    name: str, sequence: ServedSequence, case: int, slab: SlabProducer, features: dict[str, np.ndarray] | None = None
) -> list[Encode]:
    """Return the units to encode for a golden prompt, with their pixels in the slab; or the features that a client made."""
    vision = ModelConfig.read(GOLDEN / name).vision
    assert vision is not None
    found, patch = [], vision.patch_size
    pictures = golden_cases(name)[case]["images"], golden_cases(name)[case]["image_grid_thw"]
    for index, (picture, (_, height, width)) in enumerate(zip(*pictures, strict=True)):
        payload = features[picture] if features else pixels_of(GOLDEN / name / picture, height * patch, width * patch)
        handle = slab.put(payload.tobytes())
        assert handle is not None
        hash, row, count = sequence.unit_hashes[index], sequence.unit_rows[index], sequence.units[index].num_tokens
        found.append(Encode(hash, row, count, height, width, "media0", handle, features is not None))
    return found


def steps_of(units: Sequence[Encode], num_passes: int, cuts: Sequence[int] = ()) -> list[Step]:
    """Return steps without rows that encode the units, split before the passes `cuts`."""
    bounds = [0, *cuts, num_passes]
    calls = [EncoderCall(9, list(units), *bounds[index : index + 2], num_passes) for index in range(len(bounds) - 1)]
    return [Step(index + 1, [], b"", b"", b"", b"", b"", b"", b"", encoder=call) for index, call in enumerate(calls)]
