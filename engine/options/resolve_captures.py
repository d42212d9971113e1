"""Numbers of rows for which steps are captured (`--plan captured`). Used by `resolve.py`; `workers/engine/captures.py` decides
which one a step uses.

A decode row has at most 1 + num_speculative_tokens positions, so sizes of decode steps are multiples of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.config import SpeculativeConfig
from engine.errors import OptionError
from engine.options.table import OPTIONS, OptionValues

DEFAULT_LARGEST = 512  # rows
_EVERY = 8  # sequences between two sizes, from 8 on
_OF_CAPTURES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size", "graph_only_prefill")


def resolve_captures(options: OptionValues, plan: str) -> dict[str, Any]:
    """Return the settings of captures. Raises OptionError if they contradict each other or the plan. Skipped sizes are
    noted."""
    values = options.values
    if plan != "captured":
        for key in _OF_CAPTURES:
            if values[key]:
                text = OPTIONS[key].kind.show(values[key])
                raise OptionError(
                    f"--{OPTIONS[key].name}{'' if values[key] is True else f' {text}'} needs --plan captured, but the "
                    f"plan is {plan}; add --plan captured, or remove it"
                )
        return {"cudagraph_capture_sizes": (), "max_cudagraph_capture_size": 0, "graph_only_prefill": False}
    speculation: SpeculativeConfig = values["speculative_config"]
    only_prefill: bool = values["graph_only_prefill"]
    unit = 1 if only_prefill else 1 + speculation.max_drafts
    num_sequences, num_tokens = values["max_num_seqs"], values["max_num_batched_tokens"]
    most = max(num_tokens, num_sequences) if only_prefill else min(max(num_tokens, num_sequences), num_sequences * unit)
    asked, largest = tuple(values["cudagraph_capture_sizes"]), values["max_cudagraph_capture_size"]
    if too_large := [size for size in asked if size > most]:
        raise OptionError(
            f"--cudagraph-capture-sizes {_listed(too_large)}: a captured step has at most {most} rows "
            f"(--max-num-seqs {num_sequences} times {unit}, within --max-num-batched-tokens {num_tokens}); remove "
            "these sizes, or raise the limits"
        )
    limit = min(most, largest or (max(asked) if asked else max(DEFAULT_LARGEST, unit)))
    sizes, skipped = fitting_sizes(asked or default_sizes(unit, limit), unit, limit)
    if not sizes:
        raise OptionError(_refusal(asked, largest, unit, most))
    if asked and skipped:
        options.notes.append(f"--cudagraph-capture-sizes {_listed(asked)}: skipped {skipped}")
    return {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[0], "graph_only_prefill": only_prefill}


def default_sizes(unit: int, limit: int) -> list[int]:
    """Return `unit` rows for each of 1, 2, 4, 8, 16, 24, ... sequences, up to `limit` rows."""
    most = limit // unit
    counts = {1, 2, 4, *range(_EVERY, most + 1, _EVERY), most}
    return [unit * count for count in counts if 0 < count <= most]


def fitting_sizes(asked: Iterable[int], unit: int, limit: int) -> tuple[tuple[int, ...], str]:
    """Return multiples of `unit` up to `limit`, each once, the largest first, and a note about the others."""
    sizes: set[int] = set()
    others: dict[str, list[int]] = {}
    for size in asked:
        if size < 1 or size % unit:
            others.setdefault(f"not a multiple of {unit}, the tokens of a sequence with its draft tokens", []).append(size)
        elif size > limit:
            others.setdefault(f"more than {limit}, the largest size to capture", []).append(size)
        elif size in sizes:
            others.setdefault("duplicate", []).append(size)
        sizes |= {size} if size >= 1 and size % unit == 0 and size <= limit else set()
    return tuple(sorted(sizes, reverse=True)), "; ".join(f"{_listed(found)} ({reason})" for reason, found in others.items())


def _refusal(asked: Sequence[int], largest: int | None, unit: int, most: int) -> str:
    need = f"multiples of {unit} (1 + num_speculative_tokens)" if unit > 1 else "sizes"
    fitting = _listed([unit * count for count in (1, 2, 4) if unit * count <= most] or [unit])
    if asked:
        bound = min(most, largest or most)
        return f"--cudagraph-capture-sizes {_listed(asked)}: expected {need} up to {bound}; use sizes such as {fitting}"
    if largest and largest < most:
        return (
            f"--max-cudagraph-capture-size {largest}: one sequence needs {unit} rows (1 + "
            f"num_speculative_tokens); use at least {unit}"
        )
    return (
        f"--plan captured: a step has at most {most} tokens (--max-num-batched-tokens), but one sequence "
        f"needs {unit} (1 + num_speculative_tokens); raise it to at least {unit}"
    )


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
