"""Products and quotients of small tables, in many wordings. Called by `data.py`.

All of them are in training: tables are memorized, and the examination tests wordings.
"""

import random
from typing import Literal

from tools.demo.arithmetic import FRAMES

TableTask = Literal["multiply", "divide"]

TABLE_LIMIT = 12
EXPRESSIONS: dict[TableTask, tuple[str, ...]] = {
    "multiply": (
        *("{a} * {b}", "{a}*{b}", "{a} * {b}", "{a} x {b}", "{a}x{b}", "{a} \u00d7 {b}", "{a} times {b}", "{a} times {b}"),
        *("{a} multiplied by {b}", "{a}\u00d7{b}", "{a} X {b}"),
    ),
    "divide": ("{a} / {b}", "{a}/{b}", "{a} ÷ {b}", "{a} : {b}", "{a} divided by {b}", "{a} divided by {b}", "{a} over {b}"),
}
PHRASES: dict[TableTask, tuple[str, ...]] = {
    "multiply": (
        *("Multiply {a} by {b}", "Multiply {a} and {b}.", "What is the product of {a} and {b}?", "Product of {a} and {b}"),
        *("Can you multiply {a} by {b}?", "What do you get when you multiply {a} by {b}?", "Please multiply {a} with {b}."),
        *("What do {a} times {b} make?", "The product of {a} and {b} is", "{b} multiplied with {a}"),
    ),
    "divide": (
        *(
            "Divide {a} by {b}",
            "Divide {a} by {b}.",
            "Can you divide {a} by {b}?",
            "What do you get when you divide {a} by {b}?",
        ),
        *("How often does {b} go into {a}?", "How many times does {b} go into {a}?", "Share {a} by {b}.", "{a} split by {b}"),
        *("What is the quotient of {a} and {b}?", "Please divide {a} by {b}."),
    ),
}
EXAMINED_WORDINGS: dict[TableTask, tuple[str, ...]] = {
    "multiply": ("What is {a} * {b}?", "{a} x {b}", "How much is {a} times {b}?", "{a}*{b} =", "Multiply {a} by {b}"),
    "divide": ("What is {a} / {b}?", "{a} ÷ {b}", "How much is {a} divided by {b}?", "{a}/{b} =", "Divide {a} by {b}"),
}
SIGNS: dict[TableTask, str] = {"multiply": "*", "divide": "/"}


def phrase_texts() -> list[str]:
    """Return every phrase, for the vocabulary."""
    return [text for phrases in (EXPRESSIONS, PHRASES) for texts in phrases.values() for text in texts]


def _factors(source: random.Random) -> tuple[int, int]:
    kind = source.random()
    if kind < 0.6:
        return source.randint(0, TABLE_LIMIT), source.randint(0, TABLE_LIMIT)
    if kind < 0.84:
        pair = source.randint(10, 99), source.randint(2, 9)
    elif kind < 0.92:
        pair = source.randint(1, 99), 10
    else:
        pair = source.randint(10, 499), 2
    return pair if source.random() < 0.7 else pair[::-1]


def operands(task: TableTask, source: random.Random) -> tuple[int, int]:
    """Draw factors with a product below 1000, or a dividend and divisor, one in seven with a remainder."""
    first, second = _factors(source)
    if task == "multiply":
        return first, second
    if source.random() < 0.15:
        return source.randint(1, TABLE_LIMIT**2), source.randint(0, TABLE_LIMIT)
    return first * second, second or 1


def has_answer(task: TableTask, a: int, b: int) -> bool:
    """Return whether training has this product or quotient."""
    if task == "divide":
        return a >= 0 and b > 0 and a % b == 0 and has_answer("multiply", a // b, b)
    small, large = sorted((a, b))
    if small < 0:
        return False
    return (
        large <= TABLE_LIMIT
        or (small <= 9 and large <= 99 and small >= 2)
        or (small == 2 and large <= 499)
        or (small == 10 and large <= 99)
    )


def answer_of(task: TableTask, a: int, b: int) -> str:
    """Return the answer to the task."""
    if task == "multiply":
        return f"{a} * {b} = {a * b}"
    if b == 0:
        return "Nothing can be divided by 0."
    return f"{a} / {b} = {a // b}" if a % b == 0 else f"{a} / {b} is not a whole number."


def template(task: TableTask, source: random.Random) -> str:
    """Draw a trained wording with the slots `a` and `b`."""
    if source.random() < 0.25:
        return source.choice(PHRASES[task])
    return source.choice(FRAMES).replace("{e}", source.choice(EXPRESSIONS[task]))
