"""The data of the demonstration vision model: held-out examples are never trained with, and answers match the drawings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tools.demo.vision.drawing import COLOURS, SHADES, SHAPES, Mark, Picture, Pixels
from tools.demo.vision.examination import GROUPS, Question, exchanged, num_right
from tools.demo.vision.glyphs import CHARACTERS, GLYPHS
from tools.demo.vision.questions import KINDS, MAX_CHARACTERS, NO_SHAPES, Sample, Turn, is_held_out, scene
from tools.demo.vision.sizes import square_grid
from tools.demo.vision.sketches import WORDS
from tools.demo.words import ENGLISH_WORDS

NUM_SAMPLES = 60


def samples(kind: str, is_examined: bool) -> Iterator[Sample]:
    source = np.random.default_rng(5)
    for _ in range(NUM_SAMPLES):
        yield scene(kind, source).sample(source, is_examined)


@pytest.mark.parametrize("kind", ["string", "clip"])
def test_examined_answers_are_not_trained_with(kind: str) -> None:
    for is_examined in (False, True):
        assert {is_held_out(sample.turns[0].answer) for sample in samples(kind, is_examined)} == {is_examined}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_seed_reproduces_examples_of_many_sizes(kind: str) -> None:
    first, second = list(samples(kind, False)), list(samples(kind, False))
    assert [sample.turns for sample in first] == [sample.turns for sample in second]
    pixels = [[picture.pixels for picture in sample.pictures] for sample in first]
    for these, those in zip(pixels, [[picture.pixels for picture in sample.pictures] for sample in second], strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(these, those, strict=True))
    assert len({picture.shape for these in pixels for picture in these}) > NUM_SAMPLES / 2


def test_glyphs_differ() -> None:
    assert len({GLYPHS[character].tobytes() for character in CHARACTERS}) == len(CHARACTERS) == 36


def test_strings_are_marked_in_their_order() -> None:
    for sample in samples("string", True):
        marks = sample.pictures[0].marks
        assert "".join(CHARACTERS[mark.thing - 1] for mark in marks) == sample.turns[0].answer.replace(" ", "")
        assert [mark.column for mark in marks] == sorted(mark.column for mark in marks)
        assert all(0 < place < 1 for mark in marks for place in (mark.row, mark.column))
        assert 3 <= len(marks) <= MAX_CHARACTERS


def box_of(picture: Picture, mark: Mark) -> Pixels:
    """Return the part of a picture that a mark covers."""
    height, width, _ = picture.pixels.shape
    rows = [round((mark.row + side * mark.height / 2) * height) for side in (-1, 1)]
    columns = [round((mark.column + side * mark.width / 2) * width) for side in (-1, 1)]
    return picture.pixels[rows[0] : rows[1], columns[0] : columns[1]]


def shown(thing: int) -> tuple[str, str]:
    """Return colour and shape of a mark."""
    shape, colour = divmod(thing - 1 - len(CHARACTERS), len(COLOURS))
    return list(COLOURS)[colour], SHAPES[shape]


def test_counts_match_the_drawing() -> None:
    for sample in samples("count", True):
        things = [shown(mark.thing) for mark in sample.pictures[0].marks]
        for mark, (colour, _) in zip(sample.pictures[0].marks, things, strict=True):
            seen = box_of(sample.pictures[0], mark).astype(int)
            shades = (COLOURS[colour], *SHADES[colour])
            assert min(np.abs(seen - shade).max(axis=2).min() for shade in shades) < 50
        for turn in sample.turns:
            words = [word.strip("?.") for word in turn.text.split()]
            (noun,) = [word for word in words if word == "shapes" or word.removesuffix("s") in SHAPES]
            colours = [word for word in words if word in COLOURS]
            is_kept = [colours in ([], [colour]) and noun in ("shapes", f"{shape}s") for colour, shape in things]
            numbers = [f" {sum(is_kept[: place + 1])}" if kept else "" for place, kept in enumerate(is_kept)]
            items = [f"{label} {colour} {shape}" for label, (colour, shape) in zip("abcde", things, strict=False)]
            listed = (
                ", ".join(item + number for item, number in zip(items, numbers, strict=True)) or NO_SHAPES.partition(":")[0]
            )
            assert turn.answer == f"{listed}: {sum(is_kept)}"


@pytest.mark.parametrize("kind", ["count", "pair"])
def test_shapes_are_marked_in_reading_order(kind: str) -> None:
    for picture in (picture for sample in samples(kind, False) for picture in sample.pictures):
        rows, columns = square_grid(*picture.pixels.shape[:2])
        squares = [(int(mark.row * rows), int(mark.column * columns)) for mark in picture.marks]
        assert squares == sorted(set(squares))
        assert [mark.number for mark in picture.marks] == list(range(1, len(squares) + 1))


@pytest.mark.parametrize(
    ("kind", "wanted", "answer", "is_right"),
    [
        ("count", "a red circle 1: 1", "a blue circle 1: 1\n", True),
        ("count", "a red circle 1: 1", "a red circle 1: 2", False),
        ("count", "a red circle 1: 1", "a red circle 1", False),
        ("pair", "red circle and blue circle: another colour", "red circle and green circle: another colour", True),
        ("pair", "red circle and blue circle: another colour", "red circle and blue circle: the same", False),
        ("string", "K7RX", "K7RY", False),
        ("clip", "red, blue", "blue, blue", False),
    ],
)
def test_answers_are_judged_by_the_question(kind: str, wanted: str, answer: str, is_right: bool) -> None:
    assert Question(kind, (), Turn("", wanted)).is_right(answer) == is_right


@pytest.mark.slow
def test_exchanged_pictures_change_the_answer() -> None:
    """The pictures determine the answer: few questions keep theirs with other pictures."""
    for group in GROUPS:
        questions = group.questions(100, 0)
        truths = {id(question.pictures): question.turn.answer for question in questions}
        assert num_right(questions, [truths[id(question.pictures)] for question in questions]) == 100
        assert num_right(questions, [truths[id(question.pictures)] for question in exchanged(questions)]) <= 30


def test_fewer_questions_are_the_first_of_many() -> None:
    few, many = (GROUPS[1].questions(count, 3) for count in (4, 9))
    assert [question.turn for question in few] == [question.turn for question in many[:4]]
    assert [question.kind for question in few] == ["pair", "clip"] * 2
    assert replace(few[0], pictures=()) == replace(many[0], pictures=())


@pytest.mark.slow
def test_sketches_are_varied_and_reproducible() -> None:
    """The same for a seed, of many sizes, on light and dark backgrounds, some of them empty."""
    first, second = (GROUPS[2].questions(NUM_SAMPLES, 1) for _ in range(2))
    pixels = [question.pictures[0].pixels for question in first]
    assert all(np.array_equal(one, other.pictures[0].pixels) for one, other in zip(pixels, second, strict=True))
    assert len({picture.shape for picture in pixels}) > NUM_SAMPLES / 2
    brightness = [picture[0, 0].mean() for picture in pixels]
    assert min(brightness) < 20
    assert max(brightness) > 240
    assert NO_SHAPES in {question.turn.answer for question in first}


def test_sketched_words_are_not_trained_with() -> None:
    assert not {word.lower() for word in WORDS} & set(ENGLISH_WORDS)
