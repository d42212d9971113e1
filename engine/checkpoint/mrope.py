"""Rotary positions of three numbers, time, height and width (Qwen2-VL, Wang et al. 2024): which pair turns with which.

Part of what config.json means; used where it is read and where angles are made. Where the three numbers are equal, every
layout turns as plain positions do: frequencies stay with their pairs.
"""

from __future__ import annotations

TIME, HEIGHT, WIDTH = 0, 1, 2

# The order of the axes in `mrope_section`.
LAYOUTS = {
    "sections": (TIME, HEIGHT, WIDTH),  # one behind another
    "interleaved": (TIME, HEIGHT, WIDTH),  # time, height, width by turns as long as there are some; time has the rest
    "ernie": (HEIGHT, WIDTH, TIME),  # height and width by turns, then time
}


def pair_axes(layout: str, sections: tuple[int, ...], num_pairs: int | None = None) -> tuple[int, ...]:
    """Return the axis of each rotary pair; empty without a layout. ValueError: the sections do not fit the layout, or
    `num_pairs`."""
    if not layout:
        return ()
    if len(sections) != 3 or min(sections) < 0 or (num_pairs is not None and sum(sections) != num_pairs):
        raise ValueError(f"{list(sections)} should be 3 numbers of rotary pairs with the sum {num_pairs}")
    if layout == "sections":
        return tuple(axis for axis, count in zip(LAYOUTS[layout], sections, strict=True) for _ in range(count))
    if layout == "ernie":
        if sections[0] != sections[1]:
            raise ValueError(f"{list(sections)} should have as many pairs for height as for width, because these alternate")
        return (HEIGHT, WIDTH) * sections[0] + (TIME,) * sections[2]
    axes = [TIME] * sum(sections)
    for axis in (HEIGHT, WIDTH):
        places = range(axis, 3 * sections[axis], 3)
        if places and places[-1] >= len(axes):
            raise ValueError(f"{list(sections)} cannot be interleaved: {sections[axis]} pairs of axis {axis} are too many")
        for place in places:
            axes[place] = axis
    return tuple(axes)
