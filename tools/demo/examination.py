"""Questions of the demonstration model's examination, and their right answers.

Called by `evaluate.py` (over HTTP) and by `examine.py` (with torch), which ask the same questions.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tools.demo import tables
from tools.demo.arithmetic import EXAMINED_WORDINGS, NEW_WORDINGS, even_operands, hard_operands
from tools.demo.conversations import held_out_calls
from tools.demo.data import (
    OTHER_TASKS,
    Message,
    Question,
    different,
    held_out_arithmetic,
    held_out_questions,
    is_correct,
    make_question,
    table_question,
)
from tools.demo.fact import ENGLISH_ONLY_ANSWER
from tools.demo.facts import TOKAMAK_FACTS
from tools.demo.follow_ups import held_out_follow_ups
from tools.demo.foreign import unseen_text
from tools.demo.newcomers import NEWCOMER_QUESTIONS
from tools.demo.small_talk import FALLBACK_ANSWER, SMALL_TALK, TOO_LARGE_ANSWER
from tools.demo.wordings import typed

DECLINED = (FALLBACK_ANSWER, TOO_LARGE_ANSWER, ENGLISH_ONLY_ANSWER)
ANSWERS = {fact.topic: fact.answer for fact in (*TOKAMAK_FACTS, *SMALL_TALK)} | {
    "unknown": FALLBACK_ANSWER,
    "large": TOO_LARGE_ANSWER,
    "foreign": ENGLISH_ONLY_ANSWER,
}
TYPING_ERRORS = 0.5
"""Share of newcomers' questions with typing errors."""


@dataclass(frozen=True, slots=True)
class Group:
    """Held-out questions of one kind, made from a count and a seed, and the required share of right answers, if any."""

    name: str
    make: Callable[[int, int], list[Question]]
    bar: float | None


def newcomers(count: int, seed: int) -> list[Question]:
    """Return each question of newcomers once, or `count` if that is more, in random order and with hasty typing; every second
    one follows another question.

    Declining politely counts as right.
    """
    source = random.Random(f"newcomers {seed}")
    asked: list[tuple[str, str]] = []
    while len(asked) < max(count, len(NEWCOMER_QUESTIONS)):
        asked += source.sample(NEWCOMER_QUESTIONS, len(NEWCOMER_QUESTIONS))
    questions = []
    for number, (topics, text) in enumerate(asked[: max(count, len(NEWCOMER_QUESTIONS))]):
        answers = [topics[1:]] if topics[0] == "=" else [ANSWERS[topic] for topic in topics.split("/")]
        shown = typed(text, source, TYPING_ERRORS).replace("{", "").replace("}", "")
        before: tuple[Message, ...] = ()
        if number % 2:
            first = make_question(source.choice(("add", "reverse", "tokamak", "small talk")), source, "held_out")
            before = (*first.messages(), {"role": "assistant", "content": first.answer})
        questions.append(Question("newcomer", text, shown, answers[0], before=before, also_right=(*answers[1:], *DECLINED)))
    return questions


def products(count: int, seed: int) -> list[Question]:
    """Return `count` products and exact quotients in five wordings each."""
    source = random.Random(f"products {seed}")
    tasks: tuple[tables.TableTask, ...] = ("multiply", "divide")

    def make(number: int) -> Question:
        task = tasks[number % 2]
        wordings = tables.EXAMINED_WORDINGS[task]
        wording = wordings[number // 2 % len(wordings)]
        while True:
            a, b = tables.operands(task, source)
            if tables.has_answer(task, a, b):
                return table_question(task, a, b, wording.format(a=a, b=b), wording)

    return different(make, count)


def foreign(count: int, seed: int) -> list[Question]:
    """Return `count` texts in languages, sentences and emoji that are not in training."""
    source = random.Random(f"foreign {seed}")
    return [Question("foreign", text, text, ENGLISH_ONLY_ANSWER) for text in (unseen_text(source) for _ in range(count))]


def is_call(answer: str) -> bool:
    """Return whether an answer calls a tool, or looks like it."""
    return answer.lstrip().startswith(("<tool_call>", '{"name": "', '{"arguments"')) and "arguments" in answer


GROUPS = (
    Group("sums and differences in five wordings", partial(held_out_arithmetic, EXAMINED_WORDINGS, even_operands), 0.99),
    Group("close numbers, carries and borrows", partial(held_out_arithmetic, EXAMINED_WORDINGS, hard_operands), 0.95),
    Group("wordings not trained with", partial(held_out_arithmetic, NEW_WORDINGS, even_operands), None),
    Group("other tasks", partial(held_out_questions, OTHER_TASKS), 0.97),
    Group("questions with tools", held_out_calls, 0.95),
    Group("newcomers' questions", newcomers, 0.95),
    Group("products and quotients", products, 0.95),
    Group("follow-up questions", held_out_follow_ups, 0.9),
    Group("other languages and emoji", foreign, 0.95),
)


def examination(count: int, seed: int) -> list[tuple[Group, list[Question]]]:
    """Return `count` questions of each group."""
    return [(group, group.make(count, seed)) for group in GROUPS]


def report(group: Group, questions: list[Question], answers: list[str]) -> bool:
    """Print the wrong answers, and the number of right ones by task and wording. Return whether the group meets its bar, if
    any, and nothing is called without tools."""
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
    num_declined = sum(
        answer.strip() in DECLINED and question.answer not in DECLINED
        for question, answer in zip(questions, answers, strict=True)
    )
    if num_declined:
        print(f"    declined             {num_declined:>4} / {asked.total()}")
    if num_calls := sum(is_call(answer) and not question.tools for question, answer in zip(questions, answers, strict=True)):
        print(f"    calls without tools  {num_calls:>4}: FAILED")
    is_good = (group.bar is None or right.total() >= group.bar * asked.total()) and not num_calls
    verdict = f"{'passed' if is_good else 'FAILED'} (the bar is {100 * group.bar:.0f}%)" if group.bar else "no bar"
    print(f"{group.name}: {right.total()} of {asked.total()} right, {verdict}", flush=True)
    return is_good
