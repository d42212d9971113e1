"""Rotary positions of three numbers, time, height and width (Qwen2-VL, Wang et al. 2024): the axis of each rotary pair.

Used where config.json is read and where angles are computed. If the three numbers are equal, every layout is the same as plain
positions: frequencies stay with their pairs.
"""

from __future__ import annotations

TIME, HEIGHT, WIDTH = 0, 1, 2

# order of the axes in `mrope_section`
LAYOUTS = {
    "sections": (TIME, HEIGHT, WIDTH),  # one after another
    "interleaved": (TIME, HEIGHT, WIDTH),  # time, height, width in turn while there are some; time has the rest
    "ernie": (HEIGHT, WIDTH, TIME),  # height and width in turn, then time
}


def pair_axes(layout: str, sections: tuple[int, ...], num_pairs: int | None = None) -> tuple[int, ...]:
    """Return the axis of each rotary pair; empty without a layout. Raises ValueError if the sections do not fit the layout or
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
