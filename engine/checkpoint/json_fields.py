"""A JSON object of a checkpoint with typed access, so that a wrong value is reported, never misread.

Called by `model_config.py`, `quantization_config.py` and `gguf/convert.py`, in every process that reads a checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.files import read_file
from engine.errors import CheckpointError


class _Tracked(dict[str, Any]):
    """JSON object that records which keys were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


class JsonOptions:
    """One JSON object with typed access; null counts as absent. Errors name the file, the option and the value."""

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.values = _Tracked(values)
        self.path = path
        self._prefix = prefix
        self._inner: dict[str, JsonOptions] = {}  # objects that were read, by name

    def error(self, name: str, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self._prefix}{name}: {text}")

    def check_supported(self, supported: Mapping[str, Any]) -> None:
        """Raise CheckpointError for the first of these options that has another value than the supported one."""
        for name, value in supported.items():
            if self.values.get(name) not in (None, value):
                raise self.error(name, f"{self.values[name]!r} is not supported; supported: {value!r}")

    def unread(self) -> dict[str, Any]:
        """Return the keys that were not read, with their values; those of objects that were read as `object.key`."""
        own = {key: value for key, value in self.values.items() if key not in self.values.asked}
        inner = {f"{name}.{key}": value for name, options in self._inner.items() for key, value in options.unread().items()}
        return own | inner

    def within(self, name: str) -> JsonOptions:
        """Return the object under `name`, an empty one if it is missing."""
        if name not in self._inner:
            self._inner[name] = JsonOptions(self.mapping(name), self.path, f"{self._prefix}{name}.")
        return self._inner[name]

    def with_defaults(self, values: Mapping[str, Any]) -> JsonOptions:
        """Return the object with these values for missing keys; as `replaced`."""
        found = self.replaced({name: value for name, value in values.items() if dict.get(self.values, name) is None})
        found._inner = self._inner
        return found

    def replaced(self, values: Mapping[str, Any]) -> JsonOptions:
        """Return the object with other `values` for some keys; what is read of it counts as read here."""
        found = JsonOptions(dict(self.values.items()) | dict(values), self.path, self._prefix)
        found.values.asked = self.values.asked
        return found

    def count(self, name: str, default: int | None = None, *, least: int = 1, most: int = 1 << 40) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or (value < least and value != default):
            raise self.error(name, f"{value!r} should be an integer of at least {least}")
        if value > most:
            raise self.error(name, f"{value} should be an integer of at most {most}")
        return value

    def number(
        self,
        name: str,
        default: float | None,
        *,
        least: float | None = None,
        above: float | None = None,
        most: float | None = None,
    ) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise self.error(name, f"{value!r} should be a finite number")
        if least is not None and value < least:
            raise self.error(name, f"{value!r} should be at least {least:g}")
        if above is not None and value <= above:
            raise self.error(name, f"{value!r} should be above {above:g}")
        if most is not None and value > most:
            raise self.error(name, f"{value!r} should be at most {most:g}")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self._get(name, [])
        if not isinstance(value, list) or not all(type(each) in (int, float) and _is_finite(each) for each in value):
            raise self.error(name, f"{value!r} should be a list of finite numbers")
        return tuple(map(float, value))

    def counts(self, name: str, default: tuple[int, ...], *, or_one: int = 0) -> tuple[int, ...]:
        """Read a list of integers of at least -1; with `or_one`, a single integer is repeated that many times."""
        value = self._get(name, default)
        values = [value] * or_one if or_one and type(value) is int else value
        if not isinstance(values, list | tuple) or not all(type(each) is int and -1 <= each < 1 << 40 for each in values):
            raise self.error(name, f"{value!r} should be a list of integers")
        return tuple(values)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"{value!r} should be true or false")
        return value

    def text(self, name: str, default: str | None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"{value!r} should be a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(name, f"{value!r} should be a list of strings")
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"{value!r} should be an object")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self._get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and -1 <= token_id < 1 << 31 for token_id in ids):
            raise self.error(name, f"{value!r} should be a token id, a list of token ids, or -1 for none")
        return tuple(ids)

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value


def _is_finite(number: float) -> bool:
    return abs(number) <= sys.float_info.max


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in the file `path`. Raises CheckpointError."""
    try:
        value = json.loads(read_file(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; expected a checkpoint directory with a config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should contain a JSON object, not {type(value).__name__}")
    return value
