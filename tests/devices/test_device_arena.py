"""KV arenas in memory of cards, on a stand-in for the driver: made by a child, held by the supervisor, found by the successor
of a killed worker.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from engine.errors import StartError
from engine.supervisor.device_arenas import device_arenas
from shm.cuda_driver import DriverLibrary
from shm.device_memory import DeviceMemory
from shm.errors import SharedMemoryError
from tests.devices.persistent_arena_worker import NUM_BYTES, run_worker

pytestmark = pytest.mark.slow


def test_kv_survives_a_killed_worker(driver: str) -> None:
    with device_arenas(driver, 2, NUM_BYTES) as (arena, other):
        assert not os.get_inheritable(arena)
        assert not os.path.samestat(os.fstat(arena), os.fstat(other)), "each rank has its own"
        whole = run_worker(driver, arena, has_blocks=False)
        again = run_worker(driver, arena, has_blocks=True)
    assert (whole["num_computed"], again["num_computed"]) == (0, 32), "two blocks were there"
    assert (again["outputs"], again["logprobs"]) == (whole["outputs"], whole["logprobs"])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(arena)


def test_memory_is_zeroed_and_shared_by_all_addresses(driver: str) -> None:
    with device_arenas(driver, 1, NUM_BYTES) as (descriptor,):
        memory = DeviceMemory(driver, 0)
        here, there = (memory.map(descriptor, NUM_BYTES) for _ in range(2))
        assert here != there
        assert ctypes.string_at(here, NUM_BYTES) == bytes(NUM_BYTES)
        ctypes.memmove(here + NUM_BYTES - 4, b"last", 4)
        assert ctypes.string_at(there + NUM_BYTES - 4, 4) == b"last"


def test_failed_mapping_holds_no_memory(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, maps = DeviceMemory(driver, 0), Path("/proc/self/maps")
    descriptor, before = memory.allocate(NUM_BYTES), maps.read_text().count("memfd:card")
    monkeypatch.setenv("LIBCUDA_FAILS", "cuMemSetAccess")
    with pytest.raises(SharedMemoryError, match="cuMemSetAccess: CUDA_ERROR_NOT_SUPPORTED"):
        memory.map(descriptor, NUM_BYTES)
    assert maps.read_text().count("memfd:card") == before
    os.close(descriptor)


def test_no_arenas_without_a_driver() -> None:
    with device_arenas("", 2, NUM_BYTES) as found:
        assert found == []


@pytest.mark.parametrize(
    ("num_ranks", "num_bytes", "cause"),
    [
        (1, 3 << 30, r"arena0: .* of 3 GiB cannot be allocated on GPU 0: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY; make it"),
        (3, 1 << 20, r"arena2: .* cannot be allocated on GPU 2: cuDeviceGet: CUDA_ERROR_NO_DEVICE; .*nvidia-smi"),
    ],
)
def test_failed_allocation_names_the_cause(driver: str, num_ranks: int, num_bytes: int, cause: str) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(StartError, match=cause), device_arenas(driver, num_ranks, num_bytes):
        pass
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"])
def test_unshared_memory_is_noted_once(driver: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBCUDA_FAILS", call)
    notes: list[str] = []
    with device_arenas(driver, 2, NUM_BYTES, notes.append) as found:
        assert found == [-1, -1]
    (note,) = notes
    assert note.startswith("KV cache of GPU 0, 1 ends with its worker: the driver cannot share memory between processes ")
    assert f"({call}: CUDA_ERROR_NOT_SUPPORTED); " in note


def test_driver_without_visible_cards(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert DriverLibrary(driver, SharedMemoryError).cards() == []


def test_missing_driver_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "libcuda.so.1"
    says = f"no driver of NVIDIA's cards: {missing}"
    with pytest.raises(StartError, match=says), device_arenas(str(missing), 1, NUM_BYTES):
        pass
