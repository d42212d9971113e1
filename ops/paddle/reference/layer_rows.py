"""Rows of draft layers in Paddle (`ops/layer_rows.py`)."""

from __future__ import annotations

from typing import cast

import paddle

from ops.layer_rows import OF_DRAFTS, DeviceStep, LayerRows, LayerSizes, counts_of
from ops.modules import Tensor
from ops.paddle.metadata import num_up_to, write, write_sent
from ops.paddle.reference.sampling import largest
from ops.table import Inputs


class PaddleLayerMemory:
    """`LayerMemory` of tensors; hidden states are float32."""

    def __init__(self, step: DeviceStep, columns: Tensor, sizes: LayerSizes) -> None:
        self._step, self.columns, self.sizes = step, columns, sizes
        width = sizes.hidden_size
        self.states = paddle.zeros([(step.sizes.num_slots + 1) * sizes.group, width])
        self.fed, self.kept = paddle.zeros([sizes.max_drafted, width]), paddle.zeros([sizes.max_kept, width])

    def keep_hidden(self, hidden: Tensor) -> None:
        paddle.assign(hidden, output=self.kept[: hidden.shape[0]])

    def with_read_tokens(self, drawn: Tensor | None, row_ids: Tensor) -> Tensor:
        step = self._step
        row_ids = paddle.gather(step.kept.row_ids, row_ids)
        token_ids = paddle.gather(step.token_ids, row_ids).reshape([1, -1])
        return token_ids if drawn is None else paddle.concat([drawn, token_ids])

    def rows_of_draft(self, number: int, num_rows: int, num_key_splits: int) -> tuple[Inputs, Tensor]:
        step = self._step
        sizes = step.sizes
        if number == 0:
            write_sent(step)
        slots, starts, counts, first_keys, states = self._of_draft_tokens(num_rows)
        is_drafted = (counts > number).astype("int32")
        slots = (slots - sizes.num_slots) * is_drafted + sizes.num_slots
        positions = (starts + number) * is_drafted
        token_ids = paddle.gather(step.slots, slots * sizes.num_positions + positions)
        hidden = self.fed[:num_rows] if number else paddle.gather(self.states, states)
        return self._rows(slots, positions, token_ids, first_keys * is_drafted, num_key_splits), hidden

    def put_draft(self, number: int, part: slice, logits: Tensor) -> None:
        step = self._step
        slots, starts, counts, _, _ = (column[part] for column in self._of_draft_tokens(part.stop))
        places = slots * step.sizes.num_positions + starts + (number + 1)
        write(step, places, largest(logits), (counts > number).astype("int32"))

    def put_fed(self, fed: Tensor) -> None:
        paddle.assign(fed, output=self.fed[: fed.shape[0]])

    def _rows(self, slots: Tensor, positions: Tensor, token_ids: Tensor, first_keys: Tensor, num_key_splits: int) -> Inputs:
        step, num_rows = self._step, positions.shape[0]
        mappings, numbers = [paddle.zeros_like(positions) for _ in step.block_tables], step.numbers[:num_rows]
        arrays = token_ids, positions, slots, mappings, first_keys, positions + 1, numbers
        return cast(Inputs, LayerRows(num_rows, num_key_splits, step.block_tables, *arrays, counts_of(num_rows)))

    def _of_draft_tokens(self, num_rows: int) -> list[Tensor]:
        columns = self.columns[: OF_DRAFTS * self.sizes.max_drafted].reshape([OF_DRAFTS, self.sizes.max_drafted])
        return [columns[number][:num_rows] for number in range(OF_DRAFTS)]

    def rows_of_entries(self, kept_hidden: Tensor) -> tuple[Inputs, Tensor]:
        step = self._step
        sizes, kept, num_rows = step.sizes, step.kept, kept_hidden.shape[0]
        count = sizes.num_slots
        numbers, offsets = step.numbers[:num_rows], kept.sequence_offsets
        sequences = num_up_to(offsets[1 : 1 + count], numbers)
        is_row = (sequences < count).astype("int32")
        sequences = paddle.clip(sequences, max=count - 1)
        begin = OF_DRAFTS * self.sizes.max_drafted
        first_entries = paddle.gather(self.columns[begin : begin + count], sequences)
        states = paddle.gather(self.columns[begin + count :], sequences)

        row_ids = kept.row_ids[:num_rows]
        token_ids, positions = paddle.gather(step.token_ids, row_ids), paddle.gather(step.positions, row_ids)
        is_entry = (first_entries <= positions).astype("int32") * is_row
        slots = (paddle.gather(step.row_slots, row_ids) - count) * is_entry + count
        is_first = (numbers == paddle.gather(offsets[:count], sequences)).unsqueeze(1).expand(kept_hidden.shape)
        before = paddle.where(is_first, paddle.gather(self.states, states), _one_later(kept_hidden))

        # the last row of a sequence has the last place in its group
        places = numbers - paddle.gather(offsets[1 : 1 + count], sequences) + self.sizes.group
        is_last = paddle.clip(places + 1, min=0, max=1) * is_row
        nowhere = self.states.shape[0] - 1
        groups = states - states % self.sizes.group
        paddle.scatter_(self.states, (groups + places - nowhere) * is_last + nowhere, kept_hidden)
        return self._rows(slots, positions, token_ids, positions, 1), before

    def draft_tokens(self, num_rows: int, count: int) -> Tensor:
        step = self._step
        slots, starts, _, _, _ = self._of_draft_tokens(num_rows)
        firsts = (slots * step.sizes.num_positions + starts + 1).unsqueeze(1).expand([num_rows, count])
        places = firsts + step.numbers[:count].unsqueeze(0).expand([num_rows, count])
        return paddle.gather(step.slots, places.flatten()).reshape([num_rows, count])


def _one_later(rows: Tensor) -> Tensor:
    return paddle.concat([rows[:1], rows[:-1]])
