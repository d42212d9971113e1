"""Questions for which the demonstration model calls a tool, the tools, their results, and the answers after these.

Called by `data.py`. Tools are combined from a verb, a noun and argument names, and questions use the nouns, so that the model
learns to copy unseen names and values: words of tools, arguments and values belong to one split only (verbs and numbers to
both).
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.demo.words import ENGLISH_WORDS, invented_word, scrambled_word

Json = dict[str, Any]
Draw = Callable[[tuple[str, ...]], str]
"""Draws a word of a split, from these or another one."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of lengths 0, 1, 2, ... of lists of tools, and of arguments."""

    tools: tuple[float, ...]
    arguments: tuple[float, ...]
    described: float
    """Share of tools with a description without arguments that only the description identifies."""


EXAMINED = Shares(tools=(0.0, 0.5, 0.32, 0.18), arguments=(0.12, 0.52, 0.28, 0.08), described=0.1)
TRAINED = Shares(tools=(0.0, 0.2, 0.35, 0.45), arguments=(0.1, 0.4, 0.3, 0.2), described=0.25)
"""More of the hard cases: choosing among several, and the third argument."""
CHOSEN_AMONG = Shares(tools=(0.0, 0.0, 0.2, 0.3, 0.3, 0.2), arguments=(0.4, 0.4, 0.15, 0.05), described=0.25)
"""For training of the choice only."""

ASKING_VERBS = ("get", "find", "show", "check", "search", "list", "fetch", "read")
ACTING_VERBS = ("book", "send", "create", "order", "play", "open", "set", "start", "stop", "add", "update", "delete", "make")
SUFFIXES = ("lookup", "search", "info", "tool")
NOUNS = tuple(
    """
    weather forecast temperature time date news price stock population capital distance route traffic address phone recipe
    calories movie song album artist book author flight hotel room table ticket train bus invoice customer employee salary
    balance account payment product rating review event meeting calendar reminder alarm timer light lamp door email message
    file folder document page website user profile score team match player currency rate tax discount parcel delivery package
    schedule lesson grade exam course definition synonym translation rhyme patient doctor medicine symptom planet moonrise
    sunrise tide wind humidity altitude battery signal password server status log ticker dividend loan insurance policy claim
    """.split()  # noqa: SIM905 (as in words.py)
)
ARGUMENTS = tuple(
    """
    location place country region state street person customer date day days month hours minutes amount limit number text query
    topic subject recipient sender email phone message language currency symbol path file folder genre artist author brand
    model quantity guests nights room seat floor temperature speed distance radius category department team player season grade
    priority reason comment format mode source destination origin target start end length width height volume
    """.split()  # noqa: SIM905
)
NAMES = tuple(
    """
    Paris London Berlin Rome Madrid Oslo Tokyo Boston Chicago Dublin Vienna Prague Lisbon Athens Cairo Lima Delhi Seoul Sydney
    Toronto Moscow Warsaw Geneva Zurich Munich Hamburg Milan Naples Porto Bergen Denver Dallas Seattle Austin Miami Houston
    France Germany Spain Italy Norway Japan Brazil Canada Egypt India China Kenya Peru Chile Greece Poland Sweden Finland
    Alice Bob Carol David Emma Frank Grace Henry Ivan Julia Karen Laura Maria Nina Oscar Peter Quinn Robert Sarah Thomas Ursula
    Victor Walter Xavier Yvonne Zoe Anna Ben Clara Daniel Eva Felix Google Apple Tesla Amazon Intel
    """.split()  # noqa: SIM905
)
RESULT_KEYS = (*ARGUMENTS, *NOUNS)
UNSEEN_WORDS = {
    NOUNS: tuple(
        """
        horoscope pollen snowfall earthquake volcano constellation satellite glossary proverb riddle anthem playlist podcast
        soundtrack trailer festival exhibition concert theatre stadium marathon workout nutrition vitamin allergy vaccine
        dentist prescription passport visa luggage taxi parking mortgage pension voucher coupon receipt
        refund warranty shipment warehouse inventory barcode thermostat sprinkler doorbell webcam printer firmware backup
        certificate webhook pipeline deployment incident roster vacation payroll candidate interview
        """.split()  # noqa: SIM905 (as in words.py)
    ),
    ARGUMENTS: tuple(
        """
        airport avenue district province suburb zipcode latitude longitude passenger visitor owner tenant student teacher pupil
        chapter paragraph keyword hashtag nickname username surname birthday weekday decade century deadline duration interval
        budget deposit exchange quota capacity depth thickness voltage wattage pressure
        gender dialect alphabet cuisine flavour ingredient vegetable beverage fabric material texture pattern angle margin
        """.split()  # noqa: SIM905 (as in words.py)
    ),
    NAMES: tuple(
        """
        Helsinki Stockholm Budapest Brussels Bucharest Sofia Belgrade Zagreb Istanbul Ankara Beirut Nairobi Lagos Accra Tunis
        Karachi Mumbai Kolkata Bangkok Hanoi Manila Jakarta Osaka Kyoto Nagoya Brisbane Perth Auckland Quito Bogota Caracas
        Montreal Ottawa Calgary Phoenix Atlanta Orlando Portland Detroit Memphis Nashville Gustavo Hannah Ingrid Jasper Kevin
        Leonard Monica Nathan Olivia Patrick Rachel Samuel Teresa Vincent Wendy Adrian Beatrice Cedric Doris Edgar Fiona
        """.split()  # noqa: SIM905 (as in words.py)
    ),
}
UNSEEN_WORDS[RESULT_KEYS] = (*UNSEEN_WORDS[ARGUMENTS], *UNSEEN_WORDS[NOUNS])
"""Words of held-out questions instead of those above, since the hash gives them too few."""
CHOICES = (
    *(("celsius", "fahrenheit"), ("metric", "imperial"), ("low", "high"), ("low", "medium", "high"), ("short", "long")),
    *(("asc", "desc"), ("small", "medium", "large"), ("red", "green", "blue"), ("json", "csv"), ("on", "off")),
)
PREPOSITIONS = ("in", "of", "for", "at", "on")

