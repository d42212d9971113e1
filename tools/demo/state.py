"""Progress of a training in a file, so that an interrupted one goes on."""

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
    """Put into `parts` what `file` holds of them, if there is one. The first step that is still to be done."""
    if file is None or not file.exists():
        return 1
    state = torch.load(file)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(state["step"]) + 1


def keep(file: Path, parts: Mapping[str, Stateful], step: int) -> None:
    """Write `parts` as they are after `step`, in place of what was there."""
    new = file.with_suffix(".new")
    torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step}, new)
    new.rename(file)
