"""Rank of a rank group in tests of captured plans: it drafts, answers, and reports the sizes that model and layers replayed."""

from __future__ import annotations

from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import msgspec

from ops._cpu import LayerDrafts
from shm.segment import MemoryFile
from tests.workers.rank_group.serving import sequences
from tests.workers.serving import Serving, make_runner
from workers.engine.captured_plan import CapturedPlan
from workers.engine.rows import StepRows
from workers.engine.runner import ModelRunner
from workers.extensions.drafts.draft_plan import TapeDraftPlan
from workers.extensions.drafts.mtp_steps import MtpSteps
from workers.rank_group.communicator import Communicator

Replays = list[tuple[str, int]]  # by the model, or by layers that draft; 0: with the rows that there were


class KeptPlan(CapturedPlan):
    """Plan that records its replayed sizes."""

    replays: Replays

    def replay(self, size: int = 0) -> None:
        self.replays.append(("model", size))
        super().replay(size)


class KeptDraftPlan(TapeDraftPlan):
    """Plan of layers that draft that records its replayed sizes."""

    replays: Replays

    def forward(self, module: int, size: int = 0) -> None:
        self.replays.append(("layers", size))
        super().forward(module, size)

    def chain(self, layers: LayerDrafts, rows: StepRows) -> None:
        self.replays.append(("layers", 0))
        super().chain(layers, rows)


def keep(runner: ModelRunner) -> Replays:
    """Record the sizes that its plans replay from now on."""
    replays: Replays = []
    plan = runner.weights.plan
    assert isinstance(plan, CapturedPlan)
    kept = KeptPlan.__new__(KeptPlan)
    vars(kept).update(vars(plan), replays=replays)
    runner.weights = msgspec.structs.replace(runner.weights, plan=kept)
    steps = runner.find(MtpSteps)
    if steps is not None:
        layers = steps.layers
        kept_drafts = KeptDraftPlan.__new__(KeptDraftPlan)
        vars(kept_drafts).update(vars(layers._plan), replays=replays)
        layers._loaded_plan = kept_drafts
    return replays


def draft_and_answer(
    communicator: Communicator, arena: tuple[DupFd, int], path: Path, options: dict[str, Any]
) -> tuple[list[Any], Replays]:
    """Return the outcome of each sequence, and the replayed sizes."""
    memory = MemoryFile.from_fd(arena[0].detach(), arena[1]).buffer
    runner = make_runner(path, communicator=communicator, arena=memory, num_kv_blocks=64, **options)
    replays = keep(runner)
    serving, batch = Serving(runner, chunk=40), sequences()
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    serving.run(batch)
    return [sequence.answer() for sequence in batch], replays
