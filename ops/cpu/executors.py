"""Executors of the native table: run an op at once, or record it for a tape.

`EagerPlan` uses `Immediate`, plans with a tape use `Recording`. Both pass the same arguments to the same native functions, so
their results are the same bit for bit.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from ops import _cpu
from ops.cpu.array import ALIGNMENT, Array, Rows, address_of, empty
from ops.cpu.rank_group import RankGroup
from ops.cpu.work import Work, bytes_of

_INT = np.dtype(np.int32)

OpMaker = Callable[..., _cpu.Op]
Estimate = Callable[[], Work]  # returns the work in the current step


class Executor(Protocol):
    """Destination of the table's ops."""

    def rows(self, counts: np.ndarray, index: int, limit: int) -> Rows:
        """Return the number of rows in counts[index], at most `limit`."""

    rank_group: RankGroup | None  # the ranks that share matrices

    def allocate(self, rows: Rows, width: int) -> Array:
        """Allocate an op's result, float32."""

    def allocate_kept(self, rows: Rows, width: int) -> Array:
        """Allocate int32 memory with contents that stay until the next replay."""

    def view(self, x: Array, rows: Rows, width: int) -> Array:
        """Return a view of x's memory with other rows."""

    def allocate_gathered(self, rows: Rows, width: int) -> Array:
        """Allocate the same in the rank group's buffers for a following gather; their former contents are no longer read."""

    def emit(self, make: OpMaker, *arguments: Any, rows: Rows, name: str = "", work: Estimate | None = None) -> None:
        """Run or record the op `make(*arguments, address of the number of rows or 0, number of rows)`; tensors are passed by
        address. For profiles: `name` identifies ops of one kind; `work` is needed unless the op reads or writes its Arrays
        once."""


def _make(make: OpMaker, arguments: Sequence[Any], rows: Rows) -> _cpu.Op:
    values = [value if isinstance(value, (int, float, list)) else address_of(value) for value in arguments]
    return make(*values, rows.address, rows.limit)


class Immediate:
    """Executor that runs each op at once."""

    def __init__(self, rank_group: RankGroup | None = None) -> None:
        self.rank_group = rank_group

    def rows(self, counts: np.ndarray, index: int, limit: int) -> Rows:
        return Rows(int(counts[index]))

    def allocate(self, rows: Rows, width: int) -> Array:
        memory = empty(rows.count * width)
        return Array(rows, width, int(memory.ctypes.data), memory)

    def allocate_gathered(self, rows: Rows, width: int) -> Array:
        assert self.rank_group is not None, "a single rank has nothing to gather"
        if rows.count:
            self.rank_group.comm.barrier()
        memory = self.rank_group.half(0, rows.count * width * 4)
        return Array(rows, width, int(memory.ctypes.data), memory)

    def allocate_kept(self, rows: Rows, width: int) -> Array:
        return msgspec.structs.replace(self.allocate(rows, width), dtype=_INT)

    def view(self, x: Array, rows: Rows, width: int) -> Array:
        return Array(rows, width, x.address, x.owner)

    def emit(self, make: OpMaker, *arguments: Any, rows: Rows, name: str = "", work: Estimate | None = None) -> None:
        _cpu.run(_make(make, arguments, rows))


class _Recorded(msgspec.Struct, frozen=True):
    make: OpMaker
    arguments: tuple[Any, ...]
    rows: Rows
    name: str
    estimate: Estimate | None

    def arrays(self) -> list[Array]:
        return [value for value in self.arguments if isinstance(value, Array)]

    def memories(self) -> list[Array]:
        """Return the arrays that own the memory of its arrays."""
        return [array.seen or array for array in self.arrays()]

    def work(self) -> Work:
        return self.estimate() if self.estimate else Work(bytes_of(*self.arrays()))


