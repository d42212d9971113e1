"""Families of models and parsers from installed packages, by the names that --plugins gives. Nothing is loaded without it.

A package declares entry points of the groups `tokamak.families` and `tokamak.parsers`. Each is an object, or a list of them:
a `Family` (`engine/checkpoint/families`), or a `CallFamily` or `ThinkingFamily` (`engine/parsers`). The start loads them before
it reads the model, and each process of the engine before it runs its actor.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from engine.errors import OptionError, TokamakError

FAMILIES, PARSERS = "tokamak.families", "tokamak.parsers"
_loaded: set[str] = set()  # in this process
_origins: dict[str, str] = {}  # top-level module of a loaded plugin -> its name and package, for errors


def load_plugins(names: Sequence[str]) -> None:
    """Load the entry points with these names, and those of packages with these names. Raises OptionError."""
    installed = [entry for group in (FAMILIES, PARSERS) for entry in entry_points(group=group)] if names else []
    for name in names:
        if name in _loaded:
            continue
        chosen = [
            entry for entry in installed if name in (entry.name, _package(entry)) or _plain(name) == _plain(_package(entry))
        ]
        if not chosen:
            known = ", ".join(sorted({entry.name for entry in installed})) or "none"
            raise OptionError(
                f"--plugins {name}: no installed package has an entry point of this name in {FAMILIES} or {PARSERS}; "
                f"installed: {known}"
            )
        _check_unique(name, chosen)
        for entry in chosen:
            _load(name, entry)
        _loaded.add(name)


def error_of_plugin(error: Exception) -> OptionError | None:
    """Return one line that names the plugin in which `error` arose; None: in none, or it is an error of ours."""
    if isinstance(error, TokamakError):
        return None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        origin = _origins.get(frame.f_globals.get("__name__", "").partition(".")[0])
        if origin:
            place = f"{Path(frame.f_code.co_filename).name}, line {line}"
            return OptionError(f"{origin}: {frame.f_code.co_name} failed: {type(error).__name__}: {error} ({place})")
    return None


@contextlib.contextmanager
def naming_plugins() -> Iterator[None]:
    """Convert errors of plugins that arise in the block to OptionError."""
    try:
        yield
    except Exception as error:
        if named := error_of_plugin(error):
            raise named from error
        raise


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "?"


def _plain(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def _check_unique(name: str, entries: Iterable[EntryPoint]) -> None:
    """Raise OptionError if two packages have the same entry point."""
    seen: dict[tuple[str, str], EntryPoint] = {}
    for entry in entries:
        other = seen.setdefault((entry.group, entry.name), entry)
        if other.value != entry.value or _package(other) != _package(entry):
            packages = f"{_package(other)} and {_package(entry)}"
            raise OptionError(
                f"--plugins {name}: the packages {packages} both have the entry point {entry.name} in {entry.group}; "
                "uninstall one of them"
            )


def _load(name: str, entry: EntryPoint) -> None:
    where = f"--plugins {name}: {entry.value} of the package {_package(entry)}"
    try:
        found: Any = entry.load()
    except (Exception, SystemExit) as error:
        raise OptionError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    _origins[entry.module.partition(".")[0]] = f"--plugins {name} (package {_package(entry)})"
    for each in found if isinstance(found, list | tuple) else [found]:
        try:
            _register(entry.group, each() if isinstance(each, type) else each)
        except (ValueError, TypeError) as error:
            raise OptionError(f"{where}: {error}") from error
        except Exception as error:  # the package's own
            raise OptionError(f"{where} cannot be used: {type(error).__name__}: {error}") from error


def _register(group: str, found: Any) -> None:
    """Add a family or parser. Raises ValueError if it is none, or if its name is taken."""
    if group == FAMILIES:
        from engine.checkpoint.families import register
        from engine.checkpoint.families.family import Family

        if not isinstance(found, Family):
            raise ValueError(f"expected a Family, got {type(found).__name__}")
        register(found)
        return
    from engine.parsers.choice import register_calls
    from engine.parsers.family import CallFamily
    from engine.parsers.thinking import ThinkingFamily, register_reasoning

    if isinstance(found, CallFamily):
        register_calls(found)
    elif isinstance(found, ThinkingFamily):
        register_reasoning(found)
    else:
        raise ValueError(f"expected a CallFamily or a ThinkingFamily, got {type(found).__name__}")
