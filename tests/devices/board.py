"""Board between tests and the devices of `plugin/`, in a file that all of their processes map (`plugin/board.h`)."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

PLUGIN = Path(__file__).parent / "plugin"
_TEXT = (PLUGIN / "board.h").read_text()


def _names(of: str) -> list[str]:
    listed = re.search(rf"#define {of}\(X\)((?:.*\\\n)*.*\n)", _TEXT)
    assert listed is not None, of
    return re.findall(r"X\((\w+)\)", listed[1])


def _number(name: str) -> int:
    found = re.search(rf"\b{name} = (\d+)", _TEXT)
    assert found is not None, name
    return int(found[1])


CONTROLS, COUNTERS = _names("CONTROLS"), _names("COUNTERS")
MOST, NUM_DEVICES = _number("MOST"), _number("NUM_DEVICES")


class Board:
    """Board of the devices that are started with `environment`."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * MOST * (1 + NUM_DEVICES)))
        self.path = path
        self._cells = np.memmap(path, np.int64, "r+", shape=(1 + NUM_DEVICES, MOST))

    def __reduce__(self) -> tuple[type[Board], tuple[Path]]:
        """Pickle the path: other processes map the same file."""
        return Board, (self.path,)

    def set(self, **controls: int) -> None:
        for name, value in controls.items():
            self._cells[0, CONTROLS.index(name)] = value

    def counts(self, device: int = 0) -> dict[str, int]:
        return dict(zip(COUNTERS, self._cells[1 + device].tolist(), strict=False))
