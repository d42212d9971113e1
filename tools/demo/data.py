"""Questions for training and examination of the demonstration model, and the grading of its answers.

Called by `train.py` (split "train"), by `evaluate.py` and by the tests (split "held_out"). Everything depends only on a seed.
The split of a question is given by a hash of its subject (the two operands, the word, the values, the wording), so splits are
disjoint for any seed and phrasing: no training sample ever adds a held-out pair of numbers.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Literal

from tools.demo import arithmetic, calls, facts, follow_up_wordings, keywords, small_talk, tables
from tools.demo.arithmetic import ArithmeticTask, Draw, Phrases
from tools.demo.fact import ENGLISH_ONLY_ANSWER
from tools.demo.foreign import foreign_text
from tools.demo.newcomers import NEWCOMER_WORDINGS, plain
from tools.demo.phrasings import CHATTY_TOPICS, QUESTION_WORDS, VERBS
from tools.demo.wordings import expanded, mistyped, reworded, typed
from tools.demo.words import ENGLISH_WORDS, any_word, invented_word

Split = Literal["train", "held_out"]
Message = dict[str, Any]

HELD_OUT_ONE_IN = 16
MAX_WORD_LETTERS = 8
MAX_SORTED_LETTERS = 7
MAX_COUNTED_LETTERS = 11

ARITHMETIC_TASKS: tuple[ArithmeticTask, ...] = ("add", "subtract")
OTHER_TASKS = ("reverse", "sort", "uppercase", "count", "json", "tokamak")
TRAINING_WEIGHTS = {
    "add": 0.09,
    "subtract": 0.10,
    "multiply": 0.06,
    "divide": 0.05,
    "reverse": 0.05,
    "sort": 0.05,
    "uppercase": 0.02,
    "count": 0.05,
    "json": 0.04,
    "tokamak": 0.30,
    "small talk": 0.06,
    "unknown": 0.07,
    "large": 0.02,
    "foreign": 0.04,
}
UNDERSTOOD_TASKS = {"tokamak": 0.66, "small talk": 0.08, "unknown": 0.14, "large": 0.03, "foreign": 0.09}
"""Tasks with fixed sentences as answers, with their shares: the difficulty is to understand the question."""
NEVER_HELD_OUT = ("small talk", "multiply", "divide", "large", "foreign", "unknown")
"""Tables are memorized, and answers of the others do not depend on the exact question."""
TYPING_ERRORS = {"tokamak": 0.5, "small talk": 0.4, "unknown": 0.4, "large": 0.2}
"""Share of a task's questions with typing errors."""
KEYWORDS_SHARE = 0.3
REWORDED_SHARE = 0.45
"""Shares of questions about Tokamak: composed from keywords, and with replaced words."""
TEMPLATE_ERRORS = 0.12
"""Share for other tasks, in the words around the subject."""
NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"),
    *("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)


@dataclass(frozen=True, slots=True)
class Question:
    """Question: `key` is its subject and decides the split, `answer` is the full reply."""

    task: str
    key: str
    text: str
    answer: str
    wording: str = ""
    """The wording with its slots, if an examination counts by wording."""
    thought: str = ""
    """The reasoning before the answer, if any."""
    tools: tuple[calls.Tool, ...] = ()
    call: calls.Call | None = None
    """The answer as a call, if it is one; `answer` has its text."""
    before: tuple[Message, ...] = ()
    """Messages before `text`; if the last is a call, `text` is the tool's result."""
    also_right: tuple[str, ...] = ()
    """Other accepted answers."""

    def messages(self) -> list[Message]:
        role = "tool" if self.before and self.before[-1].get("tool_calls") else "user"
        return [*self.before, {"role": role, "content": self.text}]

    def definitions(self) -> tuple[calls.Json, ...]:
        """Return the tools in OpenAI's format."""
        return tuple(tool.definition() for tool in self.tools)


WORD_TEMPLATES = {
    "reverse": (
        *("Reverse the word {w}", "Reverse the word {w}.", "Reverse {w}", "Reverse {w}.", "Write {w} backwards."),
        *("Spell {w} backwards.", "What is {w} backwards?", "What is {w} spelled backwards?", "Can you reverse {w}?"),
        *("Please reverse the word {w}.", "Reverse the letters of {w}.", "Reverse this word: {w}", "Reverse: {w}"),
        *("How do you spell {w} backwards?", "Turn the word {w} around.", "Write the word {w} in reverse."),
    ),
    "sort": (
        *("Sort the letters of {w}", "Sort the letters of {w}.", "Sort the letters in {w}.", "Sort {w}", "Sort: {w}"),
        *("Sort the letters of the word {w}.", "Put the letters of {w} in alphabetical order.", "Can you sort {w}?"),
        *("Please sort the letters of {w}.", "Sort the word {w}.", "Order the letters of {w} alphabetically."),
        *("What are the letters of {w} in alphabetical order?", "Sort the letters of this word: {w}"),
    ),
    "uppercase": (
        *("Uppercase {w}", "Uppercase {w}.", "Uppercase the word {w}.", "Write {w} in capital letters.", "Upper-case {w}."),
        *("Convert {w} to upper case.", "Make {w} uppercase.", "Put {w} in capitals.", "Write {w} in upper case."),
        *("Convert the word {w} to uppercase.", "What is {w} in upper case?", "Please uppercase {w}.", "Uppercase: {w}"),
        *("Write the word {w} in capitals.", "Can you uppercase {w}?", "Upper-case the word {w}"),
    ),
}
COUNT_LETTER_TEMPLATES = (
    *("How many letters {l} are in {w}?", "How many {l}'s are in {w}?", "How many {l}s are in {w}?"),
    *("Count the letter {l} in {w}.", "How often does the letter {l} occur in {w}?", "Count the {l}'s in {w}."),
    *("How many times does {l} appear in {w}?", "How many times does the letter {l} appear in {w}?"),
    *("How many letters {l} are there in {w}?", "How many {l}'s are there in the word {w}?", "How often is {l} in {w}?"),
    *("How many times is the letter {l} in the word {w}?", "Count the letters {l} in the word {w}."),
)
COUNT_ALL_TEMPLATES = (
    *("How many letters does {w} have?", "How many letters are in {w}?", "Count the letters of {w}.", "How long is {w}?"),
    *("Count the letters in {w}.", "How many letters does the word {w} have?", "How many letters are in the word {w}?"),
    *("How many letters are there in {w}?", "How long is the word {w}?", "What is the length of {w}?"),
)
JSON_OBJECT_TEMPLATES = (
    *("Give a JSON object with {pairs}", "Give a JSON object with {pairs}.", "Write a JSON object with {pairs}."),
    *("Return JSON with {pairs}.", "Give me JSON: {pairs}", "Make a JSON object: {pairs}.", "Answer in JSON: {pairs}."),
    *("Give {pairs} as JSON.", "Write {pairs} as a JSON object.", "Return {pairs} as JSON.", "JSON with {pairs}"),
    *("Please make a JSON object with {pairs}.", "Can you give me a JSON object with {pairs}?", "Create JSON with {pairs}."),
)
JSON_PERSON_TEMPLATES = (
    *("{n} is {a} years old. Write that as JSON.", "Write as JSON with name and age: {n} is {a} years old."),
    *("Give a JSON object for {n}, who is {a} years old.", "As JSON with name and age: {n}, {a}"),
)
JSON_LIST_TEMPLATES = (
    *("Give a JSON list of {items}.", "Give a JSON array with {items}.", "Write {items} as a JSON list."),
    *("Return a JSON array of {items}.", "Make a JSON list of {items}.", "Write a JSON array with {items}"),
)
JSON_KEYS = (
    *("name", "age", "city", "color", "price", "count", "size", "id", "animal", "title", "year", "x", "y", "ok", "ready"),
    *("user", "score", "status", "level", "word", "number", "fruit", "weight", "code"),
)
SYSTEM_PROMPTS = (
    *("You are a helpful assistant.", "You are a helpful assistant. Be brief.", "Be brief.", "You are Tokamak."),
    *("Answer the question.", "You are a small demonstration model.", "You answer questions and do small tasks."),
)
THOUGHTS = {
    "add": "I add {0} and {1}.",
    "subtract": "I subtract {1} from {0}.",
    "multiply": "I multiply {0} and {1}.",
    "divide": "I divide {0} by {1}.",
    "large": "That is too large for me.",
    "foreign": "I do not understand that.",
    "reverse": "I reverse {spelled}.",
    "sort": "I sort {spelled}.",
    "uppercase": "I write {spelled} in capital letters.",
    "count": "I count in {spelled}.",
    "json": "I write JSON.",
    "tokamak": "This is about Tokamak.",
    "small talk": "This is small talk.",
    "unknown": "I do not know that.",
}
CALL_THOUGHT = "I call {}."
RESULT_THOUGHT = "I tell what the tool gives."
SLOT_WORDS = "the letter appears time times word has letters true false system user assistant"
"""Return the words of answers and turns that are not in the templates above."""


def _phrase_words() -> frozenset[str]:
    """The words of all fixed phrases, in lower case, without those to be spelled (`ENGLISH_WORDS`).

    Questions outside the model's knowledge do not count.
    """
    texts = [SLOT_WORDS, *SYSTEM_PROMPTS, *JSON_KEYS, *facts.OPENINGS, *facts.CLOSINGS, *NUMBER_WORDS]
    texts += [*arithmetic.phrase_texts(), *tables.phrase_texts(), *COUNT_LETTER_TEMPLATES, *COUNT_ALL_TEMPLATES]
    texts += [*follow_up_wordings.phrase_texts(), small_talk.FALLBACK_ANSWER, small_talk.TOO_LARGE_ANSWER]
    texts += [*small_talk.UNKNOWN_WORDINGS, *small_talk.UNKNOWN_PLAIN_WORDINGS, *small_talk.NUMBER_WORDINGS]
    texts += [*JSON_OBJECT_TEMPLATES, *JSON_PERSON_TEMPLATES, *JSON_LIST_TEMPLATES]
    texts += [*calls.phrase_texts(), *THOUGHTS.values(), CALL_THOUGHT, RESULT_THOUGHT]
    for templates in WORD_TEMPLATES.values():
        texts += templates
    for fact in (*facts.TOKAMAK_FACTS, *small_talk.SMALL_TALK):
        texts += [fact.answer, *fact.wordings]
    texts += [*keywords.FRAMES, *keywords.KEYWORDS.values()]
    texts += [text for part in facts.PARTS.values() for text in part]
    shown = " ".join(re.sub(r"\{.*?\}", " ", text) for text in texts)
    words = {word.lower() for word in re.findall(r"[A-Za-z]{2,}", shown)}
    unseen = {word.lower() for pool in calls.UNSEEN_WORDS.values() for word in pool}
    return frozenset(words - set(ENGLISH_WORDS) - unseen - {"tokamak"})


PHRASE_WORDS = _phrase_words()
"""Each of these is one token (see `vocabulary.py`), so spelling one needs memory."""

_TASK_PHRASE_WORDS = tuple(sorted(word for word in PHRASE_WORDS if 3 <= len(word) <= MAX_SORTED_LETTERS))


def is_held_out(task: str, key: str) -> bool:
    """Return whether a subject is held out: one in `HELD_OUT_ONE_IN`, by hash.

    Never one of the `PHRASE_WORDS`: the model can know their letters only from training.
    """
    if key in PHRASE_WORDS:
        return False
    digest = blake2b(f"{task}|{key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def _restyled(text: str, source: random.Random) -> str:
    """Return a variant of the question: other case, no full stop, a greeting in front."""
    kind = source.random()
    if kind < 0.16 and not text.startswith("JSON"):
        text = text[0].lower() + text[1:]
    elif kind < 0.24:
        text = text.rstrip(".?")
    elif kind < 0.30:
        text = source.choice(facts.OPENINGS) + text
    return text


def _filled(template: str, source: random.Random, **slots: object) -> str:
    if source.random() < TEMPLATE_ERRORS:
        template = mistyped(template, source, 1)
    text = template.format(**slots)
    return text if template.startswith("{") else _restyled(text, source)


def _from_template(templates: tuple[str, ...], source: random.Random, **slots: object) -> str:
    return _filled(source.choice(templates), source, **slots)


def arithmetic_question(task: ArithmeticTask, a: int, b: int, text: str, wording: str = "") -> Question:
    """Return the question `text` about `a` and `b`. The order of a sum does not change its split."""
    if task == "add":
        return Question(task, f"{min(a, b)} {max(a, b)}", text, f"{a} + {b} = {a + b}", wording)
    return Question(task, f"{a} {b}", text, f"{a} - {b} = {a - b}", wording)


def _arithmetic(task: ArithmeticTask, source: random.Random) -> Question:
    if source.random() < 0.06:
        a, b = sorted((source.randint(0, 20), source.randint(0, 20)), reverse=True)
        text = _filled(arithmetic.template(task, a, b, source), source, a=NUMBER_WORDS[a], b=NUMBER_WORDS[b])
        return arithmetic_question(task, a, b, text)
    a, b = arithmetic.operands(task, source)
    return arithmetic_question(task, a, b, _filled(arithmetic.template(task, a, b, source), source, a=a, b=b))


def table_question(task: tables.TableTask, a: int, b: int, text: str, wording: str = "") -> Question:
    """Return the question `text` about a product or quotient."""
    return Question(task, f"{a} {b}", text, tables.answer_of(task, a, b), wording)


def _table(task: tables.TableTask, source: random.Random) -> Question:
    a, b = tables.operands(task, source)
    shown: tuple[object, object] = (a, b)
    if max(a, b) <= 20 and source.random() < 0.1:
        shown = NUMBER_WORDS[a], NUMBER_WORDS[b]
    return table_question(task, a, b, _filled(tables.template(task, source), source, a=shown[0], b=shown[1]))


def _plain_word(source: random.Random, max_letters: int) -> str:
    """Draw a word that the tokenizer spells."""
    while True:
        word = any_word(source, max_letters)
        if word not in PHRASE_WORDS:
            return word


def _task_word(source: random.Random, max_letters: int) -> str:
    """Draw a word to spell; one in twenty-five is a phrase word."""
    return source.choice(_TASK_PHRASE_WORDS) if source.random() < 0.04 else _plain_word(source, max_letters)


def _shown(word: str, source: random.Random) -> str:
    return source.choices((word, f'"{word}"', f"'{word}'"), (0.7, 0.2, 0.1))[0]


def _reverse(source: random.Random) -> Question:
    word = _task_word(source, MAX_WORD_LETTERS)
    text = _from_template(WORD_TEMPLATES["reverse"], source, w=_shown(word, source))
    return Question("reverse", word, text, word[::-1])


def _sort(source: random.Random) -> Question:
    word = _task_word(source, MAX_SORTED_LETTERS)
    text = _from_template(WORD_TEMPLATES["sort"], source, w=_shown(word, source))
    return Question("sort", word, text, "".join(sorted(word)))


def _uppercase(source: random.Random) -> Question:
    word = _task_word(source, MAX_WORD_LETTERS + 2)
    text = _from_template(WORD_TEMPLATES["uppercase"], source, w=_shown(word, source))
    return Question("uppercase", word, text, word.upper())


def _count(source: random.Random) -> Question:
    """Draw a question to count letters. The answer spells the word and numbers the counted letters, which makes the result
    easy."""
    word = _task_word(source, MAX_COUNTED_LETTERS)
    shown = _shown(word, source)
    if source.random() < 0.25:
        spelled = " ".join(f"{letter}{place}" for place, letter in enumerate(word, 1))
        text = _from_template(COUNT_ALL_TEMPLATES, source, w=shown)
        return Question("count", word, text, f"{spelled}: the word has {len(word)} letters.")
    letter = source.choice(word) if source.random() < 0.85 else source.choice("abcdefghijklmnopqrstuvwxyz")
    num_seen = 0
    pieces = []
    for other in word:
        num_seen += other == letter
        pieces.append(f"{other}{num_seen}" if other == letter else other)
    text = _from_template(COUNT_LETTER_TEMPLATES, source, l=_shown(letter, source), w=shown)
    times = "time" if num_seen == 1 else "times"
    return Question("count", word, text, f"{' '.join(pieces)}: the letter {letter} appears {num_seen} {times}.")


def _json_value(source: random.Random) -> tuple[str, object]:
    """Draw a value: as text of the question, and as JSON."""
    kind = source.random()
    if kind < 0.45:
        number = arithmetic.even_operand(source)
        return str(number), number
    if kind < 0.55:
        truth = source.random() < 0.5
        return str(truth).lower(), truth
    word = _plain_word(source, 7)
    return source.choice((word, f'"{word}"')), word


def _joined(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]


def _json(source: random.Random) -> Question:
    kind = source.random()
    if kind < 0.25:
        shown, values = zip(*(_json_value(source) for _ in range(source.randint(2, 4))), strict=True)
        text = _from_template(JSON_LIST_TEMPLATES, source, items=_joined(list(shown)))
        result: object = list(values)
    elif kind < 0.40:
        name, age = _plain_word(source, 6), source.randint(1, 99)
        text = _from_template(JSON_PERSON_TEMPLATES, source, n=name, a=age)
        result = {"name": name, "age": age}
    elif kind < 0.60:
        name, age = _plain_word(source, 6), source.randint(1, 99)
        pairs = source.choice((f'name "{name}" and age {age}', f"name {name} and age {age}", f"name: {name}, age: {age}"))
        text = _from_template(JSON_OBJECT_TEMPLATES, source, pairs=pairs)
        result = {"name": name, "age": age}
    else:
        keys = source.sample(JSON_KEYS, source.randint(1, 3))
        shown, values = zip(*(_json_value(source) for _ in keys), strict=True)
        sign = source.choice((" ", " ", " = ", ": ", " set to "))
        pairs = _joined([f"{key}{sign}{value}" for key, value in zip(keys, shown, strict=True)])
        text = _from_template(JSON_OBJECT_TEMPLATES, source, pairs=pairs)
        result = dict(zip(keys, values, strict=True))
    answer = json.dumps(result)
    return Question("json", answer, text, answer)


def _tokamak(source: random.Random) -> Question:
    fact = source.choice(facts.TOKAMAK_FACTS)
    if source.random() < KEYWORDS_SHARE:
        keyword = source.choice(keywords.KEYWORDS[fact.topic].split("|"))
        core = _worded(source.choice(keywords.FRAMES), source, k=keyword)
    else:
        core = _worded(_framed(source.choice(fact.wordings), fact.topic, source), source)
    key = plain(core)
    if source.random() < REWORDED_SHARE and plain(other := reworded(core, source)) not in NEWCOMER_WORDINGS:
        core = other
    opening, closing = "", ""
    if source.random() < 0.4:
        opening, closing = source.choice(facts.OPENINGS), source.choice(facts.CLOSINGS)
        if closing and closing[1].islower():
            core = core.rstrip(".?!")
    text = typed(f"{opening}{core}{closing}", source, TYPING_ERRORS["tokamak"])
    return Question("tokamak", key, text, fact.answer, also_right=(small_talk.FALLBACK_ANSWER,))


def _framed(wording: str, topic: str, source: random.Random) -> str:
    """Return `wording`; if it begins with a verb or is short, sometimes with a question around it."""
    words = wording.split()
    if source.random() < 0.5 or topic in CHATTY_TOPICS or re.search("[({]", wording):
        return wording
    if words[0] in VERBS:
        return "{how} " + wording
    is_short = len(words) <= 4 and words[0] not in QUESTION_WORDS
    return source.choice(keywords.FRAMES).replace("{k}", wording) if is_short else wording


def _worded(pattern: str, source: random.Random, **slots: str) -> str:
    """Draw a text of `pattern` that is not in the examination of newcomers."""
    while True:
        text = expanded(pattern, source, facts.PARTS)
        for name, value in slots.items():
            text = text.replace(f"{{{name}}}", value)
        if plain(text) not in NEWCOMER_WORDINGS:
            return text
        pattern = source.choice((pattern, pattern + " please"))


def _small_talk(source: random.Random) -> Question:
    talk = source.choice(small_talk.SMALL_TALK)
    text = _worded(source.choice(talk.wordings), source)
    return Question("small talk", text, typed(text, source, TYPING_ERRORS["small talk"]), talk.answer)


def _topic(source: random.Random) -> str:
    kind = source.random()
    if kind < 0.6:
        return source.choice(small_talk.UNKNOWN_TOPICS)
    if kind < 0.8:
        return source.choice(("", "a ", "the ", "my ")) + source.choice(ENGLISH_WORDS)
    if kind < 0.9:
        return source.choice(ENGLISH_WORDS) + " " + source.choice(("and ", "")) + source.choice(ENGLISH_WORDS)
    return invented_word(source, 10).capitalize()


def _unknown(source: random.Random) -> Question:
    kind = source.random()
    if kind < 0.3:
        text = _worded(source.choice(small_talk.UNKNOWN_PLAIN_WORDINGS), source)
    elif kind < 0.5:  # like questions about Tokamak, with another subject
        frame = source.choice((*small_talk.UNKNOWN_FRAMES, *keywords.FRAMES))
        text = _worded(
            frame, source, k=source.choice(("", "the ", "my ", "a ")) + source.choice(ENGLISH_WORDS), t=_topic(source)
        )
    else:
        text = _worded(source.choice(small_talk.UNKNOWN_WORDINGS), source, t=_topic(source), t2=_topic(source))
    if source.random() < 0.1:
        text = source.choice(facts.OPENINGS) + text
    return Question("unknown", plain(text), typed(text, source, TYPING_ERRORS["unknown"]), small_talk.FALLBACK_ANSWER)


def _large(source: random.Random) -> Question:
    """Draw a calculation beyond the model's abilities."""
    numbers = {name: str(source.randint(1, 99)) for name in ("n", "m", "n2")}
    numbers |= {name: str(source.randint(1000, 10 ** source.randint(4, 9))) for name in ("big", "big2")}
    sign = source.choice(("+", "-", "*", "/", "plus", "minus", "times"))
    text = _worded(source.choice(small_talk.NUMBER_WORDINGS), source, sign=sign, **numbers)
    return Question("large", text, typed(text, source, TYPING_ERRORS["large"]), small_talk.TOO_LARGE_ANSWER)


def _foreign(source: random.Random) -> Question:
    text = foreign_text(source)
    return Question("foreign", text, text, ENGLISH_ONLY_ANSWER)


MAKERS: dict[str, Callable[[random.Random], Question]] = {
    "add": partial(_arithmetic, "add"),
    "subtract": partial(_arithmetic, "subtract"),
    "multiply": partial(_table, "multiply"),
    "divide": partial(_table, "divide"),
    "reverse": _reverse,
    "sort": _sort,
    "uppercase": _uppercase,
    "count": _count,
    "json": _json,
    "tokamak": _tokamak,
    "small talk": _small_talk,
    "unknown": _unknown,
    "large": _large,
    "foreign": _foreign,
}


def make_question(task: str, source: random.Random, split: Split) -> Question:
    """Draw a question of `task` in `split`. Those of `NEVER_HELD_OUT` are in both."""
    while True:
        question = MAKERS[task](source)
        if task in NEVER_HELD_OUT or is_held_out(task, question.key) == (split == "held_out"):
            return replace(question, thought=thought_of(question))


def thought_of(question: Question) -> str:
    """Return the model's reasoning before the answer to `question`."""
    return THOUGHTS[question.task].format(*question.key.split(), spelled=" ".join(question.key))


def training_equations(seed: int) -> Iterator[str]:
    """Yield endless lines such as "12 + 345 = 357": much arithmetic in few tokens.

    More of them are subtractions, the harder task.
    """
    source = random.Random(f"equations {seed}")
    tasks = (*ARITHMETIC_TASKS, "multiply", "divide")
    while True:
        task = source.choices(tasks, (0.22, 0.28, 0.27, 0.23))[0]
        question = make_question(task, source, "train")
        if " = " not in question.answer:
            continue
        yield question.answer + "\n"


def training_openings(seed: int, declined_share: float = 0.0) -> Iterator[Question]:
    """Yield endless questions of `UNDERSTOOD_TASKS`."""
    source = random.Random(f"openings {seed}")
    while True:
        (task,) = source.choices(list(UNDERSTOOD_TASKS), list(UNDERSTOOD_TASKS.values()))
        yield sometimes_declined(make_question(task, source, "train"), source, declined_share)


def sometimes_declined(question: Question, source: random.Random, share: float) -> Question:
    """Return `question`; if its answer is a fact, declined in `share` of the cases.

    A model trained with this declines greedily if it is less certain than `share / (1 - share)`.
    """
    if not share or question.task != "tokamak" or source.random() >= share:
        return question
    return replace(question, answer=small_talk.FALLBACK_ANSWER, thought=THOUGHTS["unknown"])


def held_out_questions(tasks: tuple[str, ...], count: int, seed: int = 0) -> list[Question]:
    """Return `count` different held-out questions, spread evenly over `tasks`."""
    source = random.Random(f"held out {seed}")
    return different(lambda number: make_question(tasks[number % len(tasks)], source, "held_out"), count)


def held_out_arithmetic(wordings: Phrases, draw: Draw, count: int, seed: int = 0) -> list[Question]:
    """Return `count` different held-out sums and differences, spread evenly over tasks and `wordings`.

    `draw` returns the operands.
    """
    source = random.Random(f"held out arithmetic {seed}")

    def make(number: int) -> Question:
        task, place = ARITHMETIC_TASKS[number % 2], number // 2
        wording = wordings[task][place % len(wordings[task])]
        while True:
            a, b = draw(task, source)
            question = arithmetic_question(task, a, b, wording.format(a=a, b=b), wording)
            if is_held_out(task, question.key):
                return question

    return different(make, count)


def different(make: Callable[[int], Question], count: int) -> list[Question]:
    """Return `count` questions with different subjects; `make` gets the number of earlier ones."""
    questions: dict[tuple[str, str], Question] = {}
    while len(questions) < count:
        question = make(len(questions))
        questions.setdefault((question.task, question.key), question)
    return list(questions.values())


def is_correct(question: Question, reply: str) -> bool:
    """Return whether `reply` is right, with some tolerance in form.

    Sums and counts compare the last number of the reply, JSON the parsed value; words ignore quotes and full stops around them,
    and text ignores white space.
    """
    reply = reply.strip()
    if reply in question.also_right:
        return True
    if question.task in (*ARITHMETIC_TASKS, "count", *tables.SIGNS) and " is not " not in question.answer:
        numbers = re.findall(r"-?\d+", reply)
        return bool(numbers) and numbers[-1] == re.findall(r"-?\d+", question.answer)[-1]
    if question.call:
        return _is_call(question.call, reply)
    if question.task == "json":
        try:
            return json.dumps(json.loads(reply)) == question.answer
        except ValueError:
            return False
    if question.task in ("reverse", "sort", "uppercase"):
        return reply.strip("\"'.") == question.answer
    return reply.split() == question.answer.split()


def _is_call(call: calls.Call, reply: str) -> bool:
    """Return whether `reply` is exactly this call, with arguments in any order."""
    body = reply.removeprefix("<tool_call>").removesuffix("</tool_call>")
    try:
        return len(body) == len(reply) - 23 and bool(json.loads(body) == {"name": call.name, "arguments": call.arguments})
    except ValueError:
        return False
