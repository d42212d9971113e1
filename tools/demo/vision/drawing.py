"""Draws pictures for the vision model: strings, coloured shapes, frames of one colour. Used by `questions.py`.

Everything depends only on the given random numbers. The letters are those of `glyphs.py`, or of font files given to training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFont

from tools.demo.vision.glyphs import CHARACTERS, COLUMNS, GLYPHS, ROWS

Pixels = NDArray[np.uint8]
"""uint8 [height, width, 3]: red, green, blue."""

COLOURS = {
    "red": (215, 30, 35),
    "orange": (250, 135, 10),
    "yellow": (245, 225, 30),
    "green": (25, 150, 55),
    "blue": (30, 70, 215),
    "purple": (140, 40, 165),
}
SHADES = {
    "red": ((255, 0, 0), (180, 15, 25), (225, 60, 50)),
    "orange": ((255, 165, 0), (255, 140, 0), (240, 120, 30)),
    "yellow": ((255, 255, 0), (255, 215, 0), (240, 230, 90)),
    "green": ((0, 128, 0), (0, 200, 60), (60, 180, 75), (50, 205, 50)),
    "blue": ((0, 0, 255), (30, 110, 230), (20, 40, 150), (70, 120, 240)),
    "purple": ((128, 0, 128), (150, 50, 200), (110, 40, 140), (155, 30, 220)),
}
"""Other colours with the names of `COLOURS`."""
SHAPES = ("circle", "square", "triangle")
PITCH = COLUMNS + 1
"""Minimum distance of letters, in dots."""
MIN_DOT, MAX_DOT = 3, 6
"""Pixels of a dot, without zoom."""
MIN_PITCH = 30
"""Distance of letters in pixels, without zoom: each has its own square of patches."""

_MARGIN = 3
_CAPITAL_HEIGHT = 0.76
"""Maximum share of a font's size."""
_CELL_BORDER = 0.04
_MIN_CONTRAST = 100
"""Minimum distance of the colours of a shape and its background."""
"""Margin of a cell on each side, as a share, without centres of shapes, so that their order is clear."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Object in a picture: its centre, height and width as shares of the picture, its kind, and its number in reading order."""

    row: float
    column: float
    height: float
    width: float
    thing: int
    number: int


@dataclass(frozen=True, slots=True)
class Picture:
    """Pixels, and the objects in them."""

    pixels: Pixels
    marks: tuple[Mark, ...]


NUM_THINGS = 1 + len(CHARACTERS) + len(SHAPES) * len(COLOURS)
"""Kinds of a mark: nothing, a character, a shape in a colour."""


def _shape_thing(shape: str, colour: str) -> int:
    return 1 + len(CHARACTERS) + SHAPES.index(shape) * len(COLOURS) + list(COLOURS).index(colour)


def _near(colour: tuple[int, ...], source: np.random.Generator, spread: int = 12) -> NDArray[np.float32]:
    return np.asarray(np.array(colour) + source.integers(-spread, spread + 1, 3), dtype=np.float32)


def _shade(colour: str, source: np.random.Generator) -> NDArray[np.float32]:
    """Draw a colour with that name."""
    shades = (COLOURS[colour], COLOURS[colour], *SHADES[colour])
    return _near(shades[int(source.integers(len(shades)))], source, 14).clip(0, 255)


def _ground(source: np.random.Generator) -> NDArray[np.float32]:
    """Draw a background colour: white, black, grey, or a light or dark tint."""
    kind = source.random()
    if kind < 0.3:
        return _near((int(source.integers(225, 256)),) * 3, source, 6)
    if kind < 0.5:
        return _near((int(source.integers(0, 30)),) * 3, source, 6)
    if kind < 0.7:
        return _near((int(source.integers(20, 236)),) * 3, source, 8)
    tint = source.integers(0, 90, 3)
    return np.asarray(255 - tint if kind < 0.88 else tint, dtype=np.float32)


