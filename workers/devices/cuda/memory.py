"""Memory of a card for one stream: taken from the driver once, and given again to later arrays of about the same size.

All work of a process is in the order of one stream, so memory that is free on the host may be written by the next kernel: the
kernels that read it before are before it on the card. Arrays of captured work have a pool of their own, since a replay writes
them at any time. The graphs of a group share it, results included: those of a replay are read before the next one.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from shm.cuda_driver import CudaDriver
from shm.sizes import size_text
from workers.devices.capabilities import DeviceError, FullDeviceError

_ALIGNMENT = 512  # bytes, the driver's own
_MAPPED = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
_STEPS = 4  # sizes of blocks between two powers of two
_LASTING, _PASSING, _CAPTURED = range(3)  # pools; the last is that of the first group of graphs


class Block:
    """Memory that is free again when this object is deleted."""

    __slots__ = ("_release", "address", "capture", "num_bytes", "pool")

    def __init__(self, address: int, num_bytes: int, pool: int, capture: int, release: Callable[[Block], None]) -> None:
        self.address, self.num_bytes, self.pool, self.capture, self._release = address, num_bytes, pool, capture, release

    def __del__(self) -> None:
        self._release(self)


class StreamMemory:
    """Memory of the card of `driver` (`CardMemory`), in the order of `stream`."""

    def __init__(self, driver: CudaDriver, stream: int) -> None:
        self._driver, self._stream = driver, stream
        self._free: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # by pool and size: addresses
        self._pool = _PASSING
        self._captures: defaultdict[int, int] = defaultdict(int)  # by pool: number of the last one
        self._captured: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by pool: sizes, by address
        self.num_graphs = 0  # that use it
        self._registered: list[tuple[int, int]] = []  # begin and end of the host's pages that the card may use
        self._lent: dict[tuple[int, int], int] = {}  # by begin and end of host memory: what the card adds to its addresses
        self.num_bytes = 0  # taken from the driver

    def allocate(self, num_bytes: int, *, is_lasting: bool = False) -> tuple[int, Block]:
        pool = _LASTING if is_lasting else self._pool
        size = _whole(num_bytes) if is_lasting else size_of_block(num_bytes)
        if pool >= _CAPTURED:  # the largest graph is captured first, the others fit into its memory
            free = (each for (of, each), addresses in self._free.items() if of == pool and each >= size and addresses)
            size = min(free, default=size)
        addresses = self._free[pool, size]
        address = addresses.pop() if addresses else self._taken(size)
        if pool >= _CAPTURED:
            self._captured[pool][address] = size
        return address, Block(address, size, pool, self._captures[pool], self._released)

    def lend(self, memory: np.ndarray, room: np.ndarray | None = None) -> None:
        """Let the card use `memory` of the host, and the rest of its pages, from now on. No effect if it may already. `room`:
        an array with `memory` in it, which kernels are given whole, but of which they use only lent parts. DeviceError if the
        card cannot."""
        begin, end = _pages_of(memory)
        if any(first <= begin and end <= last for first, last in self._registered):
            return
        self._driver.call("cuMemHostRegister_v2", begin, end - begin, _MAPPED)
        self._registered.append((begin, end))
        offset = self._driver.made("cuMemHostGetDevicePointer_v2", begin, 0) - begin
        if self._lent.setdefault(_pages_of(memory if room is None else room), offset) != offset:
            raise DeviceError("the card sees parts of an array of the host at unrelated addresses")

    def host_address(self, values: np.ndarray) -> int:
        address = int(values.ctypes.data)
        for (begin, end), offset in self._lent.items():
            if begin <= address and address + values.nbytes <= end:
                return address + offset
        raise AssertionError(f"{values.nbytes} bytes of the host at {address:#x} were not lent to the card")

    def write(self, address: int, values: np.ndarray) -> None:
        if values.nbytes:
            self._driver.call("cuMemcpyHtoDAsync_v2", address, values.ctypes.data, values.nbytes, self._stream)
            self._driver.call("cuStreamSynchronize", self._stream)

    def read(self, address: int, values: np.ndarray) -> None:
        if values.nbytes:
            self._driver.call("cuMemcpyDtoHAsync_v2", values.ctypes.data, address, values.nbytes, self._stream)
        self._driver.call("cuStreamSynchronize", self._stream)

    def clear(self, address: int, num_bytes: int) -> None:
        """Enqueue zeros there."""
        self._driver.call("cuMemsetD8Async", address, 0, num_bytes, self._stream)

    @contextlib.contextmanager
    def captured(self, group: int) -> Iterator[None]:
        """Give memory from the pool of this group of graphs within the context: all of it, whatever earlier graphs hold."""
        self._pool = pool = _CAPTURED + group
        self._captures[pool] += 1
        for size in self._captured[pool].values():
            self._free[pool, size] = []
        for address, size in self._captured[pool].items():
            self._free[pool, size].append(address)
        try:
            yield
        finally:
            self._pool = _PASSING

    def _taken(self, size: int) -> int:
        for is_last in (False, True):
            try:
                address = self._driver.made("cuMemAlloc_v2", size)
            except DeviceError as error:
                if not is_last and self.release_unused():
                    continue
                if "OUT_OF_MEMORY" not in str(error):
                    raise
                raise FullDeviceError(
                    f"the GPU's memory is full: no room for {size_text(size)} beside {size_text(self.num_bytes)} of this rank, "
                    f"its KV cache, and what other processes use ({error}); stop those (nvidia-smi), or lower "
                    "--gpu-memory-utilization"
                ) from error
            else:
                self.num_bytes += size
                return address
        raise AssertionError("the second attempt returns or raises")

    def release_unused(self) -> bool:
        """Give all free memory back to the driver, but what graphs use; return whether there was any."""
        given = [(key, addresses) for key, addresses in self._free.items() if addresses]
        if self.num_graphs:
            given = [each for each in given if each[0][0] < _CAPTURED]
        self._driver.call("cuStreamSynchronize", self._stream)
        for (pool, size), addresses in given:
            for address in addresses:
                self._driver.call("cuMemFree_v2", address)
                self._captured[pool].pop(address, None)
                self.num_bytes -= size
            self._free[pool, size] = []
        return bool(given)

    def _released(self, block: Block) -> None:
        if block.pool == _LASTING:
            with contextlib.suppress(DeviceError):  # after a failed kernel nothing can be freed
                self._driver.call("cuStreamSynchronize", self._stream)
                self._driver.call("cuMemFree_v2", block.address)
                self.num_bytes -= block.num_bytes
            return
        if block.pool < _CAPTURED or block.capture == self._captures[block.pool]:  # others are free since a later capture began
            self._free[block.pool, block.num_bytes].append(block.address)


def _pages_of(memory: np.ndarray) -> tuple[int, int]:
    begin, page = int(memory.ctypes.data), mmap.PAGESIZE
    return begin // page * page, -(-(begin + memory.nbytes) // page) * page


def size_of_block(num_bytes: int) -> int:
    """Return the size of the block for so many bytes: at most a quarter more."""
    if num_bytes <= _ALIGNMENT * _STEPS:
        return _whole(num_bytes)
    step = 1 << ((num_bytes - 1).bit_length() - 3)
    return _whole(-(-num_bytes // step) * step)


def _whole(num_bytes: int) -> int:
    return max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