ASKED = (
    *("What is the {n} {p} {v}?", "What's the {n} {p} {v}?", "What is the {n} like {p} {v}?", "Tell me the {n} {p} {v}."),
    *("What's the {n} like {p} {v} today?", "How is the {n} {p} {v}?", "Show me the {n} {p} {v}.", "Show the {n} {p} {v}."),
    *("Get the {n} {p} {v}.", "Get {n} {p} {v}", "I need the {n} {p} {v}.", "Give me the {n} {p} {v}.", "{n} {p} {v}"),
    *("Which {n} does {v} have?", "Do you know the {n} {p} {v}?", "Please look up the {n} {p} {v}.", "Look up {n} {p} {v}."),
    *("Find the {n} {p} {v}.", "Check the {n} {p} {v}.", "Can you tell me the {n} {p} {v}?", "{n} {v}"),
    *("Can you find the {n} {p} {v}?", "Can you check the {n} {p} {v}?", "What is the {n} {p} {v} right now?"),
)
ASKED_PLAINLY = (
    *("What is the {n}?", "What's the {n}?", "Show me the {n}.", "Tell me the {n}.", "Get the {n}.", "Check the {n}."),
    *("Show the {n}", "I need the {n}.", "What is the {n} now?", "Can you check the {n}?"),
)
ORDERED = (
    *("{V} a {n} {p} {v}.", "{V} the {n} {p} {v}.", "{V} {n} {p} {v}", "{V} {n} {v}", "Please {w} a {n} {p} {v}."),
    *("Can you {w} a {n} {p} {v}?", "Can you {w} the {n} {p} {v}?", "I want to {w} a {n} {p} {v}.", "{V} the {n} {v}."),
)
ORDERED_PLAINLY = (
    *("{V} a {n}.", "{V} the {n}.", "Please {w} the {n}.", "Can you {w} a {n}?", "{V} {n}", "I want to {w} a {n}."),
    *("{V} the {n} now.", "Could you {w} the {n}?"),
)
NAMED = (
    " with {a} {v}",
    ", {a} {v}",
    " where {a} is {v}",
    ", {a}: {v}",
    " with {a} = {v}",
    " and {a} {v}",
    " with the {a} {v}",
)
COUNTED = (" for {v} {a}", " with {v} {a}", ", {v} {a}")
CHOSEN = (" in {v}", " as {v}", ", {v}", " with {a} {v}")
DESCRIPTIONS = (
    *(
        "Get the {n} of a {a}.",
        "Get the {n} for a given {a}.",
        "Get the current {n} in a given {a}",
        "Returns the {n} of a {a}.",
    ),
    *("{V} the {n}.", "{V} a {n}", "{V} the {n} by {a}.", "The {n} of a {a}", "{V} {n} by {a}", "{V} the {n} of the user."),
)
SENTENCES = ("The {0} in {1} is {2}.", "It is {2} in {1}.", "{1} has a {0}.", "There is no {0}.", "The {0} is {2} today.")
"""A tool's result may be a whole sentence."""

