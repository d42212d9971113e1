"""Rank of a rank group in tests of vision-language models: several ranks encode golden pictures, and all read them."""

from __future__ import annotations

from typing import Any

from engine.messages import Encode
from shm.encoder_arena import EncoderArena
from shm.errors import SharedMemoryError
from shm.extent_slab import ExtentSlab
from shm.segment import MemoryFile
from tests.paths import GOLDEN
from tests.workers.encoding import steps_of
from tests.workers.seeing import golden_prompts, shape_of_arena
from tests.workers.serving import Serving, encoder_of, make_runner
from workers.extensions.media.features import Features
from workers.rank_group.communicator import Communicator

Shared = tuple[Any, int]  # a memory file's descriptor and size


def memory_of(shared: Shared) -> MemoryFile:
    return MemoryFile.from_fd(shared[0].detach(), shared[1])


def see(
    communicator: Communicator, kv: Shared, rows: Shared, pixels: Shared, name: str, calls: list[list[Encode]]
) -> tuple[list[str], list[list[int]]]:
    """Return the missing units where one rank cannot read the first pixels, and then the outputs of the golden prompts."""
    arena, slab = EncoderArena(memory_of(rows), *shape_of_arena(GOLDEN / name)), ExtentSlab(memory_of(pixels))
    is_blind = communicator.rank == 1

    def slab_of(media: str) -> ExtentSlab:
        if is_blind:
            raise SharedMemoryError("rank 1 reads no pixels")
        return slab

    runner = make_runner(
        GOLDEN / name,
        communicator=communicator,
        arena=memory_of(kv).buffer,
        num_kv_blocks=64,
        features=Features(arena, slab_of),
    )
    encoder = encoder_of(runner)
    num_passes = encoder.config.num_passes if encoder else 0
    missing = runner.run(steps_of(calls[0], num_passes)[0]).missing
    is_blind = False
    sequences = golden_prompts(name)
    serving = Serving(runner, chunk=16)
    for slot, (sequence, units) in enumerate(zip(sequences, calls, strict=True)):
        for step in steps_of(units, num_passes, (1,)):
            assert not runner.run(step).missing
        serving.place(sequence, slot)
    serving.run(sequences)
    return list(missing.values()), [sequence.outputs for sequence in sequences]
