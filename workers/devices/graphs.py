"""Graphs of a device behind Paddle's CUDAGraph, which serves GPUs, XPUs and custom devices alike: the place says which.

Used by `paddle.py`. What is captured reads and writes the addresses that it had then. All graphs of a process allocate from one
pool: the largest is to be captured first, in whose memory the others find room.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle.base import core
from paddle.device.cuda import graphs

from ops.paddle.errors import cause_of
from workers.devices.capabilities import DeviceError
from workers.devices.groups import PaddleGroup


class PaddleGraph:
    """Graph of what `run` enqueues at `place`. Ranks of `groups`, which capture alike, exchange nothing while they do."""

    def __init__(self, place: Any, run: Callable[[], object], groups: Sequence[PaddleGroup] = ()) -> None:
        if isinstance(place, core.CPUPlace) or not graphs.is_cuda_graph_supported():  # which may be another device's
            raise DeviceError(f"{place}: the installed Paddle {paddle.__version__} has no graphs")
        for group in groups:
            group.rehearse()
        run()  # libraries make their handles and choose algorithms at a first call, which no capture survives
        paddle.device.synchronize()
        for group in groups:
            group.record()
        self._graph = graphs.CUDAGraph(place, pool_id=_pool())
        errors: list[Exception] = []  # the first says why
        for call in (self._graph.capture_begin, run, self._graph.capture_end):
            try:
                call()
            except (RuntimeError, ValueError, OSError, MemoryError) as error:
                errors.append(error)
        if errors:
            raise DeviceError(f"{place}: {cause_of(errors[0])}") from errors[0]

    def replay(self) -> None:
        self._graph.replay()


def replays(place: Any) -> bool:
    """Whether a graph does at `place` what was captured in it; one may record nothing, and replay that without a word."""
    x = paddle.zeros([16])
    try:
        graph = PaddleGraph(place, lambda: x.add_(paddle.ones([16])))
    except DeviceError:
        return False
    before = x.numpy()
    graph.replay()
    paddle.device.synchronize()
    return bool((x.numpy() == before + 1).all())


@functools.cache
def _pool() -> int:
    found: int = core.CUDAGraph.gen_new_memory_pool_id()
    return found
