"""Questions of the vision model: pictures drawn from a seed, questions about them, and their answers.

Used by `batches.py` for training and by `evaluate.py` for the examination. Strings, and colours of clips, are held out by hash:
no training sample shows them. In counts and pairs only the pictures are new.

A **scene** is what the questions of a batch share: the kind, the sides of the pictures, and wordings of the same length.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.demo.vision.drawing import COLOURS, MIN_PITCH, SHAPES, Picture, draw_frame, draw_letters, draw_shapes, draw_string
from tools.demo.vision.sizes import square_grid
from tools.demo.words import ENGLISH_WORDS

KINDS = ("string", "count", "pair", "clip")
LABELS = "abcde"
"""Labels of a picture's shapes in reading order: row after row of the encoder's squares."""
MAX_COUNT = len(LABELS)
MAX_COUNT_OF_TWO = 4
"""Maximum in each of two pictures."""
MIN_SIDE = 20
"""Pixels of a shape, without zoom."""
SHARE_ASKED_TWICE = 0.15
"""Share of the pictures in which shapes are counted."""
_HELD_OUT_SHARE = 16

READING = (
    *(
        "What does it say?",
        "Read the text.",
        "What is written here?",
        "Which characters do you see?",
        "what does it say",
        "Read this.",
    ),
    *("What does the picture say?", "What is the text?", "Read the word."),
)
COUNTING = (
    *(
        "How many {what} are there?",
        "Count the {what}.",
        "How many {what} do you see?",
        "How many {what}?",
        "how many {what} are there",
    ),
    *("how many {what} can you see?", "How many {what} does the picture show?"),
)
COMPARING_COUNTS = ("Which picture shows more shapes?", "Where are more shapes?")
COMPARING_SHAPES = ("Compare the two pictures.", "Is it the same shape in both pictures?")
WATCHING = ("Which colours come in which order?", "Name the colours in their order.", "What colours does the video show?")


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Pictures, or the frames of a clip, and what is asked about them, turn by turn."""

    kind: str
    pictures: tuple[Picture, ...]
    turns: tuple[Turn, ...]


NO_SHAPES = "no shapes: 0"
MAX_CHARACTERS = 10
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CODE_CHARACTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
"""Without look-alikes."""
SHARE_WORDS = 0.5
SHARE_FONTS = 0.75
"""Share of strings in fonts, if there are any."""


def is_held_out(text: str) -> bool:
    """Return whether this string, or these colours, are held out of training."""
    return hashlib.blake2b(text.encode(), digest_size=4).digest()[0] % _HELD_OUT_SHARE == 0


def listed(shapes: Sequence[tuple[str, str]], counted: Sequence[bool]) -> str:
    """Return every shape of a picture after its label; counted ones have their number."""
    if not shapes:
        return "no shapes"
    number = 0
    items = []
    for label, (form, colour), is_counted in zip(LABELS, shapes, counted, strict=False):
        number += is_counted
        items.append(f"{label} {colour} {form}" + (f" {number}" if is_counted else ""))
    return ", ".join(items)


def _text(source: np.random.Generator, longest: int) -> str:
    """Draw a word, two words, or other characters, with at most so many characters."""
    if source.random() < SHARE_WORDS:
        text = ENGLISH_WORDS[int(source.integers(len(ENGLISH_WORDS)))].upper()
        if source.random() < 0.3:
            text += " " + ENGLISH_WORDS[int(source.integers(len(ENGLISH_WORDS)))].upper()
        if len(text) <= longest:
            return text
    length = int(source.integers(min(3, longest), longest + 1))
    pool = CODE_CHARACTERS if source.random() < 0.6 else LETTERS if source.random() < 0.7 else "0123456789"
    return "".join(pool[place] for place in source.integers(0, len(pool), length))


