"""What the demonstration model is asked when it is examined, and what it must get right.

Called by `evaluate.py` (over HTTP) and by `examine.py` (with torch), which put the same questions.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tools.demo.arithmetic import EXAMINED_WORDINGS, NEW_WORDINGS, even_operands, hard_operands
from tools.demo.conversations import held_out_calls
from tools.demo.data import OTHER_TASKS, Question, held_out_arithmetic, held_out_questions, is_correct


@dataclass(frozen=True, slots=True)
class Group:
    """Held-out questions of one kind, made from a count and a seed, and the share of right answers that they need, if any."""

    name: str
    make: Callable[[int, int], list[Question]]
    bar: float | None


GROUPS = (
    Group("sums and differences in five wordings", partial(held_out_arithmetic, EXAMINED_WORDINGS, even_operands), 0.99),
    Group("close numbers, carries and borrows", partial(held_out_arithmetic, EXAMINED_WORDINGS, hard_operands), 0.95),
    Group("wordings not trained with", partial(held_out_arithmetic, NEW_WORDINGS, even_operands), None),
    Group("other tasks", partial(held_out_questions, OTHER_TASKS), 0.97),
    Group("questions with tools", held_out_calls, 0.95),
)


def examination(count: int, seed: int) -> list[tuple[Group, list[Question]]]:
    """`count` questions of each group."""
    return [(group, group.make(count, seed)) for group in GROUPS]


def report(group: Group, questions: list[Question], answers: list[str]) -> bool:
    """Print the wrong answers and how many are right by task and wording. True when the group meets its bar or has none."""
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for question, answer in zip(questions, answers, strict=True):
        kind = question.wording or question.task
        asked[kind] += 1
        if is_correct(question, answer):
            right[kind] += 1
        else:
            print(f"wrong ({question.task}): {question.text!r} -> {answer!r}, expected {question.answer!r}")
    for kind in asked:
        print(f"    {kind:<20} {right[kind]:>4} / {asked[kind]}")
    is_good = group.bar is None or right.total() >= group.bar * asked.total()
    verdict = f"{'passed' if is_good else 'FAILED'} (the bar is {100 * group.bar:.0f}%)" if group.bar else "no bar"
    print(f"{group.name}: {right.total()} of {asked.total()} right, {verdict}", flush=True)
    return is_good
