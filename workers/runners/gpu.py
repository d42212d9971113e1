"""NVIDIA GPUs by Paddle: reference ops or CUDA's rows, graphs where they are asked for, inputs that the device makes of one
copy, and tokens that it draws by itself; the native sampler draws the others, of logits fetched into pinned memory. Not run on
any card yet.

The cache is memory of the card that the supervisor holds: a worker that comes back finds what the last one left.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from workers.assembly import Parts, build_runner
from workers.devices.card_ops import card_rows
from workers.devices.device import make_device
from workers.devices.persistent_kv_arena import PersistentKvArena
from workers.engine.device_inputs import DeviceInputs
from workers.engine.plan import make_plan
from workers.extensions.media.features import Features
from workers.rank_group.peers import Peers
from workers.runners.ahead import Ahead


def _needed_by(config: EngineConfig) -> str:
    """The option that no other ops on a card have."""
    if config.quantization != "none":
        return f"--quantization {config.quantization}"
    return "" if config.kv_cache_dtype == "float32" else f"--kv-cache-dtype {config.kv_cache_dtype}"


def gpu_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    arena: memoryview,
    peers: Peers,
    on_op: Callable[[], None] = lambda: None,
    features: Features | None = None,
    device_arena: int = -1,
) -> Ahead:
    """`device_arena`: the descriptor of the supervisor's memory on the card; -1: the cache is the process's own."""
    lasting = None
    if device_arena >= 0:
        lasting = PersistentKvArena(config.device_arena_library, peers.rank, device_arena, arena)
    device = make_device(config.device, config.ops, config.threads, peers.rank, meetings=peers.meetings, lasting=lasting)
    rows = card_rows(_needed_by(config)) if config.ops == "cuda" else None
    return Ahead(
        build_runner(config, model_config, Parts(device, DeviceInputs, make_plan, rows), arena, peers, on_op, features)
    )
