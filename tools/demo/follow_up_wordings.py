"""Wordings of follow-up questions. Called by `follow_ups.py`, and by `data.py` for the vocabulary."""

OTHER_NUMBER = (
    *(
        "and {b}?",
        "And {b}?",
        "what about {b}?",
        "What about {b}?",
        "and with {b}?",
        "and {b}",
        "how about {b}?",
        "And with {b}?",
    ),
    *("the same with {b}", "now with {b}", "and for {b}?"),
)
"""The last question with another second number."""
GOING_ON = {
    "add": (
        *(
            "plus {b}",
            "and plus {b}?",
            "Now add {b}.",
            "add {b}",
            "What about plus {b}?",
            "+ {b}",
            "and + {b}?",
            "Add {b} to that.",
        ),
        *("and add {b}", "then add {b}", "plus {b}?", "and {b} more?"),
    ),
    "subtract": (
        *(
            "minus {b}",
            "and minus {b}?",
            "Now subtract {b}.",
            "subtract {b}",
            "What about minus {b}?",
            "- {b}",
            "Take away {b}.",
        ),
        *("and subtract {b}", "then subtract {b}", "minus {b}?", "and {b} less?", "Subtract {b} from that."),
    ),
    "multiply": (
        *("times {b}", "and times {b}?", "what about times {b}?", "What about times {b}?", "Now multiply it by {b}.", "* {b}"),
        *("and now times {b}", "times {b}?", "multiply that by {b}", "and multiplied by {b}?", "x {b}"),
    ),
    "divide": (
        *(
            "divided by {b}",
            "and divided by {b}?",
            "what about divided by {b}?",
            "Now divide it by {b}.",
            "/ {b}",
            "divide that by {b}",
        ),
        *("and now divided by {b}?", "divided by {b}?"),
    ),
}
"""The last result and another number."""
DOUBLED = ("double it", "Now double that.", "and double that?", "twice that", "and twice that?", "Double it please")
HALVED = ("half of it", "and half of that?", "Now halve it.", "What is half of that?", "and half of it?")
OTHER_WORD = (
    *(
        "and {w}?",
        "And {w}?",
        "what about {w}?",
        "What about {w}?",
        "now {w}",
        "Now {w}",
        "and {w}",
        "the same with {w}",
        "and for {w}?",
    ),
    *("how about {w}?", "Now do {w}", "And the word {w}?"),
)


def phrase_texts() -> list[str]:
    """Return every wording, for the vocabulary."""
    return [*OTHER_NUMBER, *DOUBLED, *HALVED, *OTHER_WORD, *(text for texts in GOING_ON.values() for text in texts)]