def _grounded(
    height: int, width: int, source: np.random.Generator, colours: Sequence[NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Draw a background with contrast to all `colours`, slightly brighter towards one side."""
    while True:
        shade = _ground(source).clip(0, 255)
        if all(np.linalg.norm(shade - colour) > _MIN_CONTRAST for colour in colours):
            break
    slope = source.uniform(-12, 12, 2)
    rows, columns = np.linspace(-1, 1, height)[:, None], np.linspace(-1, 1, width)[None]
    return np.asarray(shade + (slope[0] * rows + slope[1] * columns)[:, :, None], dtype=np.float32)


def _finished(canvas: NDArray[np.float32], source: np.random.Generator) -> Pixels:
    """Return integers with noise; one in four with JPEG artefacts."""
    noise = source.integers(-128, 128, canvas.shape, dtype=np.int8) * np.float32(source.uniform(0, 0.08))
    pixels = np.asarray((canvas + noise).clip(0, 255), dtype=np.uint8)
    if source.random() < 0.25:
        file = BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=int(source.integers(35, 95)))
        pixels = np.asarray(Image.open(file).convert("RGB"))
    return pixels


def _inks(source: np.random.Generator) -> NDArray[np.float32]:
    """Draw a colour for text."""
    kind = source.random()
    if kind < 0.4:
        return np.asarray(source.integers(0, 75, 3), dtype=np.float32)
    if kind < 0.6:
        return np.asarray(source.integers(190, 256, 3), dtype=np.float32)
    return np.asarray(source.integers(0, 256, 3), dtype=np.float32)


@cache
def _font(file: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(file), size)


def draw_letters(text: str, height: int, width: int, font_file: Path, source: np.random.Generator) -> Picture:
    """Draw `text` in one line anywhere in the picture, with a font as large as fits or smaller."""
    ink = _inks(source)
    canvas = _grounded(height, width, source, [ink])
    spacing = float(source.choice((0, 0, 0.05, 0.12, 0.3)))
    probe = _font(font_file, 100)
    needed = sum(probe.getlength(letter) / 100 + spacing for letter in text)
    most = min((width - 2 * _MARGIN) / needed, (height - 2 * _MARGIN) / _CAPITAL_HEIGHT)
    size = max(8, int(most * source.uniform(0.55, 1)))
    font = _font(font_file, size)
    left = source.uniform(_MARGIN, max(_MARGIN + 0.01, width - _MARGIN - needed * size))
    top = source.uniform(_MARGIN, max(_MARGIN + 0.01, height - _MARGIN - size * _CAPITAL_HEIGHT))
    marks: list[Mark] = []
    for letter in text:
        mask, (right, down) = font.getmask2(letter, mode="L", anchor="lt")
        columns, rows = mask.size
        if letter != " " and columns and rows:
            alpha = np.array(mask, dtype=np.float32).reshape(rows, columns) / 255
            column, row = max(int(left + right), 0), max(int(top + down), 0)
            alpha = alpha[: max(height - row, 0), : max(width - column, 0)]
            under = canvas[row : row + alpha.shape[0], column : column + alpha.shape[1]]
            under += alpha[:, :, None] * (ink - under)
            centre = (row + rows / 2) / height, (column + columns / 2) / width
            marks.append(Mark(*centre, rows / height, columns / width, 1 + CHARACTERS.index(letter), len(marks) + 1))
        left += font.getlength(letter) + spacing * size
    return Picture(_finished(canvas, source), tuple(marks))


def draw_string(text: str, height: int, width: int, zoom: int, source: np.random.Generator) -> Picture:
    """Draw `text` in one line anywhere in the picture, in letters of dots, enlarged by `zoom`."""
    ink = _inks(source)
    canvas = _grounded(height, width, source, [ink])
    room = width - 2 * _MARGIN
    most = min(room // (PITCH * len(text)), (height - 2 * _MARGIN) // ROWS, MAX_DOT * zoom)
    dot = int(source.integers(MIN_DOT * zoom, most + 1))
    least = max(PITCH * dot, MIN_PITCH * zoom)
    gap = int(source.integers(least, min(room // len(text), least + 8 * zoom) + 1))
    left = int(source.integers(_MARGIN, width - _MARGIN - gap * (len(text) - 1) - COLUMNS * dot + 1))
    top = int(source.integers(_MARGIN, height - _MARGIN - ROWS * dot + 1))
    marks: list[Mark] = []
    for number, character in enumerate(text):
        if character == " ":
            continue
        sway = int(source.integers(-dot, dot + 1)) if source.random() < 0.3 else 0
        row, column = min(max(top + sway, 0), height - ROWS * dot), left + number * gap
        dots = np.kron(GLYPHS[character], np.ones((dot, dot), dtype=np.bool_))
        canvas[row : row + ROWS * dot, column : column + COLUMNS * dot][dots] = ink
        centre = (row + ROWS * dot / 2) / height, (column + COLUMNS * dot / 2) / width
        sides = ROWS * dot / height, COLUMNS * dot / width
        marks.append(Mark(*centre, *sides, 1 + CHARACTERS.index(character), len(marks) + 1))
    return Picture(_finished(canvas, source), tuple(marks))


def draw_shapes(
    shapes: list[tuple[str, str]],
    height: int,
    width: int,
    grid: tuple[int, int],
    sides: tuple[int, int],
    source: np.random.Generator,
) -> Picture:
    """Draw shapes and their colours in reading order, `sides` pixels wide, without overlap; the centre of each is in its own
    cell of a `grid` of rows and columns, which defines the order. ValueError if there is no room."""
    places: list[tuple[float, float, int]] = []
    cells: set[tuple[int, int]] = set()
    for _ in shapes:
        for _ in range(100):
            side = int(source.integers(*sides))
            row, column = source.uniform(side / 2, height - side / 2), source.uniform(side / 2, width - side / 2)
            down, right = row / height * grid[0], column / width * grid[1]
            is_within = all(_CELL_BORDER < place % 1 < 1 - _CELL_BORDER for place in (down, right))
            is_apart = all(max(abs(row - y), abs(column - x)) > (side + other) / 2 + sides[0] / 6 for y, x, other in places)
            if is_within and is_apart and (int(down), int(right)) not in cells:
                break
        else:
            raise ValueError(f"no room for {len(shapes)} shapes of {sides} in {width} x {height}")
        places.append((row, column, side))
        cells.add((int(down), int(right)))
    places.sort(key=lambda place: (int(place[0] / height * grid[0]), place[1]))
    inks = [_shade(colour, source) for _, colour in shapes]
    canvas = _grounded(height, width, source, inks)
    is_outlined, is_hollow = source.random() < 0.25, source.random() < 0.12
    outline = _near((0, 0, 0) if source.random() < 0.6 else (255, 255, 255), source, 20)
    marks: list[Mark] = []
    for number, ((shape, colour), ink, (row, column, side)) in enumerate(zip(shapes, inks, places, strict=True), 1):
        outside = _outside(shape, row, column, side, _turn(shape, source), height, width)
        stroke = max(3.0, side * source.uniform(0.1, 0.2))
        alpha = (0.5 - outside).clip(0, 1)
        if is_hollow:
            alpha = np.minimum(alpha, (0.5 + outside + stroke).clip(0, 1))
        canvas += alpha[:, :, None] * (ink - canvas)
        if is_outlined and not is_hollow:
            border = np.minimum(alpha, (0.5 + outside + stroke / 3).clip(0, 1))
            canvas += border[:, :, None] * (outline - canvas)
        marks.append(Mark(row / height, column / width, side / height, side / width, _shape_thing(shape, colour), number))
    return Picture(_finished(canvas, source), tuple(marks))


def _turn(shape: str, source: np.random.Generator) -> float:
    """Draw an angle by which a shape can be turned without changing its name."""
    if shape == "triangle" and source.random() < 0.2:
        return float(source.uniform(0, 2 * np.pi))
    return float(source.normal(0, 0.12))


def _outside(shape: str, row: float, column: float, side: int, angle: float, height: int, width: int) -> NDArray[np.float32]:
    """Return the distance of every pixel to the shape, in pixels; negative inside."""
    y = np.arange(height, dtype=np.float32)[:, None] + 0.5 - row
    x = np.arange(width, dtype=np.float32)[None] + 0.5 - column
    down = y * np.cos(angle, dtype=np.float32) - x * np.sin(angle, dtype=np.float32)
    right = y * np.sin(angle, dtype=np.float32) + x * np.cos(angle, dtype=np.float32)
    half = side / 2
    if shape == "circle":
        outside = np.sqrt(down**2 + right**2) - half
    elif shape == "square":
        outside = np.maximum(abs(down), abs(right)) - 0.86 * half
    else:
        outside = np.maximum(down - 0.9 * half, (abs(right) - (down + half) / 2) * 0.894)
    return np.asarray(outside, dtype=np.float32)


def draw_frame(colour: str, height: int, width: int, source: np.random.Generator) -> Picture:
    """Return a frame of one colour."""
    canvas = np.broadcast_to(_near(COLOURS[colour], source), (height, width, 3))
    return Picture(_finished(canvas, source), ())
