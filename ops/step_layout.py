"""Layout of a step's metadata on a device: what the host sends, what a device keeps of each slot, and what it computes.

`workers/engine/device_inputs.py` sends it; `ops/paddle/metadata.py` and `ops/cuda/derive.cu` compute the rest in place.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from ops.modules import Tensor
from ops.table import ROW_TILE

HEADER = 1  # number of writes to the slots' memory; these follow the rows as (place, value)
NUM_COLUMNS = 5  # of the rows: slot, first position, number of positions, number of last positions that are kept, flags
MAX_DIVIDED = 1 << 22  # limit of `quotient`
FOLLOWING = 1  # flags: the row begins at the last token of its slot;
DRAWN = 2  # the token sampled after the row's last position is its slot's next token
SETTINGS = ("seed", "temperature", "top_p", "min_p", "top_k", "sample_index")  # words of a slot, in this order
NUM_SETTINGS = 10  # words: the first four settings have two each, the low one first


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of all parts of a step's metadata."""

    num_slots: int  # without the dummy slot, the last one
    num_positions: int  # tokens per slot
    num_blocks: int  # blocks per slot
    max_rows: int
    max_tiles: int
    max_written: int
    num_tables: int = 1  # of a slot

    @property
    def num_sent(self) -> int:
        return HEADER + NUM_COLUMNS * self.num_slots + 2 * self.max_written

    @property
    def tables_at(self) -> int:
        """Return the offset of the block tables in the slots' memory, after the tokens."""
        return (self.num_slots + 1) * self.num_positions

    @property
    def lengths_at(self) -> int:
        return self.tables_at + (self.num_slots + 1) * self.num_blocks

    @property
    def settings_at(self) -> int:
        """Place of the sampling settings."""
        return self.lengths_at + self.num_slots + 1

    @property
    def more_tables_at(self) -> int:
        """Place of the block tables after the first one of each slot."""
        return self.settings_at + (self.num_slots + 1) * NUM_SETTINGS

    @property
    def num_values(self) -> int:
        return self.more_tables_at + (self.num_tables - 1) * (self.num_slots + 1) * self.num_blocks

    def table_at(self, number: int) -> int:
        """Place of block table `number` of all slots, int32 [slots + 1, blocks]."""
        return self.more_tables_at + (number - 1) * (self.num_slots + 1) * self.num_blocks if number else self.tables_at

    @property
    def of_sequences(self) -> dict[str, int]:
        """Sizes of the arrays that attention reads, in the order of memory."""
        rows, tiles, slots = self.max_rows, self.max_tiles, self.num_slots
        return {
            "positions": rows,
            "sequence_slots": slots,
            "sequence_offsets": slots + 1,
            "sequence_starts": slots,
            "context_lengths": slots,
            "tile_slots": tiles,
            "tile_contexts": tiles,
            "tile_row_ids": tiles * ROW_TILE,
            "row_queries": rows,
        }

    @property
    def of_rows(self) -> dict[str, int]:
        return {**self.of_sequences, "token_ids": self.max_rows, "row_slots": self.max_rows, "slot_mapping": self.max_rows}

    @property
    def of_kept(self) -> dict[str, int]:
        return {**self.of_sequences, "row_ids": self.max_rows}


class Counts(Protocol):
    """Counts of rows that the host knows."""

    num_rows: int
    tile_rows: int


class InPlace(Counts, Protocol):
    """Memory on a device; all int32 at fixed addresses. `num_rows` and `tile_rows` are those of all rows."""

    sizes: Sizes
    sent: Tensor  # [num_sent]
    # [num_values]: tokens [slots + 1, positions] | tables [slots + 1, blocks] | lengths [slots + 1] | settings | more tables
    slots: Tensor
    derived: Tensor  # the fields of_rows, those of_kept
    numbers: Tensor  # 0, 1, 2, ..., as long as the longest field

    @property
    def kept(self) -> Counts: ...
