"""Turns a request's answer format into Lark, in llguidance's dialect. Pure.

Used by the tokenizer's helpers. A mistake in the format raises a ValueError; errors in a schema, a regex or a grammar itself
are reported by llguidance (`matching.py`).

Structural tags (as in vLLM and xgrammar): text in which everything after a trigger has a format. A trigger may begin with a
special token, which is not part of any text and is given by its id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from engine.grammars.matching import UNIQUE_KEYS
from engine.grammars.schema import has_open_objects, prepared, rule_of
from engine.messages import AnswerFormat

HEAD = '%llguidance {"no_forcing": true}\n'  # the model also chooses tokens that are certain
_ANY_TEXT = "ANY_TEXT: /(?s:.*)/\n"
MAX_TAGS = 256
_WHITESPACE = r"[ ]|\n[ \t]{0,20}"  # between the parts of JSON, once: a model that may repeat it forever does so


def lark_of(format_: AnswerFormat, marks: dict[str, int]) -> str:
    """Return Lark without `HEAD`. `marks`: special tokens by their names. Raises ValueError if the format is wrong."""
    if not format_.text.strip():
        raise ValueError("it is empty")
    return _WRITERS[format_.kind](format_, marks)


def _json(format_: AnswerFormat, marks: dict[str, int]) -> str:
    schema = _checked(_parsed(format_.text), format_.is_strict)
    note = f"{UNIQUE_KEYS}\n" if has_open_objects(schema) else ""
    return f"{note}start: {_body(schema, format_.whitespace, format_.is_strict)}\n"


def _schema(schema: Any) -> str:
    """Return the body of a rule for a schema inside structural tags."""
    return _body(_checked(schema))


def _checked(schema: Any, is_strict: bool = False) -> Any:
    """Return the schema for llguidance. Requests must not use llguidance's own option to relax it. Raises ValueError."""
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"a schema must be an object, true or false, not {type(schema).__name__}")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise ValueError('the keyword "x-guidance" is not supported')
    return prepared(schema, is_strict)


def _body(schema: Any, whitespace: str | None = None, is_strict: bool = False) -> str:
    """Return the body of a rule for a checked schema."""
    pattern = _WHITESPACE if whitespace is None else whitespace
    options: dict[str, Any] = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    return rule_of(schema, options | {"coerce_one_of": not is_strict}, _quoted)


def _regex(format_: AnswerFormat, marks: dict[str, int]) -> str:
    return f"start: {_pattern(format_.text)}\n"


def _pattern(regex: str) -> str:
    """Return Lark for a regex, which matches the whole text, with or without anchors."""
    from llguidance import regex_to_lark

    return "/" + regex_to_lark(regex, "").replace("\n", "\\n").replace("\r", "\\r") + "/"


