"""Groups of Paddle's processes for reference ops: gloo on a CPU, NCCL or BKCL on devices.

Made by the device (`paddle.py`), used by `ops/paddle/rank_group.py`. Before each collective the ranks meet in the
comm arena: there a wait says that it gets on, ends with the epoch, and sees who makes another call. What follows takes as long
as the tensors take. No group goes on without a rank: the supervisor ends the processes of the others with it.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle.base import core
from paddle.distributed import collective

from workers.rank_group.rendezvous import Meeting
from workers.rank_group.store import LOOPBACK

_BACKENDS = {"cpu": "gloo", "gpu": "nccl", "xpu": "bkcl"}  # of custom devices: xccl


class PaddleGroup:
    """The ranks of a communicator, with tensors of a device, by its name."""

    def __init__(self, meeting: Meeting, device: str) -> None:
        self._communicator = meeting.communicator
        self.place, self.count = meeting.communicator.place, meeting.communicator.count
        os.environ["PADDLE_TRAINER_ID"] = str(meeting.communicator.rank)  # Paddle reads both from there
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ["NCCL_GRAPH_REGISTER"] = "0"  # NCCL would have the ranks meet while they capture, to register buffers
        backend = _BACKENDS.get(device, "xccl")
        self._met = _process_group(backend, meeting.port, meeting.life, self.place, self.count)
        self._group = self._met.group
        self._has_stream = backend != "gloo"
        self._told: list[np.ndarray] | None = None  # in the rehearsal of what is captured
        self._is_recording = False

    def rehearse(self) -> None:
        """Begin the rehearsal of what is captured next."""
        self._told, self._is_recording = [], False

    def record(self) -> None:
        """Begin to record what was rehearsed. Nothing is exchanged then, so no rank waits for another that may
        have failed midway; what ranks tell is what they told before."""
        self._is_recording = True

    def end_capture(self) -> None:
        self._told, self._is_recording = None, False

    def said(self, word: str) -> list[str]:
        """Return what each rank says, once all have: through the store, for ranks that have not joined yet."""
        number, store = next(self._met.questions), self._met.store
        keys = [f"{self._met.life}.said.{number}.{place}" for place in range(self.count)]
        store.set(keys[self.place], f"={word}")
        for key in keys:
            store.wait(key)
        return [store.get(key).decode()[1:] for key in keys]

    def tell(self, values: np.ndarray) -> np.ndarray:
        if self._is_recording:
            assert self._told, "more values are sent than were rehearsed"
            return self._told.pop(0)
        told = self._communicator.all_gather(values)
        if self._told is not None:
            self._told.append(told)
        return told

    def all_gather(self, x: paddle.Tensor) -> paddle.Tensor:
        """RankGroupBroken: a rank is gone. RuntimeError: something else is wrong."""
        y = paddle.empty([self.count * x.shape[0], x.shape[1]])
        if not self._is_recording:
            self._communicator.barrier()
        try:
            if self._has_stream:  # that of all other work: in a graph too it comes behind what it sends
                self._group.all_gather_into_tensor_on_calc_stream(y, x.contiguous())
            else:
                self._group.all_gather_into_tensor(y, x.contiguous(), True).wait()
        except RuntimeError:
            if not self._is_recording:
                self._communicator.barrier()  # breaks as soon as the supervisor says who is gone
            raise
        return y.reshape([self.count, *x.shape])


class _Met(NamedTuple):
    group: Any
    store: Any
    life: str
    questions: Iterator[int]  # the number of the next one


@functools.cache
def _process_group(backend: str, port: int, life: str, place: int, count: int) -> _Met:
    """One of a process for each port."""
    store = core.TCPStore(LOOPBACK, port, False, count)
    if store.add(f"{life}.arrived", 1) == count:
        store.set(f"{life}.all", "")
    store.wait(f"{life}.all")  # gloo waits for nobody as long as a process may take to start
    make: Any = collective._new_process_group_impl  # what its init_parallel_env calls, which has a store of its own
    return _Met(make(backend, store, place, count, life, None, port), store, life, itertools.count())
