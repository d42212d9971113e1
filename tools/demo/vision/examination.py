"""Questions of the vision model's examination, and their right answers. Called by `evaluate.py`.

Strings, words and clips must match exactly. In counts, sketches and pairs only the result counts: the number or verdict after
the colon. The list before it may differ.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tools.demo.vision.drawing import COLOURS, SHAPES, Picture
from tools.demo.vision.questions import COUNTING, KINDS, MAX_COUNT, NO_SHAPES, READING, Turn, scene
from tools.demo.vision.sketches import a_word, sketch_shapes, sketch_word

MOST_EXCHANGED = 0.3
"""Maximum share of questions answered right without their pictures."""


@dataclass(frozen=True, slots=True)
class Question:
    """Question about pictures, or about a clip's frames."""

    kind: str
    pictures: tuple[Picture, ...]
    turn: Turn

    def is_right(self, answer: str) -> bool:
        wanted = self.turn.answer
        if self.kind in ("count", "pair", "sketch"):
            answer, wanted = (text[text.rfind(":") :] for text in (answer, wanted))
        return answer.strip() == wanted


def _sketch(source: random.Random) -> Question:
    """Draw a question about up to five shapes of `sketches.py`; one picture in twelve is empty."""
    count = 0 if source.random() < 1 / 12 else source.randint(1, MAX_COUNT)
    forms, colours = source.sample(SHAPES, source.randint(1, 3)), source.sample(list(COLOURS), source.randint(1, 3))
    shapes = [(source.choice(forms), source.choice(colours)) for _ in range(count)]
    kind, asked = source.choice(("all", "form", "colour")), ""
    if kind == "form":
        asked = source.choice(forms)
    elif kind == "colour":
        asked = source.choice(colours)
    number = sum(asked in shape for shape in shapes) if asked else count
    what = {"all": "shapes", "form": f"{asked}s", "colour": f"{asked} shapes"}[kind]
    wanted = f": {number}" if shapes else NO_SHAPES
    return Question("sketch", (sketch_shapes(shapes, source),), Turn(source.choice(COUNTING).format(what=what), wanted))


def _word(source: random.Random) -> Question:
    text = a_word(source)
    return Question("word", (sketch_word(text, source),), Turn(source.choice(READING), text))


SKETCHED = {"sketch": _sketch, "word": _word}
"""Kinds drawn by a generator that training does not use."""


@dataclass(frozen=True, slots=True)
class Group:
    """Held-out questions of some kinds, equally many of each, and the required share of right answers."""

    kinds: tuple[str, ...]
    bar: float

    @property
    def name(self) -> str:
        return " and ".join(f"{kind}es" if kind.endswith("ch") else f"{kind}s" for kind in self.kinds)

    def questions(self, count: int, seed: int) -> list[Question]:
        """Return `count` questions in total; the first n are the same for any count."""
        found = []
        drawn_kinds = [kind for kind in self.kinds if kind in KINDS]
        sources = {kind: np.random.default_rng((seed, 1 << 40, KINDS.index(kind))) for kind in drawn_kinds}
        for place in range(count):
            kind = self.kinds[place % len(self.kinds)]
            if kind in SKETCHED:
                found.append(SKETCHED[kind](random.Random(f"{kind} {seed} {place}")))
                continue
            drawn = replace(scene(kind, sources[kind]), num_turns=1).sample(sources[kind], is_examined=True)
            found.append(Question(kind, drawn.pictures, drawn.turns[0]))
        return found


GROUPS = (Group(("string", "count"), 0.9), Group(("pair", "clip"), 0.8), Group(("sketch",), 0.9), Group(("word",), 0.55))


def exchanged(questions: Sequence[Question]) -> list[Question]:
    """Return each question with the pictures of the next one of its kind."""
    found = list(questions)
    for kind in {question.kind for question in questions}:
        places = [place for place, question in enumerate(questions) if question.kind == kind]
        for place, other in zip(places, places[1:] + places[:1], strict=True):
            found[place] = replace(questions[place], pictures=questions[other].pictures)
    return found


def num_right(questions: Sequence[Question], answers: Sequence[str]) -> int:
    return sum(question.is_right(answer) for question, answer in zip(questions, answers, strict=True))


def report(group: Group, questions: Sequence[Question], answers: Sequence[str], blind: Sequence[str]) -> bool:
    """Print the wrong answers, the number of right ones of each kind, and how many remain right with exchanged pictures. Return
    whether both meet their bars."""
    for question, answer in zip(questions, answers, strict=True):
        if not question.is_right(answer):
            print(f"wrong ({question.kind}): {question.turn.text!r} -> {answer!r}, expected {question.turn.answer!r}")
    for kind in group.kinds:
        places = [place for place, question in enumerate(questions) if question.kind == kind]
        right = num_right([questions[place] for place in places], [answers[place] for place in places])
        print(f"    {kind:<20} {right:>4} / {len(places)}")
    right, still_right = num_right(questions, answers), num_right(questions, blind)
    is_good = right >= group.bar * len(questions) and still_right <= MOST_EXCHANGED * len(questions)
    print(
        f"{group.name}: {right} of {len(questions)} right (the bar is {100 * group.bar:.0f}%), with exchanged pictures "
        f"{still_right} (at most {100 * MOST_EXCHANGED:.0f}%), {'passed' if is_good else 'FAILED'}",
        flush=True,
    )
    return is_good
