"""The device of this rank: where tensors live, how the host writes what a step reads, and what the device can.

Made by the runners. Native ops need nothing but memory: their tensors are the host's arrays, and Paddle is
not imported. With reference ops tensors are Paddle's (`paddle.py`).

What a device can is asked of it once, when it is made (`Capabilities`), by trying; nothing is concluded from its name.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from engine.installation import BUILD_AGAIN
from ops import _cpu
from ops.cpu import table as native
from ops.cpu.executors import Immediate
from ops.cpu.rank_group import RankGroup
from ops.modules import Tensor
from ops.table import OpTable
from workers.devices import kernels
from workers.devices.blas import configure_blas
from workers.devices.capabilities import Capabilities, DeviceError
from workers.devices.cores import rank_cores
from workers.devices.enqueued import Fetch, Fetched, Graph, Traffic
from workers.devices.persistent_kv_arena import PersistentKvArena
from workers.rank_group.rendezvous import Rendezvous

_LOG = logging.getLogger(__name__)


class Device(Protocol):
    """A place for tensors, and the ops that run there."""

    ops: OpTable
    rank_group: Any  # `GangOps` of Paddle's tensors; None: there is one rank, or what ranks exchange goes through `Rank group`
    fallbacks: tuple[tuple[str, str], ...]  # op and candidate, of what was found to be wrong here (`op_choice.py`)
    place: Any  # Paddle's; None: memory of the host
    traffic: Traffic
    capabilities: Capabilities

    def tensor(self, host: np.ndarray) -> Tensor:
        """A tensor that stays tied to `host`: the same memory on a CPU, else a copy that `upload` refreshes."""

    def upload(self, host: np.ndarray, tensor: Tensor) -> None:
        """Make `tensor` hold what `host` holds; its address stays."""

    def arena(self, memory: np.ndarray) -> Tensor:
        """A part of the cache: `memory` itself where that is the device's too, and what it holds stays; else as much of its
        own, zeros."""

    def staging(self, num_values: int) -> np.ndarray:
        """int32 of the host that `send` copies from without waiting, where the device can."""

    def send(self, staging: np.ndarray, tensor: Tensor, count: int) -> None:
        """Enqueue: the first `count` values of `staging` to `tensor`. They must stay until that is done (`settle`)."""

    def settle(self, staging: np.ndarray) -> None:
        """Wait until what was sent from it last has left it, where it has not yet."""

    def put(self, tensor: Tensor, places: np.ndarray, values: np.ndarray) -> None:
        """Write `values` at `places` (whole numbers [n]) of an int32 `tensor`; may wait."""

    def fetch(self, key: str, tensor: Tensor) -> Fetch:
        """Enqueue: the values of a float32 or int32 `tensor` to memory of the host, which each `key` has of its own."""

    def capture(self, run: Callable[[], object]) -> Graph:
        """Capture what `run` enqueues; it is run once before. Ranks that share matrices capture the same together. DeviceError,
        on all of them: one cannot capture it."""

    def agreed_fault(self, fault: str) -> str:
        """Return what is wrong here, or with a rank that this one computes with; empty: nothing. All of them call it."""

    def address(self, tensor: Tensor) -> int:
        """Where it lies."""

    def memory_bytes(self) -> int:
        """Return the memory that this rank's tensors have on it; 0 where it is the host's, or is not counted."""

    def threads_of(self, num_ranks: int) -> AbstractContextManager[None]:
        """Within, as many threads as so many ranks have together, on any core: while one of them packs, the others wait."""


class HostDevice:
    """This machine's cores, with native ops on `num_threads` of them from now on: on those of `cores`, or on any; and with the
    variant of the kernels that `variants` has for each part. `rank_group`: the ranks that share a model's matrices."""

    place = None
    rank_group = None
    fallbacks: tuple[tuple[str, str], ...] = ()
    capabilities = Capabilities("cpu", False, True, ("float32", "bfloat16"))

    def __init__(
        self, num_threads: int, cores: list[int], variants: Mapping[str, str], rank_group: RankGroup | None = None
    ) -> None:
        kernels.select(variants)
        self._num_threads, self._cores, self._allowed = num_threads, cores, os.sched_getaffinity(0)
        _cpu.set_num_threads(num_threads, cores)
        self.ops = native.make_table(Immediate(rank_group))
        self.traffic = Traffic()
        if missing := missing_variants():
            _LOG.warning("kernels: %s, though this processor runs %s; %s", _cpu.variant(), ", ".join(missing), BUILD_AGAIN)

    def tensor(self, host: np.ndarray) -> np.ndarray:
        return host

    def upload(self, host: np.ndarray, tensor: Tensor) -> None:
        """They are the same memory."""

    def arena(self, memory: np.ndarray) -> np.ndarray:
        return memory

    def staging(self, num_values: int) -> np.ndarray:
        return np.zeros(num_values, np.int32)

    def send(self, staging: np.ndarray, tensor: Tensor, count: int) -> None:
        tensor[:count] = staging[:count]

    def settle(self, staging: np.ndarray) -> None:
        """It has."""

    def put(self, tensor: Tensor, places: np.ndarray, values: np.ndarray) -> None:
        tensor[places] = values

    def fetch(self, key: str, tensor: Tensor) -> Fetched:
        return Fetched(tensor.numpy())

    def capture(self, run: Callable[[], object]) -> Graph:
        raise DeviceError("native ops are recorded as tapes; the CPU has no graphs")

    def agreed_fault(self, fault: str) -> str:
        return fault

    def address(self, tensor: Tensor) -> int:
        address: int = tensor.ctypes.data
        return address

    def memory_bytes(self) -> int:
        return 0

    @contextlib.contextmanager
    def threads_of(self, num_ranks: int) -> Iterator[None]:
        if num_ranks == 1:
            yield
            return
        os.sched_setaffinity(0, self._allowed)  # which the new threads inherit
        _cpu.set_num_threads(self._num_threads * num_ranks)
        try:
            yield
        finally:
            _cpu.set_num_threads(self._num_threads, self._cores)


def missing_variants() -> list[str]:
    """Variants of the kernels that would be better here than the best of those that were built."""
    known = _cpu.known_variants()
    best = [name for name, _, _ in known].index(_cpu.variants()[-1])
    return [name for name, is_built, is_runnable in known[best + 1 :] if is_runnable and not is_built]


def make_device(
    name: str,
    ops: str,
    num_threads: int,
    rank: int = 0,
    place: int = 0,
    num_beside: int = 1,
    variants: Mapping[str, str] | None = None,
    rank_group: RankGroup | None = None,
    meetings: Rendezvous | None = None,
    lasting: PersistentKvArena | None = None,
) -> Device:
    """The device `name` (as `--device`) with the op table "native" (on a CPU alone), or else the reference's. Raises
    OptionError where the installed Paddle has no such device. Ranks that exchange tensors do so in a `rank_group` with native
    ops, with reference ops in groups of processes, which find each other as `meetings` says. `place` of `num_beside` ranks
    that may use the same cores; cards are each `rank`'s own. `lasting`: the card's memory for the cache, which outlives us."""
    if ops == "native":
        assert name == "cpu", f"there are no native ops for {name}"
        allowed = os.sched_getaffinity(0)
        cores = rank_cores(place, num_beside, num_threads, allowed, os.cpu_count() or len(allowed))
        return HostDevice(num_threads, cores, variants or {}, rank_group)
    configure_blas(num_threads)
    if meetings is not None:
        meetings.open_stores()
    from workers.devices.paddle import PaddleDevice  # Paddle reads the settings of its BLAS when it is loaded

    return PaddleDevice(name, rank, meetings, lasting)
