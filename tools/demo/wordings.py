"""Variants of questions: expanded patterns, typing errors, styles. Called by `data.py` and `newcomers.py`.

A pattern such as `What{is} the port(|?)` represents several texts: `(a|b)` is either, `{is}` one of `facts.PARTS["is"]`, and
"`?" a backtick or nothing.
"""

import random
import re
from collections.abc import Mapping, Sequence

_CHOICE = re.compile(r"\(([^()]*\|[^()]*)\)")
_PART = re.compile(r"\{(\w+)\}")
_WORD = re.compile(r"\{\w*\}|[A-Za-z]+(?:'[a-z]+)?")
_KEY_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_NEIGHBOURS = {
    key: [row[place] for place in (index - 1, index + 1) if 0 <= place < len(row)]
    for row in _KEY_ROWS
    for index, key in enumerate(row)
}
_LIGHT = frozenset(
    [
        "a",
        "an",
        "the",
        "i",
        "do",
        "does",
        "can",
        "to",
        "is",
        "are",
        "it",
        "you",
        "me",
        "my",
        "your",
        "of",
        "in",
        "on",
        "for",
        "please",
        "tell",
        "how",
        "what",
        "with",
        "and",
        "some",
    ]
)
_FILLERS = (
    *(
        "actually",
        "just",
        "please",
        "really",
        "exactly",
        "maybe",
        "now",
        "here",
        "well",
        "also",
        "again",
        "quickly",
        "simply",
        "then",
    ),
    *("properly", "always", "still", "even", "somehow", "myself", "basically", "ever", "currently", "today"),
)
_SYNONYMS = {
    "stop": ("end", "quit", "halt", "kill", "shut down"),
    "start": ("launch", "run", "begin", "bring up"),
    "show": ("display", "print", "give"),
    "see": ("view", "look at", "find", "check"),
    "use": ("try", "work with", "employ", "have"),
    "get": ("have", "receive", "obtain", "see"),
    "set": ("change", "choose", "configure", "define", "give"),
    "change": ("set", "switch", "modify", "adjust", "alter", "edit"),
    "run": ("start", "launch", "execute", "use"),
    "server": ("engine", "program", "service", "thing", "app", "system"),
    "engine": ("server", "program", "system"),
    "command": ("instruction", "call", "order"),
    "need": ("require", "want", "have to have"),
    "want": ("need", "like", "wish"),
    "support": ("handle", "do", "offer", "know", "work with"),
    "make": ("get", "have", "do", "create"),
    "big": ("large", "huge"),
    "large": ("big", "huge"),
    "model": ("LLM", "network", "AI"),
    "machine": ("computer", "box", "host", "PC"),
    "computer": ("machine", "PC", "laptop"),
    "fast": ("quick", "speedy"),
    "picture": ("image", "photo"),
    "image": ("picture", "photo"),
    "question": ("request", "thing"),
    "answer": ("reply", "response", "output", "text"),
    "answers": ("replies", "responses", "outputs"),
    "happens": ("goes on", "occurs"),
    "explain": ("describe", "tell me", "clarify"),
    "tell": ("say", "explain to", "show"),
    "kind": ("type", "sort"),
    "possible": ("allowed", "available", "okay"),
    "find": ("see", "get", "look up", "locate"),
    "dies": ("crashes", "fails", "stops", "ends"),
    "crash": ("failure", "death"),
    "hangs": ("freezes", "is stuck"),
    "can": ("could", "may"),
    "how": ("in which way", "how exactly"),
    "where": ("in what place", "at what place"),
    "what": ("which", "what"),
    "why": ("how come", "for what reason"),
    "my": ("our", "the", "this"),
    "this": ("that", "the"),
    "it": ("this", "that", "Tokamak"),
    "several": ("many", "multiple", "more"),
    "many": ("several", "a lot of", "multiple"),
    "request": ("query", "call", "prompt"),
    "turn": ("switch", "put"),
    "load": ("use", "read", "open"),
    "delete": ("remove", "erase"),
    "write": ("log", "store", "save"),
    "enable": ("activate", "turn on", "switch on"),
    "disable": ("deactivate", "turn off"),
    "limit": ("restrict", "bound"),
    "measure": ("test", "check"),
    "list": ("show", "name", "enumerate"),
    "cancel": ("abort", "interrupt"),
    "there": ("available", "around"),
}
_SHORT = {
    "you": "u",
    "are": "r",
    "please": "pls",
    "what": "wat",
    "your": "ur",
    "to": "2",
    "thanks": "thx",
    "because": "cuz",
    "for": "4",
    "and": "n",
    "is": "iz",
    "people": "ppl",
    "with": "w/",
    "the": "teh",
    "how": "hwo",
    "what's": "whats",
    "don't": "dont",
    "can't": "cant",
    "doesn't": "doesnt",
    "i'm": "im",
    "it's": "its",
}


