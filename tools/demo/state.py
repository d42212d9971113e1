"""Training state in a file, to continue an interrupted training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch


class Stateful(Protocol):
    """A network or an optimizer."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


def restored(file: Path | None, parts: Mapping[str, Stateful]) -> int:
    """Load `parts` from `file`, if it exists. Return the next step."""
    if file is None or not file.exists():
        return 1
    state = torch.load(file)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(state["step"]) + 1


def keep(file: Path, parts: Mapping[str, Stateful], step: int) -> None:
    """Write the `parts` after `step`, replacing the file."""
    new = file.with_suffix(".new")
    torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step}, new)
    new.rename(file)
