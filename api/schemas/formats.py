"""Structured output in requests: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`.

The fields of every body that generates, and their conversion to a format for the tokenizer. At most one is allowed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from engine.errors import RequestError
from engine.messages import AnswerFormat

_ANY_OBJECT = '{"type":"object"}'

Schema = Annotated[dict[str, Any] | bool | str, Meta(description="A JSON schema, or the text of one.")]
Choices = Annotated[list[str], Meta(min_length=1, max_length=4096)]
Text = Annotated[str, Meta(min_length=1)]


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: Annotated[bool, Meta(description="Reject schema keywords that are not supported by grammars.")] | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Annotated[list[dict[str, Any]], Meta(description="Structural tags: begin, schema, end.")] | None = None
    triggers: list[str] | None = None
    format: Annotated[dict[str, Any], Meta(description="Structural tags in the format of xgrammar.")] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    json: Schema | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Annotated[str, Meta(min_length=1, description="Lark or GBNF.")] | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: Annotated[str, Meta(description="Regex for the whitespace between JSON tokens.")] | None = None
    disable_any_whitespace: bool | None = None


class FormatFields(msgspec.Struct, kw_only=True):
    """Fields for the format of the answer; a kind means the same in all fields."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: str | None = None


def format_of(body: FormatFields) -> AnswerFormat | None:
    """Return the format of a body; None: any text. Raises RequestError that names the wrong field."""
    found = [*_of_response_format(body.response_format), *_of_structured_outputs(body.structured_outputs), *_of_guided(body)]
    if len(found) > 1:
        names = " and ".join(format_.param for format_ in found)
        raise RequestError(
            f"{names} are given, but only one format is allowed; send one", code="invalid_value", param=found[1].param
        )
    return found[0] if found else None


def _of_response_format(given: ResponseFormat | None) -> list[AnswerFormat]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [AnswerFormat("json", _ANY_OBJECT, "response_format")]
    if given.type == "structural_tag":
        parts = {"structures": given.structures, "triggers": given.triggers, "format": given.format}
        tag = {name: value for name, value in parts.items() if value is not None}
        return [AnswerFormat("structural_tag", _text_of(tag, "response_format"), "response_format")]
    schema = None if given.json_schema is None else given.json_schema.schema
    if schema is None:
        param = "response_format.json_schema" + ("" if given.json_schema is None else ".schema")
        raise RequestError(f"{param} is required", code="missing_required_parameter", param=param)
    is_strict = given.json_schema is not None and bool(given.json_schema.strict)
    return [AnswerFormat("json", _text_of(schema, "response_format"), "response_format", is_strict=is_strict)]


def _of_structured_outputs(given: StructuredOutputs | None) -> list[AnswerFormat]:
    if given is None:
        return []
    whitespace = "" if given.disable_any_whitespace else given.whitespace_pattern
    found = _of_kinds("structured_outputs.", given.json, given.regex, given.choice, given.grammar, whitespace)
    if given.json_object:
        found.append(AnswerFormat("json", _ANY_OBJECT, "structured_outputs.json_object", whitespace))
    if given.structural_tag is not None:
        param = "structured_outputs.structural_tag"
        found.append(AnswerFormat("structural_tag", _text_of(given.structural_tag, param), param))
    return found


def _of_guided(body: FormatFields) -> list[AnswerFormat]:
    return _of_kinds(
        "guided_",
        body.guided_json,
        body.guided_regex,
        body.guided_choice,
        body.guided_grammar,
        body.guided_whitespace_pattern,
    )


def _of_kinds(
    prefix: str,
    json: dict[str, Any] | bool | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    whitespace: str | None,
) -> list[AnswerFormat]:
    found = []
    if json is not None:
        found.append(AnswerFormat("json", _text_of(json, prefix + "json"), prefix + "json", whitespace))
    if regex is not None:
        found.append(AnswerFormat("regex", regex, prefix + "regex"))
    if choice is not None:
        found.append(AnswerFormat("choice", _text_of(choice, prefix + "choice"), prefix + "choice"))
    if grammar is not None:
        found.append(AnswerFormat("grammar", grammar, prefix + "grammar"))
    return found


def _text_of(value: object, param: str) -> str:
    """Return a value as JSON; a text is JSON already."""
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # orjson encodes at most 254 levels
        raise RequestError(f"{param} is nested too deeply", param=param) from None
