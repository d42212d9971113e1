"""Faults of kernels that the emulated card reports and a real one would not."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ops.cuda.library import SOURCES, host_command
from ops.cuda.operands import memory_of

KERNELS = ("behind the end", "before the barrier", "behind the barrier", "any order", "apart", "copy", "shared", "product")


class Faults:
    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.last_error.restype = ctypes.c_char_p

    def run(self, kernel: str, x: np.ndarray, num_results: int, seed: int = 0) -> np.ndarray:
        """Run a kernel. RuntimeError: the report of the emulation."""
        y = np.zeros(num_results, np.float32)
        both = (memory_of(x.ctypes.data, x.nbytes, 4), memory_of(y.ctypes.data, y.nbytes, 4))
        operands = (type(both[0]) * 2)(*both)
        self._library.set_seed(seed)
        if self._library.run_kernel(KERNELS.index(kernel), operands) != 0:
            raise RuntimeError(self._library.last_error().decode())
        return y


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    path = tmp_path_factory.mktemp("faults") / "faults.so"
    source = Path(__file__).with_name("faults.cu")
    own = "-fno-gnu-unique"  # a machine apart from that of the rows' library in this process
    subprocess.run([*host_command(), own, f"-I{SOURCES}", "-o", str(path), str(source)], check=True)
    return Faults(path)


def numbers(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("behind the end", r"element 64 of a buffer of 64 \(block 0 0 0, thread 63\)"),
        ("apart", "wait for each other at different places"),
        ("shared", r"bytes 1024 to 1028 of 1024 of shared memory"),
    ],
)
def test_faults_are_named(faults: Faults, kernel: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        faults.run(kernel, numbers(64), 64)
    np.testing.assert_array_equal(faults.run("behind the barrier", numbers(64), 64), np.roll(numbers(64), -1))


def test_unwritten_memory_reads_as_nan(faults: Faults) -> None:
    """A neighbour has not written yet, or a copy is in progress."""
    assert np.isnan(faults.run("before the barrier", numbers(64), 64)).any()
    assert np.isnan(faults.run("copy", numbers(64), 64)).all()


def test_unordered_access_is_detected(faults: Faults) -> None:
    x = numbers(64) * np.float32(10) ** np.arange(64, dtype=np.float32)[::-1].clip(0, 6)
    assert len({faults.run("any order", x, 1, seed).tobytes() for seed in range(8)}) > 1
    assert len({faults.run("behind the barrier", x, 64, seed).tobytes() for seed in range(8)}) == 1


def test_products_of_a_warp(faults: Faults) -> None:
    """Numbers are distributed among the lanes as in the manual of the instruction set."""
    x = (np.random.default_rng(0).integers(-8, 9, 256 + 128)).astype(np.float32)
    a, b = x[:256].reshape(16, 16), x[256:].reshape(16, 8)
    np.testing.assert_array_equal(faults.run("product", x, 128).reshape(16, 8), a @ b)