FAMILIAR: tuple[tuple[tuple[str, ...], tuple[str, ...], str, tuple[str, ...]], ...] = (
    (
        ("get_weather", "weather", "get_current_weather"),
        ("city", "location", "place"),
        "Get the current weather in a given location",
        (
            *("Is it raining in {v}?", "Will it rain in {v}?", "How warm is it in {v}?", "How is the weather in {v} today?"),
            *(
                "What is the weather like in {v}?",
                "What's the weather in {v}?",
                "Do I need an umbrella in {v}?",
                "Weather in {v}?",
            ),
        ),
    ),
    (
        ("get_time", "get_current_time", "time"),
        ("city", "timezone", "location"),
        "Get the current time in a city.",
        ("What time is it in {v}?", "What's the time in {v}?", "Tell me the time in {v}.", "How late is it in {v}?"),
    ),
    (
        ("search", "web_search", "search_web"),
        ("query", "text", "q"),
        "Search the web.",
        ("Search for {q}.", "Search the web for {q}.", "Look up {q}.", "Find pages about {q}.", "Search {q}"),
    ),
    (
        ("read_file", "open_file", "read"),
        ("path", "file", "name"),
        "Read a file.",
        ("Read the file {f}.", "Read {f}.", "What is in {f}?", "Show me {f}.", "Open the file {f}."),
    ),
    (
        ("send_email", "send_message"),
        ("to", "receiver", "address"),
        "Send a message.",
        ("Send an email to {v}.", "Send a message to {v}.", "Write to {v}.", "Can you write an email to {v}?"),
    ),
    (
        ("play_music", "play_song", "play"),
        ("song", "title", "artist"),
        "Play music.",
        ("Play {q}.", "Play the song {q}.", "I want to hear {q}.", "Please play music by {v}."),
    ),
)
"""Names, arguments, description and questions of the most common example tools; only for training."""

TYPES = "string integer number boolean any Tools"


def phrase_texts() -> list[str]:
    """Return texts for the vocabulary: everything except the words of tools and values."""
    texts = [
        TYPES,
        *ASKED,
        *ASKED_PLAINLY,
        *ORDERED,
        *ORDERED_PLAINLY,
        *NAMED,
        *COUNTED,
        *CHOSEN,
        *DESCRIPTIONS,
        "Done: result",
    ]
    texts += [*ASKING_VERBS, *ACTING_VERBS, *SUFFIXES, *(word for choice in CHOICES for word in choice)]
    for _, _, description, wordings in FAMILIAR:
        texts += [description, *wordings]
    drawn = {*NOUNS, *ARGUMENTS}
    return [" ".join(word for word in re.findall(r"\{\w\}|[A-Za-z]+", text) if word.lower() not in drawn) for text in texts]


@dataclass(frozen=True, slots=True)
class Argument:
    """Parameter of a tool, with its value if the question has one."""

    name: str
    schema: Json
    is_required: bool = True


