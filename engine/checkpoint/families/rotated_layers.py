"""`no_rope_layers` in config.json: layers that do not rotate queries and keys."""

from __future__ import annotations

from engine.checkpoint.json_fields import JsonOptions


def unrotated_layers(options: JsonOptions, num_layers: int) -> tuple[int, ...]:
    """Return the layers; without a list every `no_rope_layer_interval`-th. The list has a 1 for layers that rotate."""
    are_rotated = options.values.get("no_rope_layers")
    if not are_rotated:
        interval = options.count("no_rope_layer_interval", 4)
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(are_rotated, list) or len(are_rotated) < num_layers or any(each not in (0, 1) for each in are_rotated):
        raise options.error("no_rope_layers", f"{are_rotated!r} should be a list of {num_layers} numbers, each 0 or 1")
    return tuple(index for index in range(num_layers) if not are_rotated[index])
