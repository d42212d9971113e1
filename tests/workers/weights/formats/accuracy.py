"""Log-probability errors of the embedded model under a precision, against its own float32 weights.

Used by `precision.py` (the table) and `test_accuracy.py` (its bounds). The text is what the model was made for, conversations
of the kind it was trained on; the tokens of its answers count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from engine.messages import SamplingParams
from tests.engine.tokenizer.vocabularies import vocabulary_of
from tests.workers.serving import ServedSequence, Serving, make_runner
from tests.workers.weights.formats.quantizers import DEMO
from tools.demo.conversations import training_conversations

Conversation = tuple[list[int], list[int]]  # token ids, and the places of those that the model has to say
WEIGHTS_ALONE = {"ops": "reference", "plan": "eager"}  # everything float32 once it is loaded


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of log-probabilities; `perplexity` is relative to the exact one, less 1."""

    mean: float
    largest: float
    perplexity: float

    @staticmethod
    def of(found: np.ndarray, exact: np.ndarray) -> Errors:
        errors = np.abs(found - exact)
        return Errors(float(errors.mean()), float(errors.max()), math.exp(exact.mean() - found.mean()) - 1)


def conversations_of(count: int) -> list[Conversation]:
    vocabulary = vocabulary_of(DEMO)
    found = []
    without_tools = (conversation for conversation in training_conversations(seed=987654321) if not conversation.tools)
    for conversation in islice(without_tools, count):
        token_ids: list[int] = []
        places: list[int] = []
        for message in conversation.messages:
            token_ids += vocabulary.encode(f"<|im_start|>{message['role']}\n", False)
            content = vocabulary.encode(f"{message['content']}<|im_end|>", False)
            if message["role"] == "assistant":
                places += range(len(token_ids), len(token_ids) + len(content))
            token_ids += [*content, *vocabulary.encode("\n", False)]
        found.append((token_ids, places))
    return found


def logprobs_of(path: Path, conversations: list[Conversation], **options: Any) -> np.ndarray:
    """Return the log-probability of every token that counts, by a runner with these options."""
    serving = Serving(make_runner(path, **options))
    found = []
    for token_ids, places in conversations:
        serving.next_block = 1
        sequence = ServedSequence(token_ids, SamplingParams(temperature=0.0, num_prompt_logprobs=0), num_outputs=1)
        serving.place(sequence, 0)
        serving.run([sequence])
        found += [sequence.prompt_logprobs[place] for place in places]
    return np.array(found)