def _choice(format_: AnswerFormat, marks: dict[str, int]) -> str:
    choices = _parsed(format_.text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("choices must be a non-empty list of strings")
    if not all(choices):
        raise ValueError("choices must not be empty strings")
    return f"start: {' | '.join(map(_quoted, choices))}\n"


def _grammar(format_: AnswerFormat, marks: dict[str, int]) -> str:
    """Convert GBNF, recognized by `::=` in a rule, or check Lark."""
    if "::=" not in format_.text:
        return format_.text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(format_.text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # the converter raises nothing more specific
        raise ValueError(f"it is not valid GBNF: {error}") from error
    return lark


def _structural_tag(format_: AnswerFormat, marks: dict[str, int]) -> str:
    tag = _parsed(format_.text)
    try:
        if isinstance(tag, dict) and "structures" in tag:
            writer = _Tags(marks)
            writer.legacy(msgspec.convert(tag, _Structures))
            return writer.text()
        if isinstance(tag, dict) and "format" in tag:
            writer = _Tags(marks)
            writer.rule("start", writer.body(tag["format"]))
            return writer.text()
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    raise ValueError('it has neither "structures" nor a "format"')


class _Structure(msgspec.Struct):
    begin: str
    end: str = ""
    schema: Any = True


class _Structures(msgspec.Struct):
    structures: list[_Structure]
    triggers: list[str]


class _Tags:
    """Collects rules."""

    def __init__(self, marks: dict[str, int]) -> None:
        self._names = sorted(marks, key=len, reverse=True)
        self._marks = marks
        self._rules: list[str] = []

    def text(self) -> str:
        return "".join(self._rules) + _ANY_TEXT

    def rule(self, name: str, body: str) -> str:
        if len(self._rules) > 4 * MAX_TAGS:
            raise ValueError(f"it has more than {MAX_TAGS} tags")
        self._rules.append(f"{name}: {body}\n")
        return name

    def _new(self, body: str) -> str:
        return self.rule(f"r{len(self._rules)}", body)

    def legacy(self, tag: _Structures) -> None:
        tags = [(each.begin, _schema(each.schema), each.end) for each in tag.structures]
        self.rule("start", self._triggered(tags, tag.triggers))

    def body(self, format_: Any) -> str:
        """Return the body of a rule for one of xgrammar's formats."""
        kind = format_.get("type") if isinstance(format_, dict) else None
        writer = self._KINDS.get(kind) if isinstance(kind, str) else None
        if writer is None:
            raise ValueError(f"format type {kind!r} is not supported; expected one of {', '.join(self._KINDS)}")
        _check_fields(format_, kind)
        return writer(self, format_)

    def _literal(self, text: str) -> str:
        """Return text as Lark, with special tokens by their ids."""
        parts = []
        while text:
            name = next((name for name in self._names if text.startswith(name)), "")
            if name:
                parts.append(f"<[{self._marks[name]}]>")
                text = text[len(name) :]
                continue
            end = min((place for place in (text.find(name) for name in self._names) if place > 0), default=len(text))
            parts.append(_quoted(text[:end]))
            text = text[end:]
        return " ".join(parts) or '""'

    def _tag(self, format_: Any) -> str:
        begin, content, end = self._parts(format_)
        return f"{self._literal(begin)} {self._content(content, end)}"

    def _parts(self, format_: Any) -> tuple[str, Any, str]:
        parts = format_ if isinstance(format_, dict) else {}
        _check_fields(parts, "tag")
        begin, content, end = (parts.get(name) for name in ("begin", "content", "end"))
        if not isinstance(begin, str) or not isinstance(end, str):
            raise ValueError('a tag has "begin" and "end", which are texts, and "content"')
        return begin, content, end

    def _content(self, content: Any, end: str) -> str:
        """Return the content with its end."""
        is_any = isinstance(content, dict) and content.get("type") == "any_text"
        if is_any and end and not end.startswith(tuple(self._names)):
            return self._up_to(end)
        body = self.body(content)
        return f"({body}) {self._literal(end)}" if end else f"({body})"

    def _up_to(self, text: str) -> str:
        """Return any text up to the first occurrence of this one."""
        return self.rule(f"r{len(self._rules)}[lazy]", f"ANY_TEXT {_quoted(text)}").removesuffix("[lazy]")

    def _triggered_tags(self, format_: Any) -> str:
        tags = [self._parts(tag) for tag in _list_of(format_, "tags")]
        written = [(begin, self._content(content, end), "") for begin, content, end in tags]
        triggers = _list_of(format_, "triggers")
        return self._triggered(written, triggers, bool(format_.get("at_least_one")), bool(format_.get("stop_after_first")))

    def _triggered(
        self, tags: list[tuple[str, str, str]], triggers: list[Any], is_needed: bool = False, is_single: bool = False
    ) -> str:
        """Return text in which a trigger is followed by one of the tags (begin, body, end) that begin with it."""
        if not tags or not triggers:
            raise ValueError("it needs at least one tag and one trigger")
        heads = []
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                raise ValueError("a trigger must be a non-empty string")
            mark = next((name for name in self._names if trigger.startswith(name)), "")
            own = [(begin[len(mark or trigger) :], body, end) for begin, body, end in tags if begin.startswith(trigger)]
            if not own:
                raise ValueError(f"no tag starts with the trigger {trigger[:64]!r}")
            head = f"ANY_TEXT {self._literal(mark)}" if mark else self._up_to(trigger)
            rest = " | ".join(f"{self._literal(begin)} ({body}) {self._literal(end)}" for begin, body, end in own)
            heads.append(self._new(f"{head} ({rest})"))
        begun = [begin for begin, _, _ in tags if not begin.startswith(tuple(triggers))]
        if begun:
            raise ValueError(f"the tag {begun[0][:64]!r} does not start with any of the triggers")
        each = " | ".join(heads)
        times = ("" if is_needed else "?") if is_single else ("+" if is_needed else "*")
        return f"({each}){times}" + ("" if is_single and is_needed else " ANY_TEXT")

    def _sequence(self, format_: Any) -> str:
        return " ".join(f"({self.body(each)})" for each in _list_of(format_, "elements"))

    def _or(self, format_: Any) -> str:
        return " | ".join(f"({self.body(each)})" for each in _list_of(format_, "elements"))

    def _const(self, format_: Any) -> str:
        return self._literal(_text_of(format_, "value"))

    def _json_schema(self, format_: Any) -> str:
        return _schema(format_.get("json_schema"))

    def _of_regex(self, format_: Any) -> str:
        return _pattern(_text_of(format_, "pattern"))

    def _any(self, format_: Any) -> str:
        return "ANY_TEXT"

    _KINDS: dict[str, Callable[[_Tags, Any], str]] = {
        "const_string": _const,
        "json_schema": _json_schema,
        "regex": _of_regex,
        "any_text": _any,
        "sequence": _sequence,
        "or": _or,
        "tag": _tag,
        "triggered_tags": _triggered_tags,
    }


_FIELDS: dict[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "any_text": (),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
}
_ASKS_NOTHING: tuple[Any, ...] = (None, False, [], "json")  # the last one is a schema's `style`


def _check_fields(format_: Any, kind: Any) -> None:
    """Check that a format has no other fields: xgrammar's `excludes` and `style` would be ignored here."""
    for name, value in format_.items():
        if name != "type" and name not in _FIELDS[kind] and value not in _ASKS_NOTHING:
            raise ValueError(f"{name!r} is not supported in a format of type {kind!r}; remove it")


def _list_of(format_: Any, name: str) -> list[Any]:
    values = format_.get(name)
    if not isinstance(values, list) or not values or len(values) > MAX_TAGS:
        raise ValueError(f'"{name}" is a list of 1 to {MAX_TAGS}')
    return values


def _text_of(format_: Any, name: str) -> str:
    value = format_.get(name)
    if not isinstance(value, str):
        raise ValueError(f'"{name}" is a text')
    return value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _quoted(text: str) -> str:
    """Return a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


_WRITERS: dict[str, Callable[[AnswerFormat, dict[str, int]], str]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}

_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")


def cause_of(error: str) -> str:
    """Return the part of an llguidance error for the user: the first lines, without positions in our own text."""
    lines: Iterable[str] = (line for line in error.splitlines() if not re.match(r" *\d* \||<non-verbose", line))
    text = _PLACE.sub("", " ".join(" ".join(lines).split()))
    return _CAUSES.get(text, text)[:500]


_CAUSES = {"NoExtensionBias": "no output can match it", "NoExtension": "no output can match it"}
