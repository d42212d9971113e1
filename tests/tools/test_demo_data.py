"""The data of the demonstration model: held-out questions are never trained with, and the wordings are correct."""

from __future__ import annotations

import operator
import random
import re
from itertools import islice

import pytest

from tests.e2e.engine_process import DEMO
from tools.demo import data
from tools.demo.arithmetic import EXAMINED_WORDINGS, NEW_WORDINGS, ArithmeticTask, even_operands, hard_operands, template
from tools.demo.conversations import training_conversations
from tools.demo.examination import GROUPS, Group, examination, report
from tools.demo.newcomers import NEWCOMER_WORDINGS, plain
from tools.demo.small_talk import FALLBACK_ANSWER
from tools.demo.wordings import typed

EQUATION = re.compile(r"(-?\d+) ([-+*/]) (\d+) = (-?\d+)")
NUM_TEXTS = 5000
CALCULATED = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@pytest.fixture(scope="module")
def trained_equations() -> list[tuple[str, ...]]:
    texts = [conversation.answer for conversation in islice(training_conversations(seed=5), NUM_TEXTS)]
    texts += islice(data.training_equations(seed=5), NUM_TEXTS)
    return [match.groups() for text in texts if (match := EQUATION.fullmatch(text.strip()))]


def trained_templates(task: ArithmeticTask) -> set[str]:
    source = random.Random(0)
    return {template(task, 2, 1, source) for _ in range(NUM_TEXTS)}


def test_equations_are_true(trained_equations: list[tuple[str, ...]]) -> None:
    assert len(trained_equations) > NUM_TEXTS
    for a, sign, b, result in trained_equations:
        assert int(result) == CALCULATED[sign](int(a), int(b))


def test_no_examined_equation_is_trained_with(trained_equations: list[tuple[str, ...]]) -> None:
    trained = {f"{a} {sign} {b}" for a, sign, b, _ in trained_equations}
    trained |= {f"{b} + {a}" for a, sign, b, _ in trained_equations if sign == "+"}
    for group in GROUPS[:3]:
        asked = {question.answer.split(" =")[0] for question in group.make(1000, 5)}
        assert len(asked) == 1000
        assert not asked & trained


@pytest.mark.parametrize("task", data.ARITHMETIC_TASKS)
def test_examined_wordings_are_trained_new_ones_not(task: ArithmeticTask) -> None:
    trained = trained_templates(task)
    assert {wording for wording in EXAMINED_WORDINGS[task] if wording not in trained} == set()
    assert {wording for wording in NEW_WORDINGS[task] if wording in trained} == set()


def test_wordings_are_asked_equally_often() -> None:
    for group, questions in examination(100, seed=0)[:3]:
        wordings = [question.wording for question in questions]
        assert len(set(wordings)) == 10, group.name
        assert {wordings.count(wording) for wording in wordings} == {10}


def test_held_out_wordings_are_not_trained_with() -> None:
    assert len(NEWCOMER_WORDINGS) >= 300
    questions = [message["content"] for one in islice(training_conversations(seed=6), NUM_TEXTS) for message in one.messages]
    assert not {plain(text) for text in questions} & {plain(text) for text in NEWCOMER_WORDINGS}


def test_typing_errors_keep_the_subject() -> None:
    source = random.Random(1)
    for _ in range(200):
        assert "{planet}" in typed("Write {planet} backwards", source, 1)
        assert "`tokamak ctl`" in typed("what is `tokamak ctl`", source, 1)
    assert len({typed("How do I stop the server?", source, 0.5) for _ in range(200)}) > 60


def test_held_out_questions_accept_declining_not_calls() -> None:
    group = next(group for group in GROUPS if group.name == "newcomers' questions")
    questions = group.make(100, 0)
    assert report(group, questions, [question.answer for question in questions])
    assert report(group, questions, [FALLBACK_ANSWER] * len(questions))
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert not report(group, questions, [question.answer for question in questions[:-1]] + [call])


def test_follow_ups_follow_their_question() -> None:
    group = next(group for group in GROUPS if group.name == "follow-up questions")
    for question in group.make(100, 0):
        assert [message["role"] for message in question.messages()] == ["user", "assistant", "user"]
        if match := EQUATION.fullmatch(question.answer):
            a, sign, b, result = match.groups()
            assert int(result) == CALCULATED[sign](int(a), int(b))


def test_close_numbers_are_asked_and_trained_with(trained_equations: list[tuple[str, ...]]) -> None:
    questions = data.held_out_arithmetic(EXAMINED_WORDINGS, hard_operands, 1000)
    asked = [int(question.answer.split("= ")[1]) for question in questions if question.task == "subtract"]
    trained = [int(result) for _, sign, _, result in trained_equations if sign == "-"]
    for differences in (asked, trained):
        assert sum(abs(difference) < 10 for difference in differences) > len(differences) // 8
        assert min(differences) < -100


@pytest.mark.parametrize(("num_right", "is_good"), [(98, False), (99, True)])
def test_report_holds_the_bar(num_right: int, is_good: bool, capsys: pytest.CaptureFixture[str]) -> None:
    group = Group("sums", lambda count, seed: data.held_out_arithmetic(EXAMINED_WORDINGS, even_operands, count, seed), 0.99)
    questions = group.make(100, 0)
    answers = [question.answer for question in questions[:num_right]] + ["no"] * (100 - num_right)
    assert report(group, questions, answers) is is_good
    assert f"{num_right} of 100 right" in capsys.readouterr().out


def test_the_model_is_small() -> None:
    assert sum(path.stat().st_size for path in DEMO.iterdir()) < 8_000_000


def test_declined_share_of_facts_is_declined() -> None:
    openings = [list(islice(data.training_openings(7, share), 2000)) for share in (0.0, 0.5)]
    declined = [
        sum(question.answer == FALLBACK_ANSWER for question in questions if question.task == "tokamak")
        for questions in openings
    ]
    assert declined[0] == 0
    assert 400 < declined[1] < 900
    assert not any(question.answer == FALLBACK_ANSWER for question in openings[1] if question.task == "foreign")
