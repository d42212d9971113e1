"""Sums and differences: operands and wordings.

Called by `data.py`. Half of the operands are drawn evenly, the others from hard cases: numbers that are close together, columns
that carry or borrow. Questions combine an expression (`211 - 12`, `211 minus 12`) and a frame (`What is ...?`, `... = ?`), so
that the model sees hundreds of wordings and generalizes to new ones.
"""

import random
from collections.abc import Callable
from typing import Literal

ArithmeticTask = Literal["add", "subtract"]

MAX_OPERAND = 999
MAX_CLOSE_DISTANCE = 120

Phrases = dict[ArithmeticTask, tuple[str, ...]]
Draw = Callable[[ArithmeticTask, random.Random], tuple[int, int]]

EXPRESSIONS: Phrases = {
    "add": ("{a} + {b}", "{a}+{b}", "{a} plus {b}"),
    "subtract": ("{a} - {b}", "{a}-{b}", "{a} minus {b}"),
}
FRAMES = (
    *("{e}", "{e} =", "{e}=", "{e} = ?", "{e}=?", "{e} =?", "{e}?", "{e}.", "{e} equals", "{e} equals?", "{e} is", "{e} makes"),
    *("What is {e}?", "What's {e}?", "What is {e} = ?", "What does {e} equal?", "What does {e} make?"),
    *("Calculate {e}", "Calculate {e}.", "Calculate: {e}", "Compute {e}", "Compute {e}.", "Compute: {e}", "Solve {e}."),
    *("Evaluate {e}", "Find {e}.", "How much is {e}?", "How much does {e} make?", "Tell me {e}.", "Give me {e}."),
    *("Please calculate {e}.", "Please compute {e}.", "Can you calculate {e}?", "Could you compute {e}?"),
    *(
        "Can you tell me {e}?",
        "The result of {e}",
        "What is the result of {e}?",
        "The result of {e} is",
        "Tell me what {e} is.",
    ),
    *("{e}, please.", "Do you know what {e} is?", "I need {e}.", "What do you get for {e}?"),
)
PHRASES: Phrases = {
    "add": (
        *("Add {a} and {b}", "Add {a} and {b}.", "Add {a} to {b}.", "Add {a} + {b}", "Can you add {a} and {b}?"),
        *("Sum {a} and {b}", "What is the sum of {a} and {b}?", "The sum of {a} and {b}", "The sum of {a} and {b} is"),
        *(
            "Sum of {a} and {b}",
            "Please add {a} and {b}.",
            "What do you get when you add {a} and {b}?",
            "What is {a} added to {b}?",
        ),
        *(
            "{a} and {b} is",
            "How much are {a} and {b} together?",
            "{a} and {b} together",
            "{a} and {b} in total",
            "What is the total of {a} and {b}?",
            "Calculate the sum of {a} and {b}.",
            "Find the sum of {a} and {b}.",
        ),
    ),
    "subtract": (
        *("What is left of {a} without {b}?", "{a} without {b}", "{a} reduced by {b}"),
        *("Subtract {b} from {a}", "Subtract {b} from {a}.", "Can you subtract {b} from {a}?", "Please subtract {b} from {a}."),
        *("Take {b} away from {a}.", "Take {b} from {a}.", "What is left when you take {b} from {a}?", "{a} less {b}"),
        *("What is {b} subtracted from {a}?", "{a} take away {b}", "What do you get when you subtract {b} from {a}?"),
    ),
}
DIFFERENCES = (
    *("What is the difference between {a} and {b}?", "What is the difference of {a} and {b}?", "The difference of {a} and {b}"),
    *("The difference between {a} and {b} is", "Calculate the difference between {a} and {b}."),
)
"""Asked only with the larger number first, because the sign of the reverse is ambiguous."""

EXAMINED_WORDINGS: Phrases = {
    "add": ("What is {a} + {b}?", "{a} + {b} = ?", "What's {a} + {b}?", "Calculate {a}+{b}", "{a} plus {b} equals"),
    "subtract": ("What is {a} - {b}?", "{a} - {b} = ?", "What's {a} - {b}?", "Calculate {a}-{b}", "{a} minus {b} equals"),
}
NEW_WORDINGS: Phrases = {
    "add": ("Work out {a} + {b}.", "{a}+{b} gives", "So, {a} plus {b}?", "Can I have {a} + {b}?", "Now do {a}+{b}"),
    "subtract": ("Work out {a} - {b}.", "{a}-{b} gives", "So, {a} minus {b}?", "Can I have {a} - {b}?", "Now do {a}-{b}"),
}
"""Never used in training: they test unforeseen wordings."""


def phrase_texts() -> list[str]:
    """Return every phrase of the trained questions, for the vocabulary."""
    expressions = [text for texts in EXPRESSIONS.values() for text in texts]
    return [*expressions, *FRAMES, *DIFFERENCES, *PHRASES["add"], *PHRASES["subtract"]]


def even_operand(source: random.Random) -> int:
    """One to three digits; most have three."""
    num_digits = source.choices((1, 2, 3), (0.12, 0.28, 0.60))[0]
    return source.randint(0 if num_digits == 1 else 10 ** (num_digits - 1), 10**num_digits - 1)


def _close_operands(source: random.Random) -> tuple[int, int]:
    first = even_operand(source)
    distance = source.randint(0, source.choice((3, 12, MAX_CLOSE_DISTANCE)))
    second = first + source.choice((-distance, distance))
    return first, min(max(second, 0), MAX_OPERAND)


def _chained_operands(task: ArithmeticTask, source: random.Random) -> tuple[int, int]:
    """Draw operands in which most columns carry or borrow, or would with a carry from the right."""
    first = second = 0
    num_columns = source.choice((2, 3, 3, 3))
    for column in range(num_columns):
        upper, lower = source.randint(0, 9), source.randint(0, 9)
        if source.random() < 0.8:
            least = 9 - upper if task == "add" else upper
            lower = source.randint(least, 9)
        if task == "subtract" and column == num_columns - 1:
            upper, lower = max(upper, lower), min(upper, lower)
        first, second = first + upper * 10**column, second + lower * 10**column
    return (second, first) if task == "subtract" and source.random() < 0.2 else (first, second)


def even_operands(task: ArithmeticTask, source: random.Random) -> tuple[int, int]:
    """Draw two independent numbers."""
    return even_operand(source), even_operand(source)


def hard_operands(task: ArithmeticTask, source: random.Random) -> tuple[int, int]:
    """Draw two numbers that are close together, or carry and borrow."""
    kind = source.random()
    return _close_operands(source) if kind < (0.6 if task == "subtract" else 0.2) else _chained_operands(task, source)


def operands(task: ArithmeticTask, source: random.Random) -> tuple[int, int]:
    """Draw two numbers from 0 to `MAX_OPERAND` for training: evenly or hard cases."""
    kind = source.random()
    if kind < 0.5:
        return even_operand(source), even_operand(source)
    if kind < (0.8 if task == "subtract" else 0.6):
        return _close_operands(source)
    return _chained_operands(task, source)


def template(task: ArithmeticTask, a: int, b: int, source: random.Random) -> str:
    """Draw a trained wording with the slots `a` and `b`."""
    kind = source.random()
    if kind < 0.25:
        return source.choice(PHRASES[task])
    if kind < 0.30 and task == "subtract" and a >= b:
        return source.choice(DIFFERENCES)
    return source.choice(FRAMES).replace("{e}", source.choice(EXPRESSIONS[task]))
