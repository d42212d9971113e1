"""`--lora-modules`: names of models, each with the directory of its adapter. Used by `table.py`."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from engine.config import LoraModule

_EXPECTED = 'expected NAME=PATH, or {"name": ..., "path": ...}'
_NAME = re.compile(r"[^\s,\x00-\x1f\x7f]{1,256}")


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    """Module in vLLM's JSON notation."""

    name: str
    path: str
    base_model_name: str | None = None


def parse_lora_modules(value: str) -> list[LoraModule]:
    """Parse one or several modules: NAME=PATH with commas, or JSON, an object or a list of them. Raises ValueError."""
    text = value.strip()
    if text.startswith(("{", "[")):
        try:
            found = msgspec.json.decode(text if text.startswith("[") else f"[{text}]", type=list[_Given])
        except msgspec.MsgspecError as error:
            raise ValueError(f"{_EXPECTED}: {error}") from None
        given = [(each.name, each.path) for each in found]
    else:
        parts = [part.strip().partition("=") for part in text.split(",")]
        if not all(name and sign and path for name, sign, path in parts):
            raise ValueError(_EXPECTED)
        given = [(name, path) for name, _, path in parts]
    return [LoraModule(check_name(name), absolute(path)) for name, path in given]


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("expected a name of 1 to 256 characters without spaces or commas")
    return name


def absolute(path: str) -> str:
    if not path or "\0" in path:
        raise ValueError("expected the path of a directory")
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:
        raise ValueError("expected a path; its user does not exist on this machine") from None
