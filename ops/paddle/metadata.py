"""A step's metadata, computed on the device from one small copy from the host, in tensors with fixed addresses.

Part of `reference.begin` for inputs on a device (`workers/engine/device_inputs.py` defines what is sent). The numbers equal
those of `workers/engine/inputs.py` bit for bit. Every op has the same shapes in every step, so all can be captured; unused rows
belong to the dummy slot. The host knows the numbers of rows, which a capture fixes.

XPUs have no kernels of `searchsorted`, nor of int32 `floor_divide`, `unbind` and `min` (tests/ops/xpu_kernels.py): none here.
"""

from __future__ import annotations

from typing import cast

import paddle

from ops.modules import Tensor
from ops.step_layout import DRAWN, FOLLOWING, HEADER, NUM_COLUMNS, Counts, InPlace, Sizes
from ops.table import ROW_TILE, StepInputs


def quotient(x: Tensor, divisor: int) -> Tensor:
    """Return x // divisor of int32 from 0 to MAX_DIVIDED: with 0.5 added, quotients are far enough from integers for
    float32."""
    return paddle.scale(x.astype("float32"), 1.0 / divisor, 0.5 / divisor).astype("int32")


def num_up_to(ends: Tensor, numbers: Tensor) -> Tensor:
    """Return how many of the ascending `ends` [n] are at most each of `numbers` [m]: int32 [m]."""
    shape = [numbers.shape[0], ends.shape[0]]
    has_reached = ends.unsqueeze(0).expand(shape) <= numbers.unsqueeze(1).expand(shape)
    return paddle.sum(has_reached.astype("int32"), axis=1, dtype="int32")


def derive(memory: InPlace, block_size: int) -> None:
    """Write the sent values to the slots, and compute all metadata."""
    sizes = memory.sizes
    slots, starts, counts, kept = _take(memory)
    positions, tables = sizes.num_positions, sizes.num_blocks
    all_rows = _Sequences(memory, memory, slots, starts, counts)
    kept_rows = _Sequences(memory, memory.kept, slots, starts + counts - kept, kept)
    row_slots, at = all_rows.row_slots, all_rows.positions
    token_ids = paddle.gather(memory.slots, row_slots * positions + at) * all_rows.is_row
    blocks = paddle.gather(memory.slots, row_slots * tables + quotient(at, block_size) + sizes.tables_at)
    slot_mapping = blocks * block_size + at % block_size
    # kept rows are the last of each sequence: same distance from its end among all rows as among the kept ones
    ends = paddle.concat([all_rows.offsets[1:], all_rows.offsets[-1:]])
    kept_ends = paddle.concat([kept_rows.offsets[1:], kept_rows.offsets[-1:]])
    distances = paddle.gather(ends - kept_ends, kept_rows.row_sequences)
    row_ids = (memory.numbers[: sizes.max_rows] + distances) * kept_rows.is_row
    values = [*all_rows.fields(), token_ids, row_slots, slot_mapping, *kept_rows.fields(), row_ids]
    paddle.assign(paddle.concat(values), output=memory.derived)


def _take(memory: InPlace) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Write the sent values to the slots' memory, and return the sent rows, int32 [slots] each."""
    sizes = memory.sizes
    write_sent(memory)
    columns = memory.sent[HEADER : _written_at(sizes)].reshape([NUM_COLUMNS, sizes.num_slots])
    slots, starts, counts, kept, flags = (columns[number] for number in range(NUM_COLUMNS))
    last = paddle.gather(memory.slots, slots + sizes.lengths_at) - 1
    starts = paddle.where(flags == FOLLOWING, last, starts)
    return slots, starts, counts, kept


def _written_at(sizes: Sizes) -> int:
    return HEADER + NUM_COLUMNS * sizes.num_slots


def write_sent(memory: InPlace) -> None:
    """Write the sent values to the slots' memory; a second call changes nothing."""
    sizes, sent = memory.sizes, memory.sent
    is_written = (memory.numbers[: sizes.max_written] < sent[:1]).astype("int32")
    written = sent[_written_at(sizes) :].reshape([sizes.max_written, 2])
    write(memory, written[:, 0], written[:, 1], is_written)


def write(memory: InPlace, places: Tensor, values: Tensor, is_written: Tensor) -> None:
    """Write `values` to the slots' memory at `places` where `is_written` is 1; the others write 0 to the length of the dummy
    slot."""
    unused = memory.sizes.lengths_at + memory.sizes.num_slots  # the dummy slot's length, which stays 0
    paddle.scatter_(memory.slots, (places - unused) * is_written + unused, values * is_written)


