"""A second generator of pictures for the vision model, which training does not use. Called by `examination.py`.

Drawn with Pillow: shapes at three times the size, then reduced; words in Pillow's own font; backgrounds from white to black;
pictures of any size, some with JPEG artefacts. Independent of the encoder's squares.
"""

import math
import random
from io import BytesIO

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from tools.demo.vision.drawing import Picture

COLOUR_NAMES = {
    "red": ("red", "crimson", "firebrick"),
    "orange": ("orange", "darkorange"),
    "yellow": ("yellow", "gold"),
    "green": ("green", "limegreen", "forestgreen"),
    "blue": ("blue", "royalblue", "mediumblue"),
    "purple": ("purple", "darkviolet", "darkorchid"),
}
GROUNDS = ("white", "white", "black", "whitesmoke", "lightgrey", "dimgrey", "ivory", "midnightblue", "honeydew", "#202020")
SCALE = 3
WORDS = tuple(
    """
    AIRPORT STATION EXIT OPEN CLOSED SALE MENU HOTEL POLICE TAXI BRIDGES LIBRARY PARKING DANGER STOP ENTRY PUSH PULL
    TICKET BANK CINEMA THEATRE BAKERY PHARMACY HOSPITAL OFFICE ROOM FLOOR EXPRESS NORTH SOUTH EAST WEST MONDAY FRIDAY
    SUNDAY MARCH APRIL AUGUST ENGINE WORKER TOKEN KERNEL SERVER QUEUE BATCH VECTOR MEMORY PIXEL SHAPES COLOUR QUICK BROWN
    JUMPS LAZY FOX VICTORY ZEBRAS BOXING GYM
    """.split()  # noqa: SIM905 (as in words.py)
)
"""None of them is in `words.py`, which training writes."""
_MIN_CONTRAST = 130
_MARGIN = 4


def _rgb(name: str) -> tuple[int, ...]:
    return ImageColor.getrgb(name)[:3]


def _contrast(first: str, second: str) -> float:
    return math.dist(_rgb(first), _rgb(second))


def _finished(canvas: Image.Image, source: random.Random) -> Picture:
    """Two in five are JPEG."""
    if source.random() < 0.4:
        file = BytesIO()
        canvas.save(file, "JPEG", quality=source.randint(55, 95))
        canvas = Image.open(file).convert("RGB")
    return Picture(np.asarray(canvas), ())


def _points(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    if shape == "square":
        side = radius * 0.9
        return [(x - side, y - side), (x + side, y - side), (x + side, y + side), (x - side, y + side)]
    return [(x, y - radius), (x + radius, y + radius * 0.85), (x - radius, y + radius * 0.85)]


def sketch_shapes(shapes: list[tuple[str, str]], source: random.Random) -> Picture:
    """Draw forms and colours without overlap, anywhere in a picture; one picture in five has outlines."""
    width, height = source.randint(140, 640), source.randint(140, 640)
    width, height = max(width, height // 2), max(height, width // 2)
    inks = [source.choice(COLOUR_NAMES[colour]) for _, colour in shapes]
    ground = source.choice([name for name in GROUNDS if all(_contrast(name, ink) > _MIN_CONTRAST for ink in inks)])
    canvas = Image.new("RGB", (width * SCALE, height * SCALE), ground)
    draw = ImageDraw.Draw(canvas)
    outline = None if source.random() < 0.8 else "black" if _contrast(ground, "black") > _MIN_CONTRAST else "white"
    placed: list[tuple[float, float, float]] = []
    room = (width * height / max(len(shapes), 2)) ** 0.5
    for (shape, _), ink in zip(shapes, inks, strict=True):
        while True:
            radius = source.uniform(0.16, 0.3) * room
            x, y = (
                source.uniform(radius + _MARGIN, width - radius - _MARGIN),
                source.uniform(radius + _MARGIN, height - radius - _MARGIN),
            )
            if all(((x - u) ** 2 + (y - v) ** 2) ** 0.5 > (radius + other) * 1.25 for u, v, other in placed):
                break
        placed.append((x, y, radius))
        stroke = round(SCALE * max(2, radius / 10)) if outline else 0
        centre, size = (x * SCALE, y * SCALE), radius * SCALE
        if shape == "circle":
            box = (centre[0] - size, centre[1] - size, centre[0] + size, centre[1] + size)
            draw.ellipse(box, fill=ink, outline=outline, width=stroke)
        else:
            draw.polygon(_points(shape, *centre, size), fill=ink, outline=outline, width=max(stroke, 1))
    return _finished(canvas.resize((width, height), Image.Resampling.LANCZOS), source)


def sketch_word(text: str, source: random.Random) -> Picture:
    """Draw `text` in Pillow's own font, in a picture that it mostly fills."""
    size = source.randint(28, 90)
    font = ImageFont.load_default(size)
    left, top, right, bottom = font.getbbox(text)
    width = round((right - left) * source.uniform(1.1, 1.7)) + 2 * _MARGIN
    height = round((bottom - top) * source.uniform(1.4, 2.6)) + 2 * _MARGIN
    ground = source.choice(GROUNDS)
    inks = ("black", "white", "darkred", "navy", "darkgreen", "gold", "skyblue")
    ink = source.choice([name for name in inks if _contrast(name, ground) > 1.5 * _MIN_CONTRAST])
    canvas = Image.new("RGB", (width, height), ground)
    x = source.uniform(_MARGIN, width - (right - left) - _MARGIN) - left
    y = source.uniform(_MARGIN, height - (bottom - top) - _MARGIN) - top
    ImageDraw.Draw(canvas).text((x, y), text, fill=ink, font=font)
    return _finished(canvas, source)


def a_word(source: random.Random) -> str:
    """Draw a word in capital letters."""
    return source.choice(WORDS)
