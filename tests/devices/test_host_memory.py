"""Host memory for copies is registered with the driver, or noted where that fails."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

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
