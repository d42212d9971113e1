"""Command lines of `vllm serve`: their spelling, their values, and the table that `tokamak serve --vllm-flags` prints.

Used by `engine/options/read.py`. `vllm_flags.py` has the handling of each flag, `vllm_router_flags.py` of those of its router.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.errors import OptionError
from engine.options.vllm_flags import VALUES, VLLM_FLAGS, Fate
from engine.options.vllm_router_flags import ROUTER_VALUES

SHORT = {
    "-asc": "--api-processes",
    "-q": "--quantization",
    "-pp": "--pipeline-parallel-size",
    "-O": "--compilation-config",
    "-cc": "--compilation-config",
}
LONG = {  # abbreviations in option names
    "spec-method": "speculative-config.method",
    "spec-model": "speculative-config.model",
    "spec-tokens": "speculative-config.num_speculative_tokens",
}
_LONG = re.compile(r"--(?P<name>[A-Za-z][\w-]*)(?P<path>(?:\.[\w+-]+)*)(?P<value>=.*)?", re.DOTALL)
_LEVEL = re.compile(r"-O\.?[a-z]*=?\d")


def spelled(arguments: Sequence[str]) -> list[str]:
    """Return a command line as our parser reads it: underscores in names become hyphens, `--option.key value` becomes JSON."""
    found: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(arguments)
    for argument in rest:
        match = _LONG.fullmatch(_whole(argument))
        if argument == "--":
            return [*found, argument, *rest]
        if match is None or (match["path"] and match["name"].startswith("no-")):
            level = f"--compilation-config={argument[2:]}"
            found.append(level if _LEVEL.fullmatch(argument) else SHORT.get(argument, argument))
            continue
        name = match["name"].replace("_", "-")
        if not match["path"]:
            found.append(f"--{name}{match['value'] or ''}")
            continue
        value = next(rest, "") if match["value"] is None else match["value"][1:]
        if name not in objects:
            objects[name] = {}
            found.append(f"--{name}=")
        _put(objects[name], match["path"][1:].split("."), value)
    return [_filled(argument, objects) for argument in found]


def _whole(argument: str) -> str:
    """Return `--speculative-config.num_speculative_tokens=3` for `--spec-tokens=3`."""
    name, equals, value = argument.removeprefix("--").partition("=")
    part = LONG.get(name.replace("_", "-")) if argument.startswith("--") else None
    return f"--{part}{equals}{value}" if part else argument


def _filled(argument: str, objects: dict[str, dict[str, Any]]) -> str:
    value = objects.get(argument[2:-1]) if argument.endswith("=") else None
    return argument if value is None else argument + json.dumps(value)


def _put(target: dict[str, Any], path: list[str], value: str) -> None:
    """Set a value by its path: `a.b` is a nested member, `a+` appends elements to a list."""
    *parents, last = path
    for name in parents:
        target = target.setdefault(name, {})
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    if last.endswith("+"):
        more = value.split(",") if parsed is value else [parsed]
        target.setdefault(last[:-1], []).extend(more)
    else:
        target[last] = parsed


def take_flag(key: str, value: Any, source: str, notes: list[str], flags: Mapping[str, Fate] = VLLM_FLAGS) -> str:
    """Return our option for a flag; empty if the flag has no effect, which is noted. Raises OptionError if it is rejected."""
    fate = flags[key]
    if fate.effect == "alias":
        return fate.text
    if fate.effect == "none":
        notes.append(f"{source} has no effect: {fate.text}")
    elif _text(value) not in fate.harmless and value is not False:
        raise OptionError(f"{source} {_text(value)}".rstrip() + f": {fate.text}")
    return ""


def _text(value: Any) -> str:
    """Return a value as text; in a file it may be a number of any length or a list."""
    if value is True:
        return ""
    return str(value) if isinstance(value, (str, float)) or (isinstance(value, int) and abs(value) < 1 << 53) else "..."


def translated(key: str, value: Any, source: str, notes: list[str]) -> Any:
    """Return the value of a flag, or of our option, as ours."""
    ours, note = {**VALUES, **ROUTER_VALUES}.get(key, {}).get(value if isinstance(value, str) else "", (value, ""))
    if note:
        notes.append(f"{source} {value}: {note}")
    return ours


def table(own: Iterable[str], flags: Mapping[str, Fate] = VLLM_FLAGS, program: str = "vllm serve") -> str:
    """Return all flags with their meaning, as Markdown. `own`: our options; those that vLLM has too mean the same."""
    words = {"alias": "is", "none": "no effect", "refused": "refused"}
    rows = [f"| `--{key.replace('_', '-')}` | ours | |" for key in own]
    for key, fate in flags.items():
        text = f"`--{fate.text.replace('_', '-')}`" if fate.effect == "alias" else fate.text
        text += f" (accepted: {', '.join(fate.harmless)})" if fate.harmless else ""
        rows.append(f"| `--{key.replace('_', '-')}` | {words[fate.effect]} | {text} |")
    return "\n".join([f"| flag of `{program}` | | |", "|---|---|---|", *sorted(rows)])
