"""Questions that depend on the conversation before: "and 13?", "what about times 2?", "now planet". Called by
`conversations.py` and `examination.py`.
"""

import random
import re
from dataclasses import replace

from tools.demo import tables
from tools.demo.arithmetic import even_operand
from tools.demo.data import Question, Split, arithmetic_question, is_held_out, make_question, table_question, thought_of
from tools.demo.follow_up_wordings import DOUBLED, GOING_ON, HALVED, OTHER_NUMBER, OTHER_WORD
from tools.demo.wordings import typed

_EQUATION = re.compile(r"(-?\d+) ([-+*/]) (\d+) = (-?\d+)")
_TASKS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}


def _calculated(task: str, a: int, b: int, text: str) -> Question | None:
    """None: the model does not learn the result."""
    if task in ("add", "subtract"):
        question = arithmetic_question("add" if task == "add" else "subtract", a, b, text)
        return question if 0 <= a <= 999 and 0 <= b <= 999 else None
    table_task: tables.TableTask = "multiply" if task == "multiply" else "divide"
    return table_question(table_task, a, b, text) if tables.has_answer(table_task, a, b) else None


def _number(source: random.Random, task: str) -> int:
    if task in ("multiply", "divide"):
        return source.choice((2, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12))
    return source.randint(1, 20) if source.random() < 0.5 else even_operand(source)


def _after_equation(match: re.Match[str], source: random.Random) -> Question | None:
    first, sign, result = int(match[1]), match[2], int(match[4])
    task = _TASKS[sign]
    if source.random() < 0.4:
        number = _number(source, task)
        return _calculated(task, first, number, source.choice(OTHER_NUMBER).format(b=number))
    kind = source.random()
    if kind < 0.1:
        return _calculated("multiply", result, 2, source.choice(DOUBLED))
    if kind < 0.2:
        return _calculated("divide", result, 2, source.choice(HALVED))
    task = source.choice(list(GOING_ON))
    number = _number(source, task)
    if task == "divide":
        divisors = [divisor for divisor in range(1, 13) if tables.has_answer("divide", result, divisor)]
        number = source.choice(divisors or [2])
    return _calculated(task, result, number, source.choice(GOING_ON[task]).format(b=number))


def follow_up(previous: Question, source: random.Random, split: Split) -> Question | None:
    """Draw a follow-up on `previous`, with its messages before it; None if there is none in `split`."""
    if match := _EQUATION.fullmatch(previous.answer):
        question = _after_equation(match, source)
    elif previous.task in ("reverse", "sort", "uppercase"):
        other = make_question(previous.task, source, split)
        question = replace(other, text=source.choice(OTHER_WORD).format(w=other.key))
    else:
        return None
    if question is None:
        return None
    is_table = question.task in ("multiply", "divide")
    if not is_table and is_held_out(question.task, question.key) != (split == "held_out"):
        return None
    text = typed(question.text, source, 0) if split == "train" and _EQUATION.fullmatch(question.answer) else question.text
    told = ({"role": "assistant", "content": previous.answer},)
    before = (*previous.messages(), *told)
    return replace(question, text=text, before=before, wording="", thought=thought_of(question))


def held_out_follow_ups(count: int, seed: int = 0) -> list[Question]:
    """Return `count` conversations of two questions; the subject of the second is held out, except for products and
    quotients."""
    source = random.Random(f"held out follow-ups {seed}")
    found: dict[str, Question] = {}
    tasks = ("add", "subtract", "multiply", "divide", "reverse", "sort", "uppercase")
    while len(found) < count:
        first = make_question(tasks[len(found) % len(tasks)], source, "held_out")
        if question := follow_up(first, source, "held_out"):
            found.setdefault(question.key + question.task, question)
    return list(found.values())
