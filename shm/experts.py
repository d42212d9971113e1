"""Placement of experts that ranks share, and how many rows were sent to each: one segment of the run, which any process may map
read-only, while the engine runs, hangs, or after it died.

    SegmentHeader | u64 metadata bytes | metadata, JSON | words, counts, placements, window

    words       u64 proposed, in force, window since; a line of each rank: ready
    counts      u64 [ranks, layers, experts]
    placements  int32 [2, layers, experts, 1 + ranks], of even and of odd versions
    window      u64 [layers, experts], only with expert balancing: the sums of all ranks' counts at `window since`
                (CLOCK_MONOTONIC, ns; 0: being written, or there is no window)

The metadata has the layers of the model, the numbers of experts and ranks, and the offsets of the parts. Each rank writes its
own line and its own counts: how many of its rows were sent to each expert since the engine started. A placement has for each
expert the number of ranks that hold it, and which.

`in force` is one word: epoch << 44 | number << 12 | version. The placement of `version` applies from step `number` of that
epoch of the rank group on. `workers/rank_group/balance_board.py` changes it. The supervisor creates the segment, with the first
placement as version 0.
"""

from __future__ import annotations

import json

import msgspec

from shm import _native
from shm.layout import LINE, round_up
from shm.segment import HEADER_BYTES, Segment, segment_name

KIND = "experts"
NAME = "main"
PROPOSED, IN_FORCE, WINDOW_SINCE = 0, 8, 16  # among the words
NUMBER_BITS, VERSION_BITS = 32, 12
MAX_VERSION = (1 << VERSION_BITS) - 1  # versions wrap to 0 after it
_MAX_READS = 100  # attempts to read what is being written
_METADATA_AT = HEADER_BYTES + 8


class InForce(msgspec.Struct, frozen=True):
    """Version that applies from step `number` of `epoch` on."""

    word: int

    @staticmethod
    def of(epoch: int, number: int, version: int) -> InForce:
        return InForce(epoch << NUMBER_BITS + VERSION_BITS | number << VERSION_BITS | version)

    @property
    def epoch(self) -> int:
        return self.word >> NUMBER_BITS + VERSION_BITS

    @property
    def number(self) -> int:
        return self.word >> VERSION_BITS & (1 << NUMBER_BITS) - 1

    @property
    def version(self) -> int:
        return self.word & MAX_VERSION


class SharedExperts(msgspec.Struct, frozen=True):
    """Shape of the segment. `layers`: those of the model with experts. `first`: the first placement of each, int32 [experts, 1
    + ranks]."""

    layers: tuple[int, ...]
    num_experts: int
    num_ranks: int
    first: bytes

    @property
    def num_bytes(self) -> int:
        return self.parts()[1]

    def parts(self) -> tuple[bytes, int]:
        """Return the metadata, and the end of the last part."""
        entries = len(self.layers) * self.num_experts
        sizes = {
            "words": LINE * (1 + self.num_ranks),
            "counts": 8 * entries * self.num_ranks,
            "placements": 2 * 4 * entries * (1 + self.num_ranks),
            "window": 8 * entries,
        }
        values_at = _METADATA_AT
        while True:  # offsets depend on the metadata's length, which depends on the offsets
            offset, offsets = values_at, {}
            for name, size in sizes.items():
                offsets[name] = offset
                offset += round_up(size, LINE)
            shape = {"layers": self.layers, "num_experts": self.num_experts, "num_ranks": self.num_ranks}
            metadata = json.dumps({**shape, "offsets": offsets}).encode()
            end = round_up(_METADATA_AT + len(metadata), LINE)
            if end == values_at:
                return metadata, offset
            values_at = end


class ExpertTable:
    """The segment, mapped by one process. `words`, `counts`, `placements` and `window` are its parts."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        num_bytes = _native.load_u64(segment.buffer, HEADER_BYTES)
        metadata = json.loads(bytes(segment.buffer[_METADATA_AT : _METADATA_AT + num_bytes]))
        self.layers: tuple[int, ...] = tuple(metadata["layers"])
        self.num_experts: int = metadata["num_experts"]
        self.num_ranks: int = metadata["num_ranks"]
        offsets, entries = metadata["offsets"], len(self.layers) * self.num_experts
        self.words = segment.buffer[offsets["words"] : offsets["counts"]]
        self.counts = segment.buffer[offsets["counts"] :][: 8 * entries * self.num_ranks]
        self.placements = segment.buffer[offsets["placements"] :][: 2 * 4 * entries * (1 + self.num_ranks)]
        self.window = segment.buffer[offsets["window"] :][: 8 * entries]

    @classmethod
    def create(cls, run_id: str, experts: SharedExperts) -> ExpertTable:
        """Create the table with empty counts and the first placement in force. Called by the supervisor."""
        metadata, num_bytes = experts.parts()

        def initialise(buffer: memoryview) -> None:
            _native.store_u64(buffer, HEADER_BYTES, len(metadata))
            buffer[_METADATA_AT : _METADATA_AT + len(metadata)] = metadata
            first = experts.first * len(experts.layers)
            begin = json.loads(metadata)["offsets"]["placements"]
            buffer[begin : begin + len(first)] = first

        return cls(Segment.create(segment_name(run_id, KIND, NAME), num_bytes, initialise))

    @classmethod
    def attach(cls, run_id: str, *, is_readonly: bool = False) -> ExpertTable:
        """Attach to a run. SharedMemoryError also if its ranks share no experts."""
        return cls(Segment.attach(segment_name(run_id, KIND, NAME), is_readonly=is_readonly, timeout_s=1.0))

    @property
    def in_force(self) -> InForce:
        # SYNC: pairs with BalanceBoard.replace, which follows the stores of the placement that it names.
        return InForce(_native.load_u64(self.words, IN_FORCE))

    def committed(self) -> tuple[int, bytes]:
        """Return the version and placement in force. The memory of a version is reused only when the next version is in
        force."""
        half = len(self.placements) // 2
        while True:
            version = self.in_force.version
            placement = bytes(self.placements[version % 2 * half :][:half])
            if self.in_force.version == version:
                return version, placement

    def show_window(self, since_ns: int, counts: bytes) -> None:
        """Begin the window at this time with these counts of all ranks. Called by the rank that leads the rank group."""
        # SYNC: a seqlock with recent_since; a leader that dies in between leaves 0, and the next one writes it again.
        _native.store_u64(self.words, WINDOW_SINCE, 0)
        self.window[:] = counts
        _native.store_u64(self.words, WINDOW_SINCE, since_ns)

    def recent_since(self) -> tuple[int, bytes] | None:
        """Return the beginning of the window and the counts before it; None without a window."""
        for _ in range(_MAX_READS):
            since_ns = _native.load_u64(self.words, WINDOW_SINCE)
            counts = bytes(self.window)
            if since_ns and _native.load_u64(self.words, WINDOW_SINCE) == since_ns:
                return since_ns, counts
        return None

    def close(self) -> None:
        self.words = self.counts = self.placements = self.window = memoryview(b"")
        self.segment.close()