def expanded(pattern: str, source: random.Random, parts: Mapping[str, Sequence[str]]) -> str:
    """Draw one of the texts of `pattern`. Slots that are not in `parts` stay."""
    text = pattern.replace("`?", source.choice(("`", "", "")))
    while True:
        text, num_choices = _CHOICE.subn(lambda match: source.choice(match[1].split("|")), text)
        text, num_parts = _PART.subn(lambda match: source.choice(parts[match[1]]) if match[1] in parts else match[0], text)
        if not num_choices and (not num_parts or not any(name in parts for name in _PART.findall(text))):
            return " ".join(text.split())


def _wrong(word: str, source: random.Random) -> str:
    """Return the word with one typing error."""
    if word.lower() in _SHORT and source.random() < 0.5:
        return _SHORT[word.lower()]
    if "'" in word:
        return word.replace("'", "")
    if len(word) < 3:
        return word
    place = source.randrange(1, len(word))
    kind = source.random()
    if kind < 0.3:
        return word[: place - 1] + word[place] + word[place - 1] + word[place + 1 :]
    if kind < 0.6:
        return word[:place] + word[place + 1 :]
    if kind < 0.75:
        return word[:place] + word[place] + word[place:]
    near = source.choice(_NEIGHBOURS[word[place].lower()])
    return word[:place] + near + word[place + (kind < 0.9) :]


def mistyped(text: str, source: random.Random, num_errors: int) -> str:
    """Return `text` with typing errors in up to `num_errors` of its words; slots in braces and backticked commands stay."""
    commands = [match.span() for match in re.finditer(r"`[^`]*`", text)]
    words = [
        match
        for match in _WORD.finditer(text)
        if match[0][0] != "{" and not any(start <= match.start() < end for start, end in commands)
    ]
    chosen = source.sample(words, min(num_errors, len(words)))
    for match in sorted(chosen, key=lambda match: -match.start()):
        text = text[: match.start()] + _wrong(match[0], source) + text[match.end() :]
    return text


def reworded(text: str, source: random.Random) -> str:
    """Return `text` with an unimportant word removed or added, or a synonym of `_SYNONYMS`."""
    words = text.split(" ")
    for _ in range(source.choice((1, 1, 2))):
        place = source.randrange(len(words))
        kind = source.random()
        if kind < 0.45:
            known = [index for index, word in enumerate(words) if word.lower().strip("?.!,") in _SYNONYMS]
            if known:
                place = source.choice(known)
                plain = words[place].lower().strip("?.!,")
                words[place] = words[place].lower().replace(plain, source.choice(_SYNONYMS[plain]))
        elif kind < 0.75:
            light = [index for index, word in enumerate(words) if word.lower() in _LIGHT]
            if light and len(words) > 2:
                del words[source.choice(light)]
        else:
            words.insert(place, source.choice(_FILLERS))
    return " ".join(words)


def typed(text: str, source: random.Random, share_of_errors: float) -> str:
    """Return `text` as typed hastily: `share_of_errors` have one or two typing errors; some are in lower or upper case, or lack
    punctuation."""
    if source.random() < share_of_errors:
        text = mistyped(text, source, source.choice((1, 1, 1, 2)))
    kind = source.random()
    if kind < 0.3:
        text = re.sub(r"\{\w+\}|[A-Z]", lambda match: match[0] if match[0][0] == "{" else match[0].lower(), text)
    elif kind < 0.33 and "{" not in text and "`" not in text:
        text = text.upper()
    kind = source.random()
    if kind < 0.25:
        text = text.rstrip(".?!") or text
    elif kind < 0.29:
        text += source.choice(("?", "!", "??", "...", " ?", "."))
    return text
