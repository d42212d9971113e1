"""A device graph's semantics on the CPU: tapes whose numbers of rows are constants, one for each captured size.

Made by `execution.make_plan`. Addresses and numbers of rows are fixed when a tape is recorded, so a step is padded to its size
before: padded rows are of the dummy slot, each a sequence of its own, and what comes of them is left behind. What no size
takes (prompts, or more rows than the largest) is replayed by the tape for any number of rows. Which step takes which is decided
by `workers/engine/captures.py`; device graphs come behind the same class.
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
    """`sizes`: numbers of rows, the largest first, in whose memory the others find room."""

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
        kept = inputs.kept.num_tokens  # real ones: nobody reads the others
        self._hidden.numpy()[:kept] = hidden.numpy()[:kept]
