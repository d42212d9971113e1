"""Kunlun XPUs and custom devices by Paddle, which calls them alike: as `gpu.py`. Not run on any card yet.

A device that takes no copies without waiting, or no graphs, says so at its start (`Capabilities`).
"""

from __future__ import annotations

from collections.abc import Callable

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from workers.assembly import Parts, build_runner
from workers.devices.device import make_device
from workers.engine.device_inputs import DeviceInputs
from workers.engine.plan import make_plan
from workers.extensions.media.features import Features
from workers.rank_group.peers import Peers
from workers.runners.ahead import Ahead


def xpu_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    arena: memoryview,
    peers: Peers,
    on_op: Callable[[], None] = lambda: None,
    features: Features | None = None,
) -> Ahead:
    device = make_device(config.device, config.ops, config.threads, peers.rank, meetings=peers.meetings)
    return Ahead(build_runner(config, model_config, Parts(device, DeviceInputs, make_plan), arena, peers, on_op, features))
