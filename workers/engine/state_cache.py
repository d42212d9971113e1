"""State arena of a rank: one tensor over memory that outlives the worker, and the places of each layer in a slot.

Mapped once by the runner, over the memfd that the supervisor holds (or any buffer, in tests). All ranks of a replica map the
same arena, and each reads and writes the parts of its own heads (`engine/checkpoint/state_spec.py` has the layout).
"""

from __future__ import annotations

import msgspec
import numpy as np

from engine.checkpoint.state_spec import StateSpec
from ops.modules import KvCache, LayerState, StateCache
from workers.devices.device import Device


def map_states(cache: KvCache, arena: memoryview, spec: StateSpec, num_states: int, device: Device) -> None:
    """Add the states in `arena` to `cache`. The contents stay: states that an earlier worker wrote are valid."""
    needed = spec.arena_bytes(num_states)
    assert arena.nbytes >= needed, f"the state arena has {arena.nbytes} bytes, but {num_states} states need {needed}"
    memory = np.frombuffer(arena, np.uint8, needed).reshape(num_states + 1, spec.slot_bytes)
    cache.states = StateCache(device.arena(memory), spec.num_logged)
    cache.layer_states = [LayerState(*msgspec.structs.astuple(place)) if place else None for place in spec.places]
