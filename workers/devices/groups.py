"""Paddle's process groups for reference ops: gloo on a CPU, NCCL or BKCL on devices.

Made by the device (`paddle.py`), used by `ops/paddle/rank_group.py`. Before each collective the ranks meet in the comm arena,
where a wait reports progress, ends with the epoch, and detects mismatched calls. The collective itself takes only as long as
its tensors need. No group continues without a rank: the supervisor ends the other processes too.
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

_BACKENDS = {"cpu": "gloo", "gpu": "nccl", "xpu": "bkcl"}  # custom devices: xccl


class PaddleGroup:
    """The ranks of a communicator, with tensors of the device `name`."""

    def __init__(self, meeting: Meeting, device: str) -> None:
        self._communicator = meeting.communicator
        self.place, self.count = meeting.communicator.place, meeting.communicator.count
        os.environ["PADDLE_TRAINER_ID"] = str(meeting.communicator.rank)  # Paddle reads both from there
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ["NCCL_GRAPH_REGISTER"] = "0"  # otherwise NCCL would synchronize ranks during a capture, to register buffers
        backend = _BACKENDS.get(device, "xccl")
        self._met = _process_group(backend, meeting.port, meeting.life, self.place, self.count)
        self._group = self._met.group
        self._has_stream = backend != "gloo"
        self._rehearsed: list[np.ndarray] | None = None  # values exchanged in the rehearsal of a capture
        self._is_recording = False

    def rehearse(self) -> None:
        """Begin the rehearsal of the next capture."""
        self._rehearsed, self._is_recording = [], False

    def record(self) -> None:
        """Begin to record after the rehearsal. Ranks exchange nothing meanwhile, so none waits for another that may have failed
        midway; values are those of the rehearsal."""
        self._is_recording = True

    def end_capture(self) -> None:
        self._rehearsed, self._is_recording = None, False

    def gather_words(self, word: str) -> list[str]:
        """Return every rank's word, once all have sent one: through the store, for ranks that have not joined yet."""
        number, store = next(self._met.questions), self._met.store
        keys = [f"{self._met.life}.words.{number}.{place}" for place in range(self.count)]
        store.set(keys[self.place], f"={word}")
        for key in keys:
            store.wait(key)
        return [store.get(key).decode()[1:] for key in keys]

    def gather_values(self, values: np.ndarray) -> np.ndarray:
        if self._is_recording:
            assert self._rehearsed, "more values are sent than were rehearsed"
            return self._rehearsed.pop(0)
        gathered = self._communicator.all_gather(values)
        if self._rehearsed is not None:
            self._rehearsed.append(gathered)
        return gathered

    def all_gather(self, x: paddle.Tensor) -> paddle.Tensor:
        """Gather tensors. Raises RankGroupBroken if a rank is gone, and RuntimeError for other failures."""
        y = paddle.empty([self.count * x.shape[0], x.shape[1]])
        if not self._is_recording:
            self._communicator.barrier()
        try:
            if self._has_stream:  # the stream of all other work: also in a graph, the collective follows the ops before it
                self._group.all_gather_into_tensor_on_calc_stream(y, x.contiguous())
            else:
                self._group.all_gather_into_tensor(y, x.contiguous(), True).wait()
        except RuntimeError:
            if not self._is_recording:
                self._communicator.barrier()  # breaks as soon as the supervisor reports a missing rank
            raise
        return y.reshape([self.count, *x.shape])


class _Met(NamedTuple):
    group: Any
    store: Any
    life: str
    questions: Iterator[int]  # number of the next one


@functools.cache
def _process_group(backend: str, port: int, life: str, place: int, count: int) -> _Met:
    """Make one process group per port."""
    store = core.TCPStore(LOOPBACK, port, False, count)
    if store.add(f"{life}.arrived", 1) == count:
        store.set(f"{life}.all", "")
    store.wait(f"{life}.all")  # gloo's own wait is shorter than the start of a process may take
    make: Any = collective._new_process_group_impl  # called by its init_parallel_env, which has a separate store
    return _Met(make(backend, store, place, count, life, None, port), store, life, itertools.count())
