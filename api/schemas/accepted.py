"""Describes the values that a field of a request body accepts, for error messages.

Read from the msgspec type that checks the body, so that a message cannot differ from the check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import inspect

MAX_LISTED = 24  # values of an enumeration

NOTHING = "nothing"  # of fields that accept only an empty value

Step = str | int  # name of a field, or index in a list


def accepted(type_: type, steps: Iterable[Step], fields: object) -> str:
    """Describe the accepted values at the place `steps` in a body `fields` of `type_`. Empty: unknown, or only null."""
    candidates, value = [inspect.type_info(type_)], fields
    for step in steps:
        candidates = [found for each in _options(candidates) for found in _behind(each, step, value)]
        value = _value_at(value, step)
    texts = [text for each in _options(candidates) if (text := _described(each))]
    return " or ".join(dict.fromkeys(texts))


def _options(types: Iterable[inspect.Type]) -> list[inspect.Type]:
    """Return the types without unions and metadata around them."""
    found: list[inspect.Type] = []
    for each in types:
        if isinstance(each, inspect.UnionType):
            found += _options(each.types)
        elif isinstance(each, inspect.Metadata):
            found += _options([each.type])
        else:
            found.append(each)
    return found


def _behind(type_: inspect.Type, step: Step, value: object) -> list[inspect.Type]:
    if isinstance(type_, inspect.StructType) and isinstance(step, str):
        if step == type_.tag_field:
            return [inspect.LiteralType((type_.tag,))]
        given = value.get(type_.tag_field) if isinstance(value, Mapping) and type_.tag_field else type_.tag
        if given != type_.tag:
            return []  # another struct of a union
        return [field.type for field in type_.fields if field.encode_name == step]
    if isinstance(type_, inspect.DictType) and isinstance(step, str):
        return [type_.value_type]
    if isinstance(type_, (inspect.ListType, inspect.VarTupleType)) and isinstance(step, int):
        return [type_.item_type]
    return []


def _value_at(value: object, step: Step) -> Any:
    if isinstance(value, dict):
        return value.get(step)
    if isinstance(value, list) and isinstance(step, int) and 0 <= step < len(value):
        return value[step]
    return None


def _described(type_: inspect.Type) -> str:
    if isinstance(type_, inspect.LiteralType):
        shown = [repr(each) for each in type_.values[:MAX_LISTED]]
        return " or ".join(shown + (["..."] if len(type_.values) > MAX_LISTED else []))
    if isinstance(type_, inspect.BoolType):
        return "true or false"
    if isinstance(type_, inspect.IntType):
        return f"an integer{_range(type_)}"
    if isinstance(type_, inspect.FloatType):
        return f"a number{_range(type_)}"
    if getattr(type_, "max_length", None) == 0:
        return NOTHING
    if isinstance(type_, inspect.StrType):
        pattern = f" that matches {type_.pattern}" if type_.pattern else ""
        return f"a string{_length(type_, 'characters')}{pattern}"
    if isinstance(type_, inspect.ListType):
        return f"a list{_length(type_, 'entries')}"
    if isinstance(type_, (inspect.DictType, inspect.StructType)):
        return "an object"
    return ""


def _range(type_: inspect.IntType | inspect.FloatType) -> str:
    low, high = type_.ge, type_.le
    if low is not None and high is not None:
        return f" from {low} to {high}"
    bounds = (("from", low), ("above", type_.gt), ("to", high), ("below", type_.lt))
    return "".join(f" {word} {bound}" for word, bound in bounds if bound is not None)


def _length(type_: inspect.StrType | inspect.ListType, unit: str) -> str:
    low, high = type_.min_length, type_.max_length
    if low and high is not None:
        return f" of {low} to {high} {unit}"
    return f" of at least {low} {unit}" if low else f" of at most {high} {unit}" if high is not None else ""
