"""The op tables that this machine can run: the reference, CUDA's rows on an emulated card, and the native one with each of its
instruction sets: the best with one and with two threads, since work is divided the same way with all of them; the others with
one or two in turn.
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

*_OTHERS, _BEST = _cpu.variants()
_OF_BEST = [f"{_BEST}-1", f"{_BEST}-2"]
TABLES = ["reference", "cuda", *(f"{variant}-{1 + number % 2}" for number, variant in enumerate(_OTHERS)), *_OF_BEST]
# and with each type of keys and values that they take, with two threads: for tests with the fixture `k`, as indirect parameter,
# and `kv_dtype`. On the emulated card they take long: `cuda/test_table.py` chooses some
CACHES = [("reference", "float32"), (_OF_BEST[0], "float32")]
CACHES += [(name, dtype) for name in [f"{variant}-2" for variant in _cpu.variants()] for dtype in DTYPES]


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
