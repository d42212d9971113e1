"""The encoder arena: features of pictures and videos, which ranks encode once and read in every chunk that needs them.

A memfd of each replica, held by the supervisor, so features outlive the worker that encoded them. Only the scheduler assigns
rows. Ranks write the features of a unit into consecutive rows and then the EncoderLine of its first row, which identifies the
contents. Before every read a rank compares that line with the unit that it should read; if they differ (the unit was never
finished, the rows were reassigned, the weights changed, the memory was damaged), the unit is encoded again.

    0                 128               num_rows lines    page
    +-----------------+-----------------+--- ... --------+------------------+------------------+ ...
    | EncoderLine 0   | EncoderLine 1   |               -| row 0 [width]    | row 1            |
    +-----------------+-----------------+--- ... --------+------------------+------------------+ ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shm import _native
from shm.layout import StructView, offset_of, round_up, size_of
from shm.segment import MemoryFile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DTYPES = ("float32", "bfloat16")  # in the order of EncoderLine.dtype
HASH_BYTES = 32
PAGE_BYTES = 4096
_LINE_BYTES = size_of("EncoderLine")
_HASH_OFFSET = offset_of("EncoderLine", "unit_hash")


class EncoderArena:
    """`rows` is [num_rows, width], float32, or uint16 that hold bfloat16."""

    def __init__(self, memory: MemoryFile, num_rows: int, width: int, dtype: str) -> None:
        """Map a memory file of `num_bytes_of` bytes for the same arguments; a new file holds no unit."""
        import numpy as np  # the supervisor only needs sizes and starts without numpy

        self.memory = memory
        self.num_rows = num_rows
        self.width = width
        self.dtype = dtype
        element = np.dtype(np.float32 if dtype == "float32" else np.uint16)
        start = _rows_offset(num_rows)
        flat = np.frombuffer(memory.buffer, element, num_rows * width, start)
        self.rows: NDArray[np.float32] | NDArray[np.uint16] = flat.reshape(num_rows, width)
        self._line = StructView("EncoderLine", memory.buffer)
        self._expected = (width, DTYPES.index(dtype))

    @staticmethod
    def num_bytes_of(num_rows: int, width: int, dtype: str) -> int:
        """Size of the memory file."""
        return _rows_offset(num_rows) + num_rows * width * (4 if dtype == "float32" else 2)

    def begin(self, first_row: int) -> None:
        """Invalidate the rows from `first_row` on, which are about to be written, until `publish`."""
        self._at(first_row).set_word("magic", 0)
        # SYNC: pairs with the load-acquire of magic in is_valid: rows change only after they are invalid for all readers.
        _native.fence()

    def publish(self, first_row: int, unit_hash: bytes, num_rows: int, version: int) -> None:
        """Declare that [first_row, first_row + num_rows) holds the features of `unit_hash`, made by weights of this version."""
        line = self._at(first_row)
        start = line.offset + _HASH_OFFSET
        self.memory.buffer[start : start + HASH_BYTES] = unit_hash
        line.set_word("version", version)
        line.set_word("num_rows", num_rows)
        line.set_word("width", self._expected[0])
        line.set_word("dtype", self._expected[1])
        # SYNC: the store-release pairs with the load-acquire in is_valid.
        line.set_word("magic", _native.ENCODER_MAGIC)

    def is_valid(self, first_row: int, unit_hash: bytes, num_rows: int, version: int) -> bool:
        """Return whether the rows hold exactly this unit."""
        line = self._at(first_row)
        if line.word("magic") != _native.ENCODER_MAGIC:
            return False
        start = line.offset + _HASH_OFFSET
        found = (line.word("num_rows"), line.word("version"), line.word("width"), line.word("dtype"))
        is_same = bytes(self.memory.buffer[start : start + HASH_BYTES]) == unit_hash
        return is_same and found == (num_rows, version, *self._expected) and first_row + num_rows <= self.num_rows

    def close(self) -> None:
        del self.rows
        self.memory.close()

    def _at(self, first_row: int) -> StructView:
        if not 0 <= first_row < self.num_rows:
            raise IndexError(f"row {first_row} is outside the encoder arena of {self.num_rows} rows")
        self._line.offset = first_row * _LINE_BYTES
        return self._line


def _rows_offset(num_rows: int) -> int:
    return round_up(num_rows * _LINE_BYTES, PAGE_BYTES)
