"""Fact of the demonstration model, with all wordings of its questions. Called by `facts.py` and `small_talk.py`."""

from dataclasses import dataclass

from tools.demo.phrasings import PHRASINGS

ENGLISH_ONLY_ANSWER = "I am a toy and understand only plain English. Try: What is 12 + 345? Or ask: What can you do?"


@dataclass(frozen=True, slots=True)
class Fact:
    """A topic, its answer, and patterns of questions for it."""

    topic: str
    answer: str
    wordings: tuple[str, ...]


def fact(topic: str, answer: str, *wordings: str) -> Fact:
    return Fact(topic, answer, (*wordings, *PHRASINGS.get(topic, ())))
