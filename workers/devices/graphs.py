"""Graphs of a device by Paddle's CUDAGraph, which supports GPUs, XPUs and custom devices: the place selects one.

Used by `paddle.py`. A graph reads and writes the addresses of its capture. All graphs of a process allocate from one pool, so
the largest should be captured first; the others fit into its memory.
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
    """Graph of the work that `run` enqueues at `place`. Ranks of `groups` capture together and exchange nothing meanwhile."""

    def __init__(self, place: Any, run: Callable[[], object], groups: Sequence[PaddleGroup] = ()) -> None:
        if isinstance(place, core.CPUPlace) or not graphs.is_cuda_graph_supported():  # may be true for another device
            raise DeviceError(f"{place}: the installed Paddle {paddle.__version__} has no graphs")
        for group in groups:
            group.rehearse()
        run()  # libraries create handles and choose algorithms at their first call, which cannot be captured
        paddle.device.synchronize()
        for group in groups:
            group.record()
        self._graph = graphs.CUDAGraph(place, pool_id=_pool())
        errors: list[Exception] = []  # the first is the cause
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
    """Return whether a graph at `place` replays what it captured; some record nothing, silently."""
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
