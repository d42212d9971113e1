"""Sliding windows in config.json: how many keys each layer's queries see."""

from __future__ import annotations

from collections.abc import Sequence

from engine.checkpoint.json_fields import JsonOptions


def window_size(options: JsonOptions, default: int) -> int:
    """Read `sliding_window`; 0 for null."""
    is_null = "sliding_window" in options.values and options.values["sliding_window"] is None
    return 0 if is_null else options.count("sliding_window", default, least=0)


def switched_window_size(options: JsonOptions, default: int) -> int:
    """Read `sliding_window`; 0 unless `use_sliding_window`."""
    window = window_size(options, default)
    return window if options.flag("use_sliding_window", False) else 0


def all_but_every(interval: int, num_layers: int) -> list[bool]:
    """Return True for each layer but every `interval`-th."""
    return [(index + 1) % interval != 0 for index in range(num_layers)]


def gguf_layer_types(options: JsonOptions, num_layers: int, interval: int) -> list[str]:
    """Return `layer_types` from the options of a GGUF file, where the pattern is a list, an interval, or this default."""
    pattern = options.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == num_layers:
        are_sliding = [bool(is_sliding) for is_sliding in pattern]
    else:
        are_sliding = all_but_every(options.count("attention.sliding_window_pattern", interval), num_layers)
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in are_sliding]


def layer_windows(
    options: JsonOptions, window: int, are_sliding: Sequence[bool], local_kind: str = "sliding_attention"
) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none. `layer_types` says which layers have it, as `local_kind`, else
    `are_sliding`."""
    if options.values.get("layer_types") is not None:
        kinds = options.texts("layer_types")
        if set(kinds) - {local_kind, "full_attention"} or len(kinds) != len(are_sliding):
            raise options.error(
                "layer_types",
                f"{list(kinds)} should be {len(are_sliding)} entries, each 'full_attention' or {local_kind!r}",
            )
        are_sliding = [kind == local_kind for kind in kinds]
    return tuple(window if is_sliding else 0 for is_sliding in are_sliding)
