"""Facts that the demonstration model knows about itself and Tokamak.

Called by `data.py`. A fact is a topic, a true answer and the ways to ask for it (`fact.py`). The facts are in
`identity_facts.py`, `serving_facts.py`, `operation_facts.py` and `feature_facts.py`. When Tokamak changes, change the answer
there and train again; `tests/tools/test_demo_facts.py` compares the answers with the product. `(one|two)` in a wording means
either, `{how}` one of `PARTS["how"]`; `wordings.py` expands both.
"""

from tools.demo.feature_facts import FEATURE_FACTS
from tools.demo.identity_facts import IDENTITY_FACTS
from tools.demo.operation_facts import OPERATION_FACTS
from tools.demo.serving_facts import SERVING_FACTS

PARTS = {
    "how": (
        *("How do I", "How do I", "How can I", "How can I", "How to", "How do you", "How would I", "How should I", "How do we"),
        *("What do I do to", "What is the way to", "What is the command to", "Which command do I need to", "I want to"),
        *("I need to", "I would like to", "Tell me how to", "Show me how to", "Explain how to", "Can you tell me how to"),
        *("Is there a way to", "Is it possible to", "Can I", "What must I do to", "What command do I use to", "Help me to"),
        *("What do I type to", "How exactly do I", "How am I supposed to", "What should I type to", "I cannot find out how to"),
        *("Any idea how to", "Is there any way to", "How might I", "What do I have to do to", "What can I do to", "Could I"),
        *("I would love to", "I'd like to", "Which steps do I need to", "What's the right way to", "May I", "Am I able to"),
        *("How does one", "I am trying to", "What is the best way to", "Please explain how to", "Where can I", "What lets me"),
    ),
    "server": ("the server", "the server", "Tokamak", "the engine", "you", "it", "this", "this server", "the program"),
    "is": (" is", " is", "'s", "s"),
    "model": ("a model", "my model", "my own model", "another model", "a different model", "a bigger model", "a real model"),
}

OPENINGS = (
    "",
    "",
    "",
    "Please tell me: ",
    "Can you tell me: ",
    "Hi! ",
    "Hello! ",
    "Hey, ",
    "A question: ",
    "Quick question: ",
    "I would like to know: ",
    "Excuse me, ",
    "Ok, ",
    "Sorry, ",
    "Um, ",
    "Hi, I am new here. ",
    *("so ", "and ", "but ", "ok, ", "hey ", "hi, ", "pls ", "well, ", "also, ", "and now: ", "next question: "),
    *("my boss asks: ", "for my project: ", "one thing: ", "just wondering, ", "tell me, ", "say, ", "as a beginner, "),
    *("I am at work, ", "i tried everything, ", "hmm, ", "maybe you know, ", "it is late, ", "oh, ", "yes but ", "thanks, "),
)
CLOSINGS = (
    "",
    "",
    "",
    "",
    " Thanks!",
    " Please be brief.",
    " Thank you.",
    " I am new here.",
    " please",
    " for me",
    " now",
    " here",
    " thanks",
)

TOKAMAK_FACTS = (*IDENTITY_FACTS, *SERVING_FACTS, *OPERATION_FACTS, *FEATURE_FACTS)
"""Approximately in the order of the manual."""
