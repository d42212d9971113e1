"""The op tables that this machine can run: the reference, CUDA's rows on an emulated card, and the native one with each of its
instruction sets and with one and two threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ops import _cpu
from ops.cpu import table as native
from ops.cuda import table as cuda
from ops.paddle import reference
from ops.table import OpTable
from tests.ops.caches import DTYPES
from tests.ops.cuda.card import emulated_card

TABLES = ["reference", "cuda", *(f"{variant}-{threads}" for variant in _cpu.variants() for threads in (1, 2))]
# and with each type of keys and values that they take, the narrow ones with two threads: for tests with the fixture `k`, as
# indirect parameter, and `kv_dtype`. On the emulated card they take long: `cuda/test_table.py` chooses some
CACHES = [(name, dtype) for name in TABLES if name != "cuda" for dtype in (DTYPES if name.endswith("-2") else ["float32"])]


@contextmanager
def table(name: str) -> Iterator[OpTable]:
    if name == "reference":
        yield reference.TABLE
        return
    if name == "cuda":
        yield cuda.make_table(emulated_card())
        return
    variant, threads = name.split("-")
    before = _cpu.variant(), _cpu.num_threads()
    assert _cpu.select(variant)
    _cpu.set_num_threads(int(threads))
    yield native.TABLE
    _cpu.select(before[0])
    _cpu.set_num_threads(before[1])
