"""Host memory for copies is registered with the driver, or noted where that fails."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from tests.ops.cuda.card import emulated_library
from workers.devices.cuda.device import CudaDevice
from workers.devices.host_memory import HostMemory

INT32 = np.dtype(np.int32)


def registered_bytes(driver: str) -> int:
    return int(ctypes.CDLL(driver).libcuda_registered_bytes())


def test_host_memory_is_registered(driver: str) -> None:
    memory, before = HostMemory(driver, 0), registered_bytes(driver)
    arrays = [memory.array(size, INT32) for size in (1, 1024, 1025)]
    assert registered_bytes(driver) - before == 4 * mmap.PAGESIZE
    for array, size in zip(arrays, (1, 1024, 1025), strict=True):
        assert array.shape == (size,)
        assert not array.any()
        array[:] = 7


def test_results_that_grow_lock_little_memory(driver: str) -> None:
    """Memory of earlier, smaller copies is never freed."""
    device, before = CudaDevice(driver, 0, "float32", emulated_library().parent), registered_bytes(driver)
    for num_rows in range(1, 65):
        rows = np.full((num_rows, 4096), num_rows, np.float32)
        assert (device.fetch("logits", device.tensor(rows)).wait() == rows).all()
    assert registered_bytes(driver) - before < 2 * rows.nbytes + mmap.PAGESIZE


@pytest.mark.parametrize("library", ["", "of the driver", "/nowhere/libcuda.so.1"])
def test_unregistered_memory_is_usable(
    driver: str, library: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LIBCUDA_FAILS", "cuMemHostRegister_v2")
    before = registered_bytes(driver)
    memory = HostMemory(driver if library == "of the driver" else library, 0)
    for _ in range(2):
        memory.array(8, INT32)[:] = 7
    assert registered_bytes(driver) == before
    assert len(caplog.records) == (1 if library else 0), "one warning, where there should be a driver"
