"""The semantics of a device graph on the CPU: tapes with constant numbers of rows, one per captured size.

Made by `plan.make_plan`. Addresses and numbers of rows are fixed when a tape is recorded, so a step is padded to its size
first: each padded row is a sequence of the dummy slot, and its results are dropped. Steps that fit no size (prompts, or more
rows than the largest) are replayed by the tape for any number of rows. `workers/engine/captures.py` decides which tape a step
takes.
"""

from __future__ import annotations

from ops.cpu.array import Array
from ops.cpu.executors import Recording, Tape
from ops.cpu.rank_group import RankGroup
from ops.cpu.table import make_table
from ops.modules import KvCache
from ops.table import NUM_ROWS, NUM_SEQUENCES
from workers.engine.inputs import StepInputs
from workers.engine.tape_plan import TapePlan
from workers.models import Model


class CapturedPlan(TapePlan):
    """Plan with captured `sizes`: numbers of rows, largest first; the smaller ones share its memory."""

    def __init__(
        self, model: Model, inputs: StepInputs, cache: KvCache, rank_group: RankGroup | None = None, sizes: tuple[int, ...] = ()
    ) -> None:
        super().__init__(model, inputs, cache, rank_group)
        self.captured: dict[int, tuple[Tape, Array]] = {}
        largest: Tape | None = None
        for size in sizes:
            recording = Recording(rank_group, {NUM_ROWS: size, NUM_SEQUENCES: inputs.padded_sequences(size)})
            hidden = model.forward(make_table(recording), inputs, cache)
            tape = recording.finish(hidden, within=largest)
            largest = largest or tape
            self.captured[size] = tape, hidden

    def replay(self, size: int = 0) -> None:
        if not size:
            super().replay()
            return
        inputs = self._inputs
        assert inputs.num_rows == inputs.kept.num_rows == size, (
            f"{inputs.num_rows} rows do not fit a graph captured with {size}"
        )
        tape, hidden = self.captured[size]
        tape.replay()
        kept = inputs.kept.num_tokens  # only real rows are read
        self._hidden.numpy()[:kept] = hidden.numpy()[:kept]
