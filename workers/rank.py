"""Assembles a rank: its memory, its place in the rank group, the runner of its device. Called by the worker actor.

Imports the code that runs the model (with reference ops, Paddle), which takes a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from engine.checkpoint.adapters.layout import AdapterLayout
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.record import ModelRecord
from engine.process.context import ActorContext
from ops.cpu.progress import report_progress_to
from shm.segment import MemoryFile
from workers.assembly import RunnerParts
from workers.extensions.adapters.arena import AdapterArena
from workers.extensions.media.features import Features
from workers.rank_group.membership import RankGroupMember, SingleRank, make_membership
from workers.rank_group.peers import Peers
from workers.runners import Runner, make_runner


class Rank(msgspec.Struct, frozen=True):
    """Parts of a rank. `memory`: mappings that the runner and the adapters read; they must stay open."""

    runner: Runner
    group: SingleRank | RankGroupMember
    model: ModelConfig
    adapters: AdapterArena | None
    memory: tuple[MemoryFile, ...]


def make_rank(context: ActorContext, beat: Callable[[], None]) -> Rank:
    """`beat` is called between two ops of a step."""
    config = context.config
    context.row.beat(time.monotonic_ns())
    memory: tuple[MemoryFile, ...] = (context.arena(),)
    report_progress_to(context.row.heartbeat_word)
    if config.ops not in ("native", "cuda"):
        from ops.paddle import progress

        progress.report_progress_to(beat)
    model = ModelRecord.of_run(context.run.model_path).config
    group = make_membership(context, model)
    features = Features(context.encoder_arena(), context.pixel_slab) if config.encoder_cache_size else None
    peers = Peers(config, context.index, group.communicator, group.experts, context.epoch)
    adapter_memory, adapters = context.adapter_arena(), None
    if adapter_memory is not None:
        memory += (adapter_memory,)
        adapters = AdapterArena(adapter_memory.buffer, AdapterLayout.of(model, config.max_loras, config.max_lora_rank))
    state_memory = context.state_arena()
    memory += (state_memory,) if state_memory is not None else ()
    states = state_memory.buffer if state_memory is not None else None
    kept = context.device_arena_fd, states, context.weight_shelf_fds
    parts = RunnerParts(config, model, memory[0].buffer, peers, beat, features, adapters, *kept)
    return Rank(make_runner(parts), group, model, adapters, memory)
