"""Conversations to train with, and questions that come with tools.

Called by `batches.py` and `vocabulary.py` (split "train"), and by `examination.py` (split "held_out"). `data.py` makes the
questions that need no tool, `calls.py` the tools and what they are asked for.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tools.demo import calls, facts, small_talk
from tools.demo.data import (
    CALL_THOUGHT,
    RESULT_THOUGHT,
    SYSTEM_PROMPTS,
    THOUGHTS,
    TRAINING_WEIGHTS,
    Message,
    Question,
    Split,
    different,
    is_held_out,
    make_question,
    sometimes_declined,
)
from tools.demo.follow_ups import follow_up

TOOLS_SHARE = 0.4
THINKING_SHARE = 1 / 6
FOLLOW_UP_SHARE = 0.6
"""Of questions that come after one that can be followed up."""
UNSEEN_WORDS = frozenset(word.lower() for words in calls.UNSEEN_WORDS.values() for word in words)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages to learn from, the last of which is an answer. `thought` is None where the model does not think."""

    messages: list[Message]
    tools: tuple[calls.Json, ...] = ()
    thought: str | None = None
    answer: str = ""
    """The last message as the model writes it."""


def _draw(source: random.Random, split: Split) -> calls.Draw:
    """Words of tools, arguments and values of `split`."""

    def trained(pool: tuple[str, ...]) -> str:
        while True:
            drawn = calls.trained_word(source, pool)
            if drawn.lower() not in UNSEEN_WORDS and not is_held_out("tool", drawn.lower()):
                return drawn

    def unseen(pool: tuple[str, ...]) -> str:
        words = calls.UNSEEN_WORDS[pool]
        while True:
            drawn = calls.any_word(source, words)
            if drawn in words or is_held_out("tool", drawn.lower()):
                return drawn

    return trained if split == "train" else unseen


def _tools(source: random.Random, split: Split, shares: calls.Shares | None = None) -> list[calls.Tool]:
    """Some that are told apart by their names and nouns."""
    draw = _draw(source, split)
    shares = shares or (calls.TRAINED if split == "train" else calls.EXAMINED)
    tools: list[calls.Tool] = []
    count = calls.drawn_length(source, shares.tools)
    while len(tools) < count:
        is_familiar = split == "train" and source.random() < 0.15
        tool = calls.familiar_tool(source) if is_familiar else calls.make_tool(source, draw, shares)
        words = {word for other in tools for word in other.words()}
        if not words & set(tool.words()):
            tools.append(tool)
    return tools


def call_question(tools: list[calls.Tool], source: random.Random, split: Split) -> Question:
    """A question that one of `tools` answers; the answer is the call."""
    text, call = calls.asked(source.choice(tools), source, _draw(source, split))
    return Question("call", call.text(), text, call.text(), "", CALL_THOUGHT.format(call.name), tuple(tools), call)


def result_question(asked: Question, source: random.Random, split: Split) -> Question:
    """Return the question that follows the call of `asked`."""
    assert asked.call is not None
    (tool,) = (tool for tool in asked.tools if tool.name == asked.call.name)
    given, answer = calls.result(tool, source, _draw(source, split))
    before = (*asked.messages(), asked.call.message())
    return Question("result", given, given, answer, "", RESULT_THOUGHT, asked.tools, None, before)


def _unanswerable(tools: list[calls.Tool], source: random.Random, split: Split) -> Question:
    """A question for a tool that is not there."""
    words = {word for tool in tools for word in tool.words()}
    while True:
        (other, *_) = _tools(source, split)
        text, _ = calls.asked(other, source, _draw(source, split))
        if not words & set(re.findall("[a-z]+", text.lower())) and not other.wordings:
            return Question("no tool", text, text, small_talk.FALLBACK_ANSWER, "", THOUGHTS["unknown"])