class Recording:
    """Executor that records ops, and results to be placed in memory. With a rank group the tape begins with a barrier, after
    which results gathered in the previous replay are no longer read. `constants`: numbers of rows that are not read on replay,
    by their index among the counts."""

    def __init__(self, rank_group: RankGroup | None = None, constants: Mapping[int, int] | None = None) -> None:
        self.rank_group = rank_group
        self._constants = constants or {}
        self._ops: list[_Recorded] = []
        self._results: list[Array] = []
        self._gathered: list[tuple[int, Array]] = []  # the op that makes it
        self._kept: list[Array] = []
        self._views: list[Array] = []

    def rows(self, counts: np.ndarray, index: int, limit: int) -> Rows:
        if index in self._constants:
            return Rows(self._constants[index])
        return Rows(limit, counts[index : index + 1])

    def allocate(self, rows: Rows, width: int) -> Array:
        array = Array(rows, width)
        self._results.append(array)
        return array

    def allocate_gathered(self, rows: Rows, width: int) -> Array:
        assert self.rank_group is not None, "a single rank has nothing to gather"
        if not self._gathered:
            self._ops.insert(0, _Recorded(_cpu.collective, barrier_arguments(self.rank_group), rows, "", lambda: Work(0)))
        memory = self.rank_group.half(len(self._gathered), rows.limit * width * 4)
        array = Array(rows, width, int(memory.ctypes.data), memory)
        self._gathered.append((len(self._ops), array))
        return array

    def allocate_kept(self, rows: Rows, width: int) -> Array:
        array = self.allocate(rows, width)
        array.dtype = _INT
        self._kept.append(array)
        return array

    def view(self, x: Array, rows: Rows, width: int) -> Array:
        array = Array(rows, width, seen=x.seen or x)
        self._views.append(array)
        return array

    @property
    def num_ops(self) -> int:
        return len(self._ops)

    def emit(self, make: OpMaker, *arguments: Any, rows: Rows, name: str = "", work: Estimate | None = None) -> None:
        self._ops.append(_Recorded(make, arguments, rows, name, work))

    def finish(self, *outputs: Array, within: Tape | None = None, apart: Iterable[Array] = ()) -> Tape:
        """Place every result and create the tape. `outputs` keep their memory until the next replay. Results share the memory
        of the tape `within`, if it is large enough, except those in `apart`, which get separate memory."""
        lives = {id(array): [len(self._ops), -1] for array in self._results}
        for index, op in enumerate(self._ops):
            for array in op.memories():
                if id(array) in lives:
                    life = lives[id(array)]
                    life[0], life[1] = min(life[0], index), max(life[1], index)
        for array in (*outputs, *self._kept):
            if id(array) in lives:
                lives[id(array)][1] = len(self._ops)
        self._check_gathered()
        self._write_where_gathered(lives)
        own = {id(array) for array in apart}
        results = [array for array in self._results if not array.address]
        arena, num_bytes = _placed([array for array in results if id(array) not in own], lives, within)
        _placed([array for array in results if id(array) in own], lives, None)
        for view in self._views:
            assert view.seen is not None
            view.address, view.owner = view.seen.address, view.seen.owner
        ops = [_make(op.make, op.arguments, op.rows) for op in self._ops]
        return Tape(_cpu.Tape(ops, self._pairs(lives)), num_bytes, self._ops, arena)

    def _pairs(self, lives: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the indices of linears with results that only the next op, a gated activation, reads."""
        return [
            index
            for index, (op, following) in enumerate(itertools.pairwise(self._ops))
            if op.make is _cpu.linear
            and following.make is _cpu.activate_and_multiply
            and following.arguments[1] is op.arguments[0]
            and lives.get(id(op.arguments[0])) == [index, index + 1]
        ]

    def _write_where_gathered(self, lives: Mapping[int, Sequence[int]]) -> None:
        """Redirect ops that write columns for the next gather directly into its buffer, so that nothing is copied. That half of
        the buffers is free by then, because all ranks finished the previous gather before the first of these ops. Ops write
        whole panels."""
        before = -1
        for index, _ in self._gathered:
            op = self._ops[index]
            if op.make is _cpu.gather:
                y, x = op.arguments[:2]
                first, last = lives.get(id(x), (-1, -1))
                has_panels = all(edge % _cpu.PANEL == 0 or edge == x.width for columns in x.columns for edge in columns)
                if has_panels and x.width == y.width and before < first and last == index:
                    x.address, x.owner = y.address, y.owner
                    self._ops[index] = msgspec.structs.replace(op, arguments=(*op.arguments[:-1], 0))  # columns to copy
            before = index

    def _check_gathered(self) -> None:
        """Check that each gathered result is read before the next one's barrier, so that two halves are enough."""
        for (_, array), (end, _) in zip(self._gathered, self._gathered[1:], strict=False):
            late = [op.make.__name__ for op in self._ops[end + 1 :] if any(value is array for value in op.arguments)]
            assert not late, f"{late[0]} reads a gathered array after the next gather"


def _placed(results: Sequence[Array], lives: Mapping[int, Sequence[int]], within: Tape | None) -> tuple[np.ndarray, int]:
    """Place each result, in the memory of `within` if that is enough. Return the memory and its used bytes."""
    sizes = [-(-array.rows.limit * array.width * 4 // ALIGNMENT) * ALIGNMENT for array in results]
    offsets, num_bytes = place(
        [(lives[id(array)][0], lives[id(array)][1], size) for array, size in zip(results, sizes, strict=True)]
    )
    arena = empty(num_bytes // 4) if within is None or within.num_bytes < num_bytes else within.arena
    for array, offset, size in zip(results, offsets, sizes, strict=True):
        array.owner = arena[offset // 4 : (offset + size) // 4]
        array.address = int(arena.ctypes.data) + offset
    return arena, num_bytes


def barrier_arguments(rank_group: RankGroup) -> tuple[Any, ...]:
    return (None, None, rank_group.comm.address, _cpu.COMM_KINDS.index("barrier"), 0, 0, None, None)


def place(lives: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Return the offsets of buffers (first use, last use, bytes), in the order of first use, and the total bytes. Each gets the
    lowest offset without overlap with another that is in use at the same time."""
    placed: list[tuple[int, int, int, int]] = []  # first, last, begin, end
    for first, last, size in lives:
        begin = 0
        for _, _, other_begin, other_end in sorted(
            (other for other in placed if other[0] <= last and first <= other[1]), key=lambda other: other[2]
        ):
            if begin + size <= other_begin:
                break
            begin = max(begin, other_end)
        placed.append((first, last, begin, begin + size))
    return [begin for _, _, begin, _ in placed], max((end for *_, end in placed), default=0)


class OpProfile(msgspec.Struct, frozen=True):
    kind: str
    name: str
    work: Work

    @property
    def title(self) -> str:
        return _title(self.kind, self.name)


def _title(kind: str, name: str) -> str:
    """ "linear q+k+v" of model.layers.3.self_attn.q_proj+model.layers.3.self_attn.k_proj+..., the same in every layer."""
    parts = [re.sub(r"_proj$", "", part.rsplit(".", 1)[-1]) for part in name.split("+") if part]
    return " ".join(part for part in (kind, "+".join(parts)) if part)


class Tape(msgspec.Struct, frozen=True):
    """A recorded list of ops over an arena. Addresses are fixed; contents and numbers of rows are read at each replay."""

    native: _cpu.Tape
    num_bytes: int  # size of the arena
    _ops: list[_Recorded]  # keep all memory of the tape alive
    arena: np.ndarray

    def replay(self) -> None:
        self.native.replay()

    def replay_range(self, begin: int, end: int) -> None:
        """Replay the ops [begin, end). Intermediate results stay valid in a later call, if nothing else was replayed."""
        self.native.replay_range(begin, end)

    def replay_timed(self) -> list[int]:
        """Replay, and return the nanoseconds of each op, including about 50 for the clock."""
        self.native.replay_timed()
        return self.native.times_ns

    def replay_alone(self, num_threads: int) -> list[list[list[int]]]:
        """Run the tape on this thread, its work divided as for `num_threads`. Return the nanoseconds of each op's tasks,
        [jobs][tasks]."""
        return self.native.replay_alone(num_threads)

    def titles(self) -> list[str]:
        """Return the name of each op, the same in every layer."""
        return [_title(op.make.__name__, op.name) for op in self._ops]

    def profile(self) -> list[OpProfile]:
        """Return each op's work in the step that the inputs hold now."""
        return [OpProfile(op.make.__name__, op.name, op.work()) for op in self._ops]
