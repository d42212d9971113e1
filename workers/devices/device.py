"""The device of this rank: memory for tensors, transfers of the host, and capabilities.

Made by the runners. Native ops only need memory: their tensors are the host's arrays, and Paddle is not imported. With
reference ops tensors are Paddle's (`paddle.py`).

Capabilities are found by trying, once, when the device is made (`Capabilities`), never from its name.
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
    """Memory for tensors, and the ops that run on it."""

    ops: OpTable
    rank_group: Any  # `RankGroupOps` on Paddle's tensors; None: a single rank, or ranks use the comm arena
    fallbacks: tuple[tuple[str, str], ...]  # op and candidate of those found to be wrong here (`op_choice.py`)
    place: Any  # Paddle's place; None: memory of the host
    traffic: Traffic
    capabilities: Capabilities

    def tensor(self, host: np.ndarray) -> Tensor:
        """Return a tensor tied to `host`: the same memory on a CPU, else a copy that `upload` refreshes."""

    def upload(self, host: np.ndarray, tensor: Tensor) -> None:
        """Copy `host` to `tensor`, which keeps its address."""

    def arena(self, memory: np.ndarray) -> Tensor:
        """Return a part of the cache: `memory` itself, with its contents, if the device can use it; else as much memory of its
        own, zeros."""

    def staging(self, num_values: int) -> np.ndarray:
        """Return an int32 array on the host from which `send` copies without waiting, if the device supports that."""

    def send(self, staging: np.ndarray, tensor: Tensor, count: int) -> None:
        """Enqueue a copy of the first `count` values of `staging` to `tensor`. They must not change until it is done
        (`settle`)."""

    def settle(self, staging: np.ndarray) -> None:
        """Wait until the last copy from `staging` is done."""

    def put(self, tensor: Tensor, places: np.ndarray, values: np.ndarray) -> None:
        """Write `values` at `places` (integers [n]) of an int32 `tensor`; may wait."""

    def fetch(self, key: str, tensor: Tensor) -> Fetch:
        """Enqueue a copy of a float32 or int32 `tensor` to the host, into separate memory for each `key`."""

    def capture(self, run: Callable[[], object], group: int = 0) -> Graph:
        """Capture the work that `run` enqueues; it runs once before. Results of a replay are valid until the next one of the
        same `group`. Ranks that share matrices capture together. Raises DeviceError on all of them if one cannot."""

    def agreed_fault(self, fault: str) -> str:
        """Return the fault of this rank, or of one that it computes with; empty: none. All of them call it."""

    def finish(self) -> None:
        """Wait until enqueued work that other ranks take part in is done. Raises RankGroupBroken if one of them has gone."""

    def address(self, tensor: Tensor) -> int:
        """Return the tensor's address."""

    def memory_bytes(self) -> int:
        """Return the device memory of this rank's tensors; 0 if it is the host's, or not counted."""

    def release_unused(self) -> None:
        """Return memory that no tensor uses to the device's driver, for other processes."""

    def threads_of(self, num_ranks: int) -> AbstractContextManager[None]:
        """Use the threads of `num_ranks` ranks, on any core, within the context: while one of them packs, the others wait."""


class HostDevice:
    """This machine's cores, with native ops on `num_threads` of them: on `cores`, or any if empty; with the kernel variant of
    each part in `variants`. `rank_group`: the ranks that share a model's matrices."""

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
            _LOG.warning(
                "using %s kernels, although this processor supports %s; %s", _cpu.variant(), ", ".join(missing), BUILD_AGAIN
            )

    def tensor(self, host: np.ndarray) -> np.ndarray:
        return host

    def upload(self, host: np.ndarray, tensor: Tensor) -> None:
        """Do nothing: they are the same memory."""

    def arena(self, memory: np.ndarray) -> np.ndarray:
        return memory

    def staging(self, num_values: int) -> np.ndarray:
        return np.zeros(num_values, np.int32)

    def send(self, staging: np.ndarray, tensor: Tensor, count: int) -> None:
        tensor[:count] = staging[:count]

    def settle(self, staging: np.ndarray) -> None:
        """Do nothing: the copy is done."""

    def put(self, tensor: Tensor, places: np.ndarray, values: np.ndarray) -> None:
        tensor[places] = values

    def fetch(self, key: str, tensor: Tensor) -> Fetched:
        return Fetched(tensor.numpy())

    def capture(self, run: Callable[[], object], group: int = 0) -> Graph:
        raise DeviceError("native ops are recorded as tapes; the CPU has no graphs")

    def agreed_fault(self, fault: str) -> str:
        return fault

    def finish(self) -> None:
        """Do nothing: each op is done when it returns."""

    def address(self, tensor: Tensor) -> int:
        address: int = tensor.ctypes.data
        return address

    def memory_bytes(self) -> int:
        return 0

    def release_unused(self) -> None:
        """Do nothing: arrays are the host's."""

    @contextlib.contextmanager
    def threads_of(self, num_ranks: int) -> Iterator[None]:
        os.sched_setaffinity(0, self._allowed)  # inherited by the new threads
        _cpu.set_num_threads(self._num_threads * num_ranks)
        try:
            yield
        finally:
            _cpu.set_num_threads(self._num_threads, self._cores)


def missing_variants() -> list[str]:
    """Return kernel variants that would be faster here than the best one that was built."""
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
    """Return the device `name` (as for `--device`) with the op table "native" (only on a CPU), or else the reference's. Raises
    OptionError if the installed Paddle has no such device. Ranks that exchange tensors do so in a `rank_group` with native ops,
    and with reference ops in process groups, at the places in `meetings`. `place`: among `num_beside` ranks on the same cores;
    cards are assigned by `rank`. `lasting`: the card's memory of the cache, which outlives the worker."""
    if ops == "native":
        assert name == "cpu", f"there are no native ops for {name}"
        allowed = os.sched_getaffinity(0)
        cores = rank_cores(place, num_beside, num_threads, allowed, os.cpu_count() or len(allowed))
        return HostDevice(num_threads, cores, variants or {}, rank_group)
    configure_blas(num_threads)
    if meetings is not None:
        meetings.open_stores()
    from workers.devices.paddle import PaddleDevice  # sets Paddle's BLAS options before it is loaded

    return PaddleDevice(name, rank, meetings, lasting)
