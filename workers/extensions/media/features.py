"""Features of media in a rank: encodes what a step asks for, and checks every unit before a row reads it.

Owned by the runner. The arena is shared memory that outlives the rank (`shm/encoder_arena.py`). Only the scheduler decides
which rows belong to which unit: a step names the hash of each unit that it reads, and the header in the arena names its owner.
A mismatch is reported and the step does not run, so no row ever reads another unit's features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from engine.checkpoint.vision_config import VisionConfig
from engine.messages import Encode, EncoderCall
from shm.encoder_arena import EncoderArena
from shm.errors import SharedMemoryError
from shm.extent_slab import ExtentSlab
from workers.engine.step_run import Missing
from workers.extensions.media.encoder import Encoder
from workers.extensions.media.prompt_media import NO_ROW, MediaSlots
from workers.rank_group.collectives import Collectives


class Features:
    """Features in the arena. `slab_of`: returns the pixel slab of a media process, as a reader."""

    def __init__(self, arena: EncoderArena, slab_of: Callable[[str], ExtentSlab]) -> None:
        self.arena = arena
        self._slab_of = slab_of
        self._slabs: dict[str, ExtentSlab] = {}

    def encode(self, call: EncoderCall, encoder: Encoder) -> tuple[list[bytes], Missing]:
        """Run a call; return the units that are now complete, or those that the next call must start again: then nothing
        ran."""
        pixels: dict[bytes, np.ndarray] = {}
        missing: Missing = {}
        if call.first_part == 0:
            for unit in call.units:
                try:
                    pixels[unit.unit_hash] = self._payload(unit, encoder.config)
                except SharedMemoryError as error:
                    missing[unit.unit_hash] = str(error)
        elif not encoder.goes_on_with(call):
            lost = f"this rank lacks the parts before part {call.first_part} of encoder call {call.call_id}"
            missing = {unit.unit_hash: lost for unit in call.units}
        if missing:
            return [], missing
        encoder.run(call, pixels)
        return [unit.unit_hash for unit in call.units] if call.is_last else [], {}

    def missing(self, slots: MediaSlots, rows: Iterable[tuple[int, int, int]], version: int) -> Missing:
        """Return the units that rows (slot, begin, end) of a step read but that are not where the slots say."""
        found: Missing = {}
        for slot, begin, end in rows:
            media = slots.prompts[slot]
            for unit in media.overlapping(begin, end) if media is not None else ():
                row, num_rows = int(media.rows[unit]), int(media.ends[unit] - media.starts[unit])
                if row == NO_ROW:
                    found[media.hashes[unit]] = "it has no rows of the encoder arena"
                elif not self.arena.is_valid(row, media.hashes[unit], num_rows, version):
                    found[media.hashes[unit]] = f"its features are not at row {row} of the encoder arena"
        return found

    def _payload(self, unit: Encode, config: VisionConfig) -> np.ndarray:
        """Return a copy of a unit's pixels, uint8 [frames, height, width, 3], or of its features, float32 [num_rows, width]."""
        slab = self._slabs.get(unit.media)
        if slab is None:
            slab = self._slabs[unit.media] = self._slab_of(unit.media)
        payload = np.empty(unit.handle.num_bytes, np.uint8)
        slab.read_into(unit.handle, payload.data)
        if unit.is_features:
            return payload.view(np.float32).reshape(-1, config.feature_width)
        return payload.reshape(-1, unit.height * config.patch_size, unit.width * config.patch_size, 3)


def together(ranks: Collectives, missing: Missing) -> Missing:
    """Return what is missing on any of the ranks, so that none runs a step that another does not."""
    if ranks.count == 1:
        return missing
    own = np.frombuffer(msgspec.msgpack.encode(missing), np.uint8) if missing else np.zeros(0, np.uint8)
    sizes = ranks.all_gather(np.array([len(own)], np.int64)).reshape(-1)
    if not sizes.any():
        return {}
    found = ranks.all_gather(np.pad(own, (0, int(sizes.max()) - len(own))))
    everything: Missing = {}
    for text, size in zip(found, sizes.tolist(), strict=True):
        everything |= msgspec.msgpack.decode(text[:size].tobytes(), type=Missing) if size else {}
    return everything
