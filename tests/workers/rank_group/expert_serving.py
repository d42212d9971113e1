"""Rank of a rank group in tests of expert parallelism: its replica's sequences on a runner that shares the experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.model_config import ModelConfig
from engine.parallel.placement import LayerPlacement
from shm.segment import MemoryFile
from tests.configurations import engine_config
from tests.workers.rank_group.serving import sequences
from tests.workers.serving import Serving, make_runner
from workers.engine.rows import NO_ROWS
from workers.rank_group.clock import RankGroupClock
from workers.rank_group.communicator import Communicator, RankGroupBroken
from workers.rank_group.experts import ExpertRank


def share_experts(
    communicator: Communicator, path: Path, arena: Any, placements: list[LayerPlacement], options: dict[str, Any]
) -> list[Any]:
    """Run one rank; return the outcome of each sequence of its replica.

    With an `arena` all ranks are one replica; otherwise each is a replica with sequences of its own, and the first begins late.
    All run each step of the clock, with rows or without. Experts move before every step, from one of `placements` to the next.
    The options `sequences`, `adapters` and `kind` are as in `serve` and `make_runner`; `loads_again` is the rank that reloads
    alone after a replayed step.
    """
    options = dict(options)
    given, loads_again = sequences(*options.pop("sequences", ())), options.pop("loads_again", -1)
    rank, count = communicator.rank, communicator.count
    whole = Communicator(communicator.memory.data, rank, 0, count, timeout_s=60.0, spin_ns=5_000, shares_experts=True)
    memory, tensor, batch, num_late = None, Communicator(communicator.memory.data, rank, rank, 1, timeout_s=60.0), given, 0
    if arena is not None:
        memory, tensor = MemoryFile.from_fd(arena[0].detach(), arena[1]).buffer, communicator
    else:
        batch, num_late = batch[rank::count], 2 * (rank == 0)
    settings = {
        "tensor_parallel_size": tensor.count,
        "data_parallel_size": count // tensor.count,
        "max_model_len": 512,
        **options,
    }
    for slot, sequence in enumerate(given):
        sequence.adapter_slot = slot % (1 + len(options.get("adapters", ()))) - 1
    of_config = {name: value for name, value in settings.items() if name not in ("kind", "adapters")}
    config = engine_config(model="", run_id="", run_dir="", max_num_seqs=32, **of_config)
    experts = ExpertRank(whole, config, ModelConfig.read(path))
    clock = RankGroupClock(whole)
    clock.join(experts.join())
    runner = make_runner(path, communicator=tensor, arena=memory, experts=experts, rank=rank, **settings)
    serving = Serving(runner, chunk=40)
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    sizes = []
    while communicator.all_gather(np.array([not all(sequence.is_done for sequence in batch)])).any():
        left = [sequence for sequence in batch if not sequence.is_done] if clock.num_done >= num_late else []
        if left:
            clock.begin()
        communicator.barrier()
        assert clock.is_ahead
        if placements:
            experts.place((placements[clock.num_done % len(placements)],) * len(experts.placement), clock.num_done)
        experts.begin_step(clock.num_done + 1, 1)
        if left:
            serving.step(left)
        else:
            runner.run_without_rows()
        clock.end_step()
        sizes.append(runner.mode.size)
        if rank == loads_again and runner.mode.size:
            runner.load(str(path), 1, lambda num_done, num_bytes: None)
            loads_again = -1
    if options.get("plan") == "captured":
        assert (communicator.all_gather(np.array(sizes)) == sizes).all(), "the ranks replay different sizes"
        assert 0 < np.count_nonzero(sizes) < len(sizes), sizes
    return [sequence.answer() for sequence in batch]


def outlive(communicator: Communicator, path: Path, num_steps: int, options: dict[str, Any]) -> list[Any]:
    """Rank 0 has all sequences. The other one serves its experts for some steps and ends, with a captured plan within a step;
    rank 0 continues alone."""
    options = dict(options)
    given = sequences(*options.pop("sequences", ()))
    whole = Communicator(communicator.memory.data, communicator.rank, 0, 2, timeout_s=60.0, shares_experts=True)
    settings = {"data_parallel_size": 2, "max_model_len": 512, "num_kv_blocks": 64, **options}
    of_config = {name: value for name, value in settings.items() if name != "kind"}
    experts = ExpertRank(
        whole, engine_config(model="", run_id="", run_dir="", max_num_seqs=32, **of_config), ModelConfig.read(path)
    )
    assert experts.join()
    own = Communicator(communicator.memory.data, communicator.rank, communicator.rank, 1, timeout_s=60.0)
    runner = make_runner(path, communicator=own, experts=experts, rank=communicator.rank, **settings)
    if communicator.rank:
        for number in range(num_steps):
            experts.begin_step(number, 1)
            runner.run_without_rows()
        if settings.get("plan") == "captured":
            experts.begin_step(num_steps, 1)
            assert runner.modes.mode(NO_ROWS).size, "the others replay this step"
        return []
    serving, batch, broken = Serving(runner, chunk=40), given, 0
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    number = 0
    while left := [sequence for sequence in batch if not sequence.is_done]:
        experts.begin_step(number, 1)
        try:
            serving.step(left)
        except RankGroupBroken:
            assert experts.join()
            broken += 1
        number += 1
    return [broken, number - broken, *(sequence.answer() for sequence in batch)]
