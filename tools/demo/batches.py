"""Batches of training text: rows of conversations, padded with equations. Called by `train.py`.

A batch depends only on the seed and its step, so that training can continue from any step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo import data
from tools.demo.conversations import training_choices, training_conversations
from tools.demo.template import prompt_of, rendered
from tools.demo.vocabulary import THINK, TURN_END, TURN_START

IGNORED = -100
NUM_OPENING_TOKENS = 10
NUM_WAITING = 4
"""Number of conversations from which a row picks one that fits."""
Text = tuple[list[int], list[int]]
"""Tokens, and for each the target token or `IGNORED`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows: tokens, the target of each (or `IGNORED`), and the number of its text."""

    token_ids: Tensor
    targets: Tensor
    texts: Tensor

    def mask(self) -> Tensor:
        """Mask [rows, 1, queries, keys]: a token sees only its own text."""
        same = self.texts[:, None, :, None] == self.texts[:, None, None, :]
        return same & torch.ones(same.shape[2:], dtype=torch.bool).tril()

    def parts(self, num_parts: int) -> Iterator["Batch"]:
        """Split the rows evenly."""
        parts = (tensor.chunk(num_parts) for tensor in (self.token_ids, self.targets, self.texts))
        return (Batch(*tensors) for tensors in zip(*parts, strict=True))


def _conversations(tokenizer: Tokenizer, seed: int, mixture: "Mixture") -> Iterator[Text]:
    turn_start, turn_end = tokenizer.token_to_id(TURN_START), tokenizer.token_to_id(TURN_END)
    assistant, think = tokenizer.token_to_id("assistant"), tokenizer.token_to_id(THINK)
    for conversation in training_conversations(seed, mixture.tools_share, mixture.declined_share):
        token_ids = tokenizer.encode(rendered(conversation)).ids
        targets = [IGNORED] * len(token_ids)
        is_answer = False
        for place in range(2, len(token_ids) - 1):
            begins = token_ids[place - 2] == turn_start and token_ids[place - 1] == assistant
            is_answer |= (begins and token_ids[place + 1] != think) or token_ids[place - 1] == think
            if is_answer:
                targets[place] = token_ids[place + 1]
                is_answer = token_ids[place + 1] != turn_end
        yield token_ids, targets


def _equations(tokenizer: Tokenizer, seed: int) -> Iterator[Text]:
    """Equations, one per line; targets are the result and the end."""
    (equals,) = tokenizer.encode(" =").ids
    for equation in data.training_equations(seed):
        token_ids = tokenizer.encode(equation).ids
        result = token_ids.index(equals)
        yield token_ids, [IGNORED] * result + token_ids[result + 1 :] + [IGNORED]


def _openings(tokenizer: Tokenizer, seed: int, mixture: "Mixture") -> Iterator[Text]:
    """Questions and the first tokens of their answers, which show what was understood: many questions in few tokens."""
    for question in data.training_openings(seed, mixture.declined_share):
        asked = tokenizer.encode(prompt_of(question.messages())).ids
        wanted = tokenizer.encode(f"{question.answer}{TURN_END}").ids[:NUM_OPENING_TOKENS]
        yield asked + wanted, [IGNORED] * (len(asked) - 1) + [*wanted, IGNORED]


def _choices(tokenizer: Tokenizer, seed: int) -> Iterator[Text]:
    """Tools, and the beginning of a call after each question; the target is the name."""
    for tools, questions in training_choices(seed):
        token_ids = tokenizer.encode(prompt_of([{"role": "user", "content": ""}], tools).partition(TURN_END)[0]).ids
        targets = [IGNORED] * len(token_ids)
        for text, name in questions:
            asked, wanted = (tokenizer.encode(part).ids for part in (f'\n{text}\n{{"name": "', f'{name}",'))
            token_ids += [*asked, *wanted]
            targets += [IGNORED] * (len(asked) - 1) + wanted + [IGNORED]
        yield token_ids, targets


@dataclass(frozen=True, slots=True)
class Mixture:
    """Mixture of a batch. `chat_share` of a row is conversations, `tools_share` of them with tools. Then come openings of
    answers up to `openings_share` of the row, and choices of tools up to `choices_share`. `declined_share` of the questions
    about facts and small talk are declined."""

    num_rows: int
    row_tokens: int
    chat_share: float
    tools_share: float
    openings_share: float
    choices_share: float
    declined_share: float


def training_batch(tokenizer: Tokenizer, seed: int, step: int, mixture: Mixture) -> Batch:
    """Return the batch of `step`. In a row, each conversation is a separate text, and the equations are one text.

    A row takes conversations up to their share, each time the first of the next few that fits, then openings, choices, and
    equations.
    """
    row_tokens = mixture.row_tokens
    conversations = _conversations(tokenizer, 1_000_000 * seed + step, mixture)
    equations = _equations(tokenizer, 1_000_000 * seed + step)
    openings = _openings(tokenizer, 1_000_000 * seed + step, mixture)
    choices = _choices(tokenizer, 1_000_000 * seed + step)
    waiting = list(islice(conversations, NUM_WAITING))
    rows = []
    for _ in range(mixture.num_rows):
        row: list[tuple[int, int, int]] = []
        number = 0
        while len(row) < row_tokens * mixture.chat_share:
            num_left = row_tokens - len(row)
            fitting = (place for place, (token_ids, _) in enumerate(waiting) if not row or len(token_ids) <= num_left)
            if (place := next(fitting, None)) is None:
                break
            row += zip(*waiting.pop(place), repeat(number))
            waiting.append(next(conversations))
            number += 1
        while len(row) < row_tokens * mixture.openings_share:
            row += zip(*next(openings), repeat(number))
            number += 1
        while len(row) < row_tokens * mixture.choices_share:
            row += zip(*next(choices), repeat(number))
            number += 1
        while len(row) < row_tokens:
            row += zip(*next(equations), repeat(number))
        rows.append(row[:row_tokens])
    return Batch(*torch.tensor(rows).unbind(dim=2))