@dataclass(frozen=True, slots=True)
class Scene:
    """Properties shared by the samples of a batch."""

    kind: str
    height: int
    width: int
    zoom: int
    """Factor by which pictures are enlarged."""
    num_frames: int
    num_turns: int
    wording: int
    of_counts: bool
    counted_by: tuple[str, str]
    """Draw what is counted in each turn: shapes of one form, of one colour, or all."""

    def sample(
        self, source: np.random.Generator, is_examined: bool, max_characters: int = MAX_CHARACTERS, fonts: Sequence[Path] = ()
    ) -> Sample:
        """Draw a sample, held out or not. Strings use letters of dots, or one of the `fonts`."""
        match self.kind:
            case "string":
                return self._string(source, is_examined, max_characters, fonts)
            case "count":
                return self._count(source)
            case "pair":
                return self._pair(source)
        return self._clip(source, is_examined)

    def _string(self, source: np.random.Generator, is_examined: bool, max_characters: int, fonts: Sequence[Path]) -> Sample:
        longest = min(max_characters, (self.width - 6) // (MIN_PITCH * self.zoom), MAX_CHARACTERS)
        while True:
            text = _text(source, longest)
            if is_held_out(text) == is_examined:
                break
        if fonts and source.random() < SHARE_FONTS:
            font = fonts[int(source.integers(len(fonts)))]
            picture = draw_letters(text, self.height, self.width, font, source)
        else:
            picture = draw_string(text, self.height, self.width, self.zoom, source)
        return Sample(self.kind, (picture,), (Turn(READING[self.wording % len(READING)], text),))

    def _shapes(self, source: np.random.Generator, count: int) -> tuple[Picture, list[tuple[str, str]]]:
        """Draw shapes of few colours and forms, so that filters match some; in reading order."""
        colours = source.choice(list(COLOURS), int(source.choice((1, 2, 2, 3))), replace=False)
        forms = source.choice(SHAPES, int(source.choice((1, 2, 2, 3))), replace=False)
        shapes = [(str(source.choice(forms)), str(source.choice(colours))) for _ in range(count)]
        room = (self.height * self.width / max(count, 2)) ** 0.5
        most = int(min(0.66 * room, 84 * self.zoom, min(self.height, self.width) - 2))
        while True:
            try:
                sides = (MIN_SIDE * self.zoom, max(most, MIN_SIDE * self.zoom + 1))
                return self._drawn(shapes, sides, source), shapes
            except ValueError:
                most = most * 3 // 4

    def _count(self, source: np.random.Generator) -> Sample:
        picture, shapes = self._shapes(source, int(source.choice((0, 1, 2, 3, 4, 5), p=(0.06, 0.1, 0.14, 0.2, 0.25, 0.25))))
        turns = []
        for counted_by in self.counted_by[: self.num_turns]:
            what, place, asked = "shapes", 0, ""
            is_there = bool(shapes) and source.random() < 0.85
            if counted_by == "form":
                asked = str(source.choice([form for form, _ in shapes] if is_there else SHAPES))
                what = f"{asked}s"
            elif counted_by == "colour":
                asked = str(source.choice([colour for _, colour in shapes] if is_there else list(COLOURS)))
                what, place = f"{asked} shapes", 1
            counted = [shape[place].startswith(asked) for shape in shapes]
            answer = f"{listed(shapes, counted)}: {sum(counted)}"
            turns.append(Turn(COUNTING[self.wording % len(COUNTING)].format(what=what), answer))
        return Sample(self.kind, (picture,), tuple(turns))

    def _pair(self, source: np.random.Generator) -> Sample:
        if self.of_counts:
            first, second = (self._shapes(source, int(source.integers(1, MAX_COUNT_OF_TWO + 1))) for _ in range(2))
            counts = len(first[1]), len(second[1])
            verdict = "the same" if counts[0] == counts[1] else "the first" if counts[0] > counts[1] else "the second"
            told = " and ".join(listed(shapes, [True] * len(shapes)) for _, shapes in (first, second))
            turn = Turn(COMPARING_COUNTS[self.wording % len(COMPARING_COUNTS)], f"{told}: {verdict}")
        else:
            first = self._shapes(source, 1)
            form, colour = first[1][0]
            form = form if source.random() < 0.5 else str(source.choice(SHAPES))
            colour = colour if source.random() < 0.5 else str(source.choice(list(COLOURS)))
            second = self._one(form, colour, source), [(form, colour)]
            changed = [name for name, place in (("shape", 0), ("colour", 1)) if first[1][0][place] != second[1][0][place]]
            verdict = f"another {' and '.join(changed)}" if changed else "the same"
            told = " and ".join(f"{shown[1][0][1]} {shown[1][0][0]}" for shown in (first, second))
            turn = Turn(COMPARING_SHAPES[self.wording % len(COMPARING_SHAPES)], f"{told}: {verdict}")
        return Sample(self.kind, (first[0], second[0]), (turn,))

    def _one(self, form: str, colour: str, source: np.random.Generator) -> Picture:
        most = min(52 * self.zoom, min(self.height, self.width) - 2)
        return self._drawn([(form, colour)], (MIN_SIDE * self.zoom, most), source)

    def _drawn(self, shapes: list[tuple[str, str]], sides: tuple[int, int], source: np.random.Generator) -> Picture:
        grid = square_grid(self.height, self.width)
        return draw_shapes(shapes, self.height, self.width, grid, sides, source)

    def _clip(self, source: np.random.Generator, is_examined: bool) -> Sample:
        while True:
            names: list[str] = []
            while len(names) < self.num_frames:
                name = str(source.choice(list(COLOURS)))
                if not names or name != names[-1]:
                    names.append(name)
            answer = ", ".join(names)
            if is_held_out(answer) == is_examined:
                break
        frames = tuple(draw_frame(name, self.height, self.width, source) for name in names)
        return Sample(self.kind, frames, (Turn(WATCHING[self.wording % len(WATCHING)], answer),))


def scene(kind: str, source: np.random.Generator) -> Scene:
    """Draw a scene of one of many sizes: with zoom 1, 2 or 3."""
    if kind == "string":
        height, width = source.integers(40, 105), source.integers(156, 353)
    elif kind == "count":
        height, width = source.integers(88, 209), source.integers(88, 209)
    elif kind == "pair":
        height, width = source.integers(84, 145), source.integers(84, 145)
    else:
        height, width = source.integers(48, 81), source.integers(48, 81)
    zoom = int(source.choice((1, 1, 1, 1, 1, 1, 2, 3)))

    def counted_by() -> str:
        return str(source.choice(("form", "colour", "all"), p=(0.35, 0.35, 0.3)))

    return Scene(
        kind,
        int(height) * zoom,
        int(width) * zoom,
        zoom,
        num_frames=int(source.integers(4, 9)),
        num_turns=2 if source.random() < SHARE_ASKED_TWICE else 1,
        wording=int(source.integers(0, 1260)),
        of_counts=bool(source.random() < 0.6),
        counted_by=(counted_by(), counted_by()),
    )