@dataclass(frozen=True, slots=True)
class Tool:
    """Tool, and the words of questions for it."""

    name: str
    arguments: tuple[Argument, ...]
    description: str = ""
    verb: str = "get"
    noun: str = ""
    """The nouns as in questions."""
    wordings: tuple[str, ...] = ()
    """Values of the first argument, instead of the general ones."""

    def words(self) -> list[str]:
        """Return the words that distinguish it from other tools."""
        return [self.name, *self.noun.split(), *(argument.name for argument in self.arguments)]

    def definition(self) -> Json:
        """The tool in OpenAI's format."""
        parameters = {
            "type": "object",
            "properties": {argument.name: argument.schema for argument in self.arguments},
            "required": [argument.name for argument in self.arguments if argument.is_required],
        }
        function: Json = {"name": self.name, "parameters": parameters}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Call:
    """Answer that is a call."""

    name: str
    arguments: Json

    def message(self) -> Json:
        """The call in OpenAI's format, with arguments as templates expect them."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    def text(self) -> str:
        """Return the call as the model writes it (hermes)."""
        return "<tool_call>\n" + json.dumps({"name": self.name, "arguments": self.arguments}) + "\n</tool_call>"


def any_word(source: random.Random, pool: tuple[str, ...]) -> str:
    """Draw one of `pool`, an English or an invented word."""
    kind = source.random()
    if kind < 0.5:
        return source.choice(pool)
    return source.choice(ENGLISH_WORDS) if kind < 0.75 else invented_word(source, 7)


def trained_word(source: random.Random, pool: tuple[str, ...]) -> str:
    """Draw likewise, but more are invented, up to the length of English words, because repeated words would be memorized."""
    kind = source.random()
    if kind < 0.3:
        return source.choice(pool)
    if kind < 0.45:
        return source.choice(ENGLISH_WORDS)
    return invented_word(source, 12) if kind < 0.85 else scrambled_word(source, 10)


def _name(source: random.Random, verb: str, noun: str, second: str) -> tuple[str, str]:
    """Draw the name of a tool, and its nouns as in questions."""
    kind = source.random()
    if kind < 0.62:
        return f"{verb}_{noun}", noun
    if kind < 0.74:
        return noun, noun
    if kind < 0.82:
        return f"{verb}{noun.capitalize()}", noun
    if kind < 0.88:
        return f"{noun}_{source.choice(SUFFIXES)}", noun
    return f"{verb}_{noun}_{second}", f"{noun} {second}"


def _schema(source: random.Random, is_first: bool) -> Json:
    kind = source.random()
    if is_first:
        return {"type": "string" if kind < 0.85 else "integer"}
    if kind < 0.35:
        return {"type": "string"}
    if kind < 0.65:
        return {"type": "integer" if source.random() < 0.8 else "number"}
    if kind < 0.75:
        return {"type": "boolean"}
    return {"type": "string", "enum": list(source.choice(CHOICES))}


def drawn_length(source: random.Random, shares: tuple[float, ...]) -> int:
    """Draw an index by `shares`."""
    return source.choices(range(len(shares)), shares)[0]


def make_tool(source: random.Random, draw: Draw, shares: Shares) -> Tool:
    """Draw a tool."""
    is_asked = source.random() < 0.65
    verb = source.choice(ASKING_VERBS if is_asked else ACTING_VERBS)
    noun, second = draw(NOUNS), draw(NOUNS)
    name, said = _name(source, verb, noun, second)
    arguments: list[Argument] = []
    for _ in range(drawn_length(source, shares.arguments)):
        word = draw(ARGUMENTS)
        if word not in (noun, second, *(argument.name for argument in arguments)):
            is_required = source.random() < (0.6 if arguments else 0.9)
            arguments.append(Argument(word, _schema(source, not arguments), is_required))
    description = ""
    if source.random() < 0.6:
        about = arguments[0].name if arguments else "user"
        description = source.choice(DESCRIPTIONS).format(n=said, a=about, V=verb.capitalize())
        if "{a}" not in description and source.random() < shares.described:
            name = f"{verb}_{draw(NOUNS)}"  # only its description says its purpose
    return Tool(name, tuple(arguments), description, verb, said)


def familiar_tool(source: random.Random) -> Tool:
    """Draw one of `FAMILIAR`."""
    names, arguments, description, wordings = source.choice(FAMILIAR)
    first = Argument(source.choice(arguments), {"type": "string"}, is_required=source.random() < 0.8)
    others: tuple[Argument, ...] = ()
    if "weather" in names[0] and source.random() < 0.4:
        others = (Argument("unit", {"type": "string", "enum": ["celsius", "fahrenheit"]}, is_required=source.random() < 0.3),)
    shown = description if source.random() < 0.7 else ""
    name = source.choice(names)
    return Tool(name, (first, *others), shown, "get", name.rsplit("_", 1)[-1], wordings)


def _phrase(source: random.Random, draw: Draw) -> str:
    return " ".join(draw(NOUNS) for _ in range(source.randint(2, 3)))


def _string(source: random.Random, draw: Draw) -> tuple[str, str]:
    """Draw a value: as text of the question, and as JSON."""
    kind = source.random()
    if kind < 0.42:
        value = draw(NAMES).capitalize()
    elif kind < 0.66:
        value = draw(NOUNS).lower()
    elif kind < 0.74:
        value = f"{draw(NAMES).capitalize()} {draw(NAMES).capitalize()}"
    elif kind < 0.84:
        value = _phrase(source, draw).lower()
        return f'"{value}"', value
    elif kind < 0.89:
        value = f"20{source.randint(10, 39)}-{source.randint(1, 12):02}-{source.randint(1, 28):02}"
    elif kind < 0.92:
        value = f"{source.randint(0, 23)}:{source.randint(0, 59):02}"
    elif kind < 0.96:
        value = f"{draw(NAMES).lower()}@{draw(NOUNS).lower()}.com"
    else:
        value = f"{draw(NOUNS).lower()}.txt"
    return (f'"{value}"' if source.random() < 0.15 else value), value


def _value(source: random.Random, schema: Json, draw: Draw) -> tuple[str, Any]:
    if schema.get("enum"):
        value = source.choice(schema["enum"])
        return value, value
    if schema["type"] == "integer":
        number = source.randint(0, source.choice((9, 99, 999, 9999)))
        return str(number), number
    if schema["type"] == "number":
        decimal = source.randint(1, 999) / 10
        return json.dumps(decimal), decimal
    if schema["type"] == "boolean":
        truth = source.random() < 0.5
        return str(truth).lower(), truth
    return _string(source, draw)


def _clause(source: random.Random, argument: Argument, shown: str, value: object) -> str:
    """Draw how a question gives an argument by name."""
    if value is True and source.random() < 0.5:
        return f" with {argument.name}"
    if value is False and source.random() < 0.5:
        return f" without {argument.name}"
    templates: tuple[str, ...] = NAMED
    if argument.schema.get("enum"):
        templates = CHOSEN
    elif argument.schema["type"] == "integer" and source.random() < 0.4:
        templates = COUNTED
    return source.choice(templates).format(a=argument.name, v=shown)


def asked(tool: Tool, source: random.Random, draw: Draw) -> tuple[str, Call]:
    """Draw a question that `tool` answers, and the call."""
    values: Json = {}
    clauses: list[str] = []
    is_plain = not tool.arguments
    for number, argument in enumerate(tool.arguments):
        if number > 0 and not argument.is_required and source.random() < 0.6:
            continue
        shown, value = _value(source, argument.schema, draw)
        values[argument.name] = value
        if number == 0 and (tool.wordings or source.random() < 0.7):
            first = shown
        else:
            is_plain |= number == 0
            clauses.append(_clause(source, argument, shown, value))
    if tool.wordings:
        wording = source.choice(tool.wordings)
        if "{v}" not in wording:
            is_phrase = "{q}" in wording
            value = _phrase(source, draw).lower() if is_phrase else f"{draw(NOUNS).lower()}.{source.choice(('txt', 'py'))}"
            values[tool.arguments[0].name] = value
            first = f'"{value}"' if "{q}" in wording and source.random() < 0.5 else value
        text = wording.format(v=first, q=first, f=first)
    else:
        asking = tool.verb in ASKING_VERBS
        wordings = (ASKED_PLAINLY if is_plain else ASKED) if asking else (ORDERED_PLAINLY if is_plain else ORDERED)
        wording = source.choice(wordings)
        slots = {"n": tool.noun, "V": tool.verb.capitalize(), "w": tool.verb, "p": source.choice(PREPOSITIONS)}
        text = wording.format(v="" if is_plain else first, **slots)
    if clauses:
        end = text[-1] if text[-1] in ".?" else ""
        text = text.removesuffix(end) + "".join(clauses) + end
    return text, Call(tool.name, values)


def result(tool: Tool, source: random.Random, draw: Draw) -> tuple[str, str]:
    """Return a call's result, and the model's sentence about it."""
    kind = source.random()
    if kind < 0.45:
        pairs: Json = {}
        for _ in range(source.choices((1, 2, 3), (0.5, 0.4, 0.1))[0]):
            schema = {"type": source.choices(("string", "integer", "number", "boolean"), (0.5, 0.3, 0.1, 0.1))[0]}
            key = draw(RESULT_KEYS)
            pairs[key] = source.choice((True, False)) if schema["type"] == "boolean" else _value(source, schema, draw)[1]
        said = [f"the {key} is {value if isinstance(value, str) else json.dumps(value)}" for key, value in pairs.items()]
        text = ", ".join(said[:-1]) + " and " + said[-1] if len(said) > 1 else said[0]
        return json.dumps(pairs), text[0].upper() + text[1:] + "."
    if kind < 0.55:
        given = source.choice(SENTENCES).format(draw(NOUNS), draw(NAMES).capitalize(), draw(NOUNS).lower())
        return given, given
    number = str(source.randint(-20, source.choice((9, 99, 999, 9999))))
    given = source.choice((draw(NOUNS).lower(), number, f"{number} {draw(NOUNS)}", f"{draw(NOUNS)}, {number} {draw(NOUNS)}"))
    if tool.verb in ACTING_VERBS:
        return given, f"Done: {given}."
    subject = tool.name.rsplit("_", 1)[-1]
    return given, f"The {subject} is {given}." if subject.islower() else f"The result is {given}."
