"""A Paddle place with the reference ops. Except for the ops themselves, `groups.py`, `graphs.py` and `rank_group/gloo.py` the
only module that imports Paddle; made by `device.py` without a native op table. On a CPU the host's arrays and Paddle's tensors
are the same memory."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import paddle
from paddle.base import core
from paddle.utils import dlpack

from engine.errors import OptionError
from engine.installation import CUDA_DRIVER
from engine.metric_labels import DEVICE_DTYPES
from ops.paddle import reference
from ops.paddle.rank_group import RankGroupOps
from workers.devices.capabilities import Capabilities, DeviceError
from workers.devices.enqueued import Fetch, Fetched, Traffic
from workers.devices.graphs import PaddleGraph, replays
from workers.devices.groups import PaddleGroup
from workers.devices.host_memory import HostMemory
from workers.devices.persistent_kv_arena import ON_GPU, ON_HOST, PersistentKvArena
from workers.rank_group.rendezvous import Rendezvous

_LEAST_LANDING = 1 << 10  # minimum size, so that small fetches, which grow with the batch, share one buffer
_RELEASES = {"gpu": "cuda_empty_cache", "xpu": "xpu_empty_cache"}  # Paddle's function by device, if not a custom one
_UNABLE = (RuntimeError, ValueError, TypeError, OSError)  # Paddle's errors for unsupported operations


def _leave_signals_alone() -> None:
    """Remove Paddle's signal handlers, which it installs on import and which report a crash when an actor ends on SIGTERM.
    Handlers set before are removed too."""
    paddle.disable_signal_handler()
    if faulthandler.is_enabled():
        faulthandler.disable()
        faulthandler.enable()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


class PaddleDevice:
    """`name` is "cpu", "gpu", "xpu" or a custom device's; each rank has the card of its number."""

    fallbacks: tuple[tuple[str, str], ...] = ()

    def __init__(
        self, name: str, rank: int = 0, meetings: Rendezvous | None = None, lasting: PersistentKvArena | None = None
    ) -> None:
        _leave_signals_alone()
        custom = {kind: core.get_custom_device_count(kind) for kind in paddle.device.get_all_custom_device_type() or []}
        counts = dict(custom)
        if paddle.is_compiled_with_cuda():
            counts["gpu"] = paddle.device.cuda.device_count()
        if paddle.is_compiled_with_xpu():
            counts["xpu"] = paddle.device.xpu.device_count()
        self._kind, self._is_host, self._lasting = name, name == "cpu", lasting
        # else Paddle silently runs unsupported ops on the CPU, and tensors written in place would move
        paddle.set_flags({"FLAGS_enable_api_kernel_fallback": self._is_host})
        if not self._is_host and counts.get(name, 0) <= rank:
            usable = ", ".join(["cpu", *(f"{count} {kind}" for kind, count in sorted(counts.items()))])
            raise OptionError(
                f"--device {name}: rank {rank} needs device {rank}, but Paddle {paddle.__version__} finds {usable}"
            )
        self.place: Any = core.CPUPlace()
        if name in custom:
            self.place = core.CustomPlace(name, rank)
        elif not self._is_host:
            self.place = core.CUDAPlace(rank) if name == "gpu" else core.XPUPlace(rank)
        paddle.device.set_device(self.place)
        self.traffic = Traffic()
        self._card = rank
        self._host_memory = HostMemory(CUDA_DRIVER if name == "gpu" else "", rank)
        self._stagings: dict[int, paddle.Tensor] = {}  # by address
        self._sent: dict[int, Any] = {}  # by address: the event after the last copy
        self._landings: dict[str, tuple[paddle.Tensor, np.ndarray]] = {}  # of fetches, by key
        core.set_cublas_switch(False)  # float32 products in float32, not TF32
        self._arrivals: dict[str, Any] = {}  # events live as long as the device, because destroying one waits for it
        self.ops = reference.TABLE
        self.rank_group: RankGroupOps | None = None  # None for a single rank
        self._groups: list[PaddleGroup] = []
        if meetings is not None:
            kind = name if name not in custom else "custom"
            groups = [PaddleGroup(meeting, kind) if meeting else None for meeting in (meetings.tensor, meetings.experts)]
            self.rank_group = RankGroupOps(*groups)
            self.ops = self.rank_group.table()
            self._groups = [group for group in groups if group is not None]
        self.capabilities = self._ask(paddle.device.get_device())

    def tensor(self, host: np.ndarray) -> paddle.Tensor:
        return dlpack.from_dlpack(host) if self._is_host else paddle.to_tensor(host)

    def upload(self, host: np.ndarray, tensor: paddle.Tensor) -> None:
        if not self._is_host:
            self.traffic.num_to_device += 1
            cast(Any, tensor).copy_(paddle.to_tensor(host, place=paddle.CPUPlace()), True)

    def arena(self, memory: np.ndarray) -> paddle.Tensor:
        if self._lasting is not None and self._lasting.has(memory):
            return dlpack.from_dlpack(self._lasting.capsule(memory, ON_HOST if self._is_host else ON_GPU))
        return dlpack.from_dlpack(memory) if self._is_host else paddle.zeros(memory.shape, cast(Any, str(memory.dtype)))

    def staging(self, num_values: int) -> np.ndarray:
        tensor, host = self._on_host(num_values, "int32")
        self._stagings[host.ctypes.data] = tensor
        return host

    def send(self, staging: np.ndarray, tensor: paddle.Tensor, count: int) -> None:
        self.traffic.num_to_device += 1
        _copy(tensor[:count], self._stagings[staging.ctypes.data][:count])
        if not self._is_host:
            self._sent.setdefault(staging.ctypes.data, paddle.device.Event()).record()

    def settle(self, staging: np.ndarray) -> None:
        sent = self._sent.get(staging.ctypes.data)
        if sent is not None and not sent.query():
            begin_ns = time.monotonic_ns()
            sent.synchronize()
            self.traffic.waited_ns += time.monotonic_ns() - begin_ns

    def put(self, tensor: paddle.Tensor, places: np.ndarray, values: np.ndarray) -> None:
        if len(places):
            self.traffic.num_to_device += 2  # places and values
            at, what = (paddle.to_tensor(each.astype(np.int32)) for each in (places, values))
            paddle.scatter_(tensor, at, what)

    def fetch(self, key: str, tensor: paddle.Tensor) -> Fetch:
        self.traffic.num_to_host += 1
        if self._is_host:
            return Fetched(tensor.numpy())
        size = int(tensor.size)
        room = self._landings[key][1].size if key in self._landings else 0
        if room < size:
            dtype = "int32" if tensor.dtype == paddle.int32 else "float32"
            self._landings[key] = self._on_host(max(size, 2 * room, _LEAST_LANDING), dtype)
        landing, host = self._landings[key]
        _copy(landing[:size], tensor.flatten())
        if key not in self._arrivals:
            self._arrivals[key] = paddle.device.Event()
        self._arrivals[key].record()
        return _Landing(self._arrivals[key], host[:size].reshape(tensor.shape), self.traffic)

    def capture(self, run: Callable[[], object], group: int = 0) -> PaddleGraph:
        graph, cause = None, ""
        try:
            graph = PaddleGraph(self.place, run, self._groups)
        except DeviceError as error:
            cause = str(error)
        for ranks in self._groups:
            ranks.end_capture()
            if not ranks.gather_values(np.array([graph is not None])).all():
                cause = cause or f"{self.place}: another rank cannot capture it"
        if graph is None or cause:
            raise DeviceError(cause)
        return graph

    def agreed_fault(self, fault: str) -> str:
        for group in self._groups:
            others = [word for place, word in enumerate(group.gather_words(fault)) if word and place != group.place]
            fault = fault or (f"another rank found that {others[0]}" if others else "")
        return fault

    def finish(self) -> None:
        """Do nothing: all ranks end with one of them."""

    def address(self, tensor: paddle.Tensor) -> int:
        address: int = tensor.data_ptr()
        return address

    def memory_bytes(self) -> int:
        if self._is_host:
            return 0
        try:
            return int(core.device_memory_stat_current_value("Allocated", self._card))
        except _UNABLE:
            return 0

    def release_unused(self) -> None:
        if not self._is_host:
            getattr(core, _RELEASES.get(self._kind, "device_empty_cache"))()

    def threads_of(self, num_ranks: int) -> AbstractContextManager[None]:
        """Do nothing: Paddle has its own threads."""
        return contextlib.nullcontext()

    def _on_host(self, num_values: int, dtype: str) -> tuple[paddle.Tensor, np.ndarray]:
        """Return the same memory as a tensor of the CPU place, where ops do not move it, and as an array."""
        host = self._host_memory.array(num_values, np.dtype(dtype))
        return dlpack.from_dlpack(host), host

    def _ask(self, place: str) -> Capabilities:
        memory = np.zeros(1, np.float32)
        is_arena_lasting = self._lasting is not None or self.address(self.arena(memory)) == memory.ctypes.data
        dtypes = tuple(dtype for dtype in DEVICE_DTYPES if _multiplies(dtype))
        return Capabilities(place, replays(self.place), is_arena_lasting, dtypes)


class _Landing:
    """Fetch that is done when its event is."""

    def __init__(self, event: paddle.device.Event, values: np.ndarray, traffic: Traffic) -> None:
        self._event, self._values, self._traffic = event, values, traffic

    def wait(self) -> np.ndarray:
        begin_ns = time.monotonic_ns()
        self._event.synchronize()
        self._traffic.waited_ns += time.monotonic_ns() - begin_ns
        return self._values


def _copy(target: Any, source: paddle.Tensor) -> None:
    """Copy without waiting if the host memory is registered."""
    target.copy_(source, False)  # missing in Paddle's stubs


def _multiplies(dtype: Any) -> bool:
    try:
        x = paddle.full([16, 16], 0.5, dtype)
        return bool((paddle.matmul(x, x).astype("float32").numpy() == 4.0).all())
    except _UNABLE:
        return False