def keep_drawn(inputs: StepInputs, tokens: Tensor) -> None:
    """Write the `tokens` (int32 [m]) sampled for `inputs.logit_row_ids`, which are consecutive, to the slots of rows with the
    flag DRAWN."""
    memory = cast(InPlace, inputs)
    sizes, count = memory.sizes, memory.sizes.num_slots
    flags = memory.sent[HEADER + (NUM_COLUMNS - 1) * count : HEADER + NUM_COLUMNS * count]
    # index of each sequence's last row among the tokens
    index = inputs.kept.sequence_offsets[1 : 1 + count] - 1 - inputs.logit_row_ids[:1]
    of_row = paddle.clip(index, min=0, max=tokens.shape[0] - 1)
    is_drawn = (flags == DRAWN).astype("int32") * (index == of_row).astype("int32")
    slots, lengths = inputs.sequence_slots[:count], inputs.context_lengths[:count]
    places = paddle.concat([slots * sizes.num_positions + lengths, slots + sizes.lengths_at])
    values = paddle.concat([paddle.gather(tokens, of_row), lengths + 1])
    write(memory, places, values, paddle.concat([is_drawn, is_drawn]))


class _Sequences:
    """Rows of sequences (int32 [slots] each), as `workers/engine/inputs.py` has them."""

    def __init__(
        self, memory: InPlace, of_host: Counts, slots: paddle.Tensor, starts: paddle.Tensor, counts: paddle.Tensor
    ) -> None:
        self._memory, self._of_host = memory, of_host
        sizes, numbers = memory.sizes, memory.numbers
        self._starts, self._slots, self._contexts = starts, slots, starts + counts
        ends = paddle.cumsum(counts, dtype="int32")
        self.offsets = paddle.concat([numbers[:1], ends])
        # one more sequence, of the dummy slot, has the rows after all others
        rows = numbers[: sizes.max_rows]
        self.row_sequences = num_up_to(ends, rows)
        self.is_row = (self.row_sequences < sizes.num_slots).astype("int32")
        self._all_slots = paddle.concat([slots, numbers[sizes.num_slots : sizes.num_slots + 1]])
        self.row_slots = paddle.gather(self._all_slots, self.row_sequences)
        firsts = paddle.concat([starts - self.offsets[:-1], numbers[:1]])
        self.positions = (rows + paddle.gather(firsts, self.row_sequences)) * self.is_row

    def fields(self) -> list[paddle.Tensor]:
        """Return the fields in the order of `Sizes.of_sequences`."""
        tiles = self._single_rows() if self._of_host.tile_rows == 1 else self._tiles()
        return [self.positions, self._slots, self.offsets, self._starts, self._contexts, *tiles]

    def _single_rows(self) -> list[paddle.Tensor]:
        sizes, numbers = self._memory.sizes, self._memory.numbers
        slots, contexts = self.row_slots, self.positions + 1
        if missing := sizes.max_tiles - sizes.max_rows:
            slots = paddle.concat([slots, paddle.full([missing], sizes.num_slots, "int32")])
            contexts = paddle.concat([contexts, paddle.full([missing], 1, "int32")])
        used = numbers * (numbers < self._of_host.num_rows).astype("int32")
        return [slots, contexts, used[: sizes.max_tiles * ROW_TILE], used[: sizes.max_rows]]

    def _tiles(self) -> list[paddle.Tensor]:
        sizes, numbers, num_rows = self._memory.sizes, self._memory.numbers, self._of_host.num_rows
        num_tokens = self.offsets[-1:]
        counts = paddle.concat([self._contexts - self._starts, num_rows - num_tokens])
        num_tiles = quotient(counts + (ROW_TILE - 1), ROW_TILE)
        num_tiles = paddle.concat([num_tiles[:-1], paddle.clip(num_tiles[-1:], min=1)])
        tile_ends = paddle.cumsum(num_tiles, dtype="int32")
        first_tiles = tile_ends - num_tiles
        tiles = numbers[: sizes.max_tiles]
        found = num_up_to(tile_ends, tiles)
        is_tile = (found <= sizes.num_slots).astype("int32")
        sequences = paddle.clip(found, max=sizes.num_slots)
        first_rows = paddle.gather(self.offsets - first_tiles * ROW_TILE, sequences) + tiles * ROW_TILE
        ends = paddle.gather(self.offsets + counts, sequences).unsqueeze(1)
        row_ids = first_rows.unsqueeze(1) + numbers[:ROW_TILE].unsqueeze(0)
        repeated = paddle.clip(first_rows, max=num_rows - 1).unsqueeze(1).expand(row_ids.shape)
        row_ids = paddle.where(row_ids < ends.expand(row_ids.shape), row_ids, repeated) * is_tile.unsqueeze(1)
        slots = (paddle.gather(self._all_slots, sequences) - sizes.num_slots) * is_tile + sizes.num_slots
        all_contexts = paddle.concat([self._contexts, numbers[1:2]])
        contexts = (paddle.gather(all_contexts, sequences) - 1) * is_tile + 1
        rows = numbers[: sizes.max_rows]
        first_queries = paddle.gather(first_tiles * ROW_TILE - self.offsets, self.row_sequences)
        queries = (rows + first_queries) * (rows < num_rows).astype("int32")
        return [slots, contexts, row_ids.flatten(), queries]