def toolless_question(tools: list[calls.Tool], source: random.Random, split: Split) -> Question:
    """A question that none of `tools` helps with, of any other task or for another tool."""
    kind = source.random()
    if kind < 0.3:
        question = _unanswerable(tools, source, split)
    else:
        names = [task for task in TRAINING_WEIGHTS if split == "train" or task not in ("small talk", "foreign")]
        (task,) = source.choices(names, [TRAINING_WEIGHTS[name] for name in names])
        question = make_question(task, source, split)
    return replace(question, tools=tuple(tools))


def held_out_calls(count: int, seed: int = 0) -> list[Question]:
    """`count` different questions with tools of which no training run has seen a name, an argument or a word that is a value:
    six of ten lead to calls, two come after one, two need none."""
    source = random.Random(f"held out calls {seed}")

    def make(number: int) -> Question:
        tools = _tools(source, "held_out")
        if number % 5 == 4:
            return toolless_question(tools, source, "held_out")
        question = call_question(tools, source, "held_out")
        return result_question(question, source, "held_out") if number % 5 == 3 else question

    return different(make, count)


def training_conversations(seed: int, tools_share: float = TOOLS_SHARE, declined_share: float = 0.0) -> Iterator[Conversation]:
    """Conversations of one to four questions of any task, without end; `tools_share` of them have tools, and `declined_share`
    of the facts asked for are declined.

    One in eight opens with a system prompt, and in one of six the model thinks before its last answer.
    """
    source = random.Random(f"train {seed}")
    tasks, weights = list(TRAINING_WEIGHTS), list(TRAINING_WEIGHTS.values())
    while True:
        messages: list[Message] = []
        if source.random() < 0.125:
            messages.append({"role": "system", "content": _system_prompt(source)})
        if source.random() < tools_share:
            questions = _tool_questions(source)
        else:
            count = source.choices((1, 2, 3, 4), (0.62, 0.20, 0.12, 0.06))[0]
            questions = [make_question(source.choices(tasks, weights)[0], source, "train")]
            while len(questions) < count:
                following = follow_up(questions[-1], source, "train") if source.random() < FOLLOW_UP_SHARE else None
                questions.append(following or make_question(source.choices(tasks, weights)[0], source, "train"))
            questions = [sometimes_declined(question, source, declined_share) for question in questions]
        for question in questions:
            messages.append(question.messages()[-1])
            messages.append(question.call.message() if question.call else {"role": "assistant", "content": question.answer})
        last = questions[-1]
        thought = last.thought if source.random() < THINKING_SHARE else None
        yield Conversation(messages, last.definitions(), thought, last.answer)


def _system_prompt(source: random.Random) -> str:
    """One of those that demonstrations have, or anything else: it changes no answer."""
    if source.random() < 0.6:
        return source.choice(SYSTEM_PROMPTS)
    return " ".join(source.choice(facts.TOKAMAK_FACTS).answer for _ in range(source.choice((1, 1, 2))))


def _tool_questions(source: random.Random) -> list[Question]:
    """The questions of a conversation with tools."""
    tools = _tools(source, "train")
    questions: list[Question] = []
    for _ in range(source.choices((1, 2, 3), (0.5, 0.3, 0.2))[0]):
        if source.random() < 0.2:
            questions.append(toolless_question(tools, source, "train"))
            continue
        questions.append(call_question(tools, source, "train"))
        if source.random() < 0.3:
            questions.append(result_question(questions[-1], source, "train"))
    return questions


def training_choices(seed: int) -> Iterator[tuple[tuple[calls.Json, ...], list[tuple[str, str]]]]:
    """Tools, and questions each with the name of the tool that it is for, without end: much choosing in
    few tokens."""
    source = random.Random(f"choices {seed}")
    draw = _draw(source, "train")
    while True:
        tools = _tools(source, "train", calls.CHOSEN_AMONG)
        questions = []
        for tool in [*source.sample(tools, k=len(tools)), source.choice(tools)]:
            text, call = calls.asked(tool, source, draw)
            if source.random() < 0.4 and tool.noun in text:
                text = tool.noun
            questions.append((text, call.name))
        yield tuple(tool.definition() for tool in tools), questions
