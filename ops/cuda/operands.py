"""What rows are given, as `operands.h` declares it: a ctypes structure for each struct there, and the call.

The header is the only place where operands are listed. A number, or type, that does not fit is an error before anything runs,
and so are structures that the compiler laid out otherwise.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADER = Path(__file__).with_name("operands.h")
TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "float8": 4, "int4": 5}  # as `Type` in numbers.h
TYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8": 1}

_STRUCT = re.compile(r"struct (\w+) \{\n(.*?)\n\};", re.DOTALL)
_MEMBER = re.compile(r"^ +(\S[^;(]*?) (\w+);", re.MULTILINE)


class Memory(ctypes.Structure):
    """A `Buffer` or `Untyped`: where it begins, and of how many numbers it is."""

    _fields_ = [("data", ctypes.c_void_p), ("count", ctypes.c_longlong)]


_NUMBERS: dict[str, Any] = {"int": ctypes.c_int, "float": ctypes.c_float}
_ELEMENT_BYTES = {"int": 4, "float": 4, "double": 8, "unsigned char": 1}


def _structures(text: str) -> dict[str, type[ctypes.Structure]]:
    found: dict[str, type[ctypes.Structure]] = {}
    for name, body in _STRUCT.findall(text):
        if name == "Untyped":
            continue
        fields: list[tuple[str, Any]] = []
        elements: dict[str, int | None] = {}
        for declared, member in _MEMBER.findall(body):
            if declared == "Untyped":
                fields.append((member, Memory))
                elements[member] = None
            elif declared.startswith("Buffer<"):
                fields.append((member, Memory))
                elements[member] = _ELEMENT_BYTES[declared.removeprefix("Buffer<").removesuffix(">")]
            else:
                fields.append((member, _NUMBERS.get(declared) or found[declared]))
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields, "elements": elements})
    return found


STRUCTURES = _structures(HEADER.read_text())
_FIELDS: list[Any] = [field[1] for structure in STRUCTURES.values() for field in structure._fields_]
ROWS = tuple(name for name, structure in STRUCTURES.items() if structure not in _FIELDS)  # the others are parts of these


def memory_of(address: int, num_bytes: int, element_bytes: int) -> Memory:
    assert num_bytes % element_bytes == 0, f"{num_bytes} bytes are no whole numbers of {element_bytes}"
    return Memory(address, num_bytes // element_bytes)


def operands(row: str, describe: Callable[[Any], tuple[int, int]], **values: Any) -> ctypes.Structure:
    """The structure of a row. `values`: for memory a tensor, or None where there is none; numbers as they are; of a struct
    within it a dict of the same. `describe` tells a tensor's address and bytes. AssertionError: one too many or too few."""
    structure: Any = STRUCTURES[row]
    names = [name for name, _ in structure._fields_]
    assert sorted(names) == sorted(values), f"{row} takes {names}, given are {sorted(values)}"
    filled: ctypes.Structure = structure()
    for name, kind in structure._fields_:
        value = values[name]
        if kind is Memory:
            element = structure.elements[name] or next(
                size for type_name, size in TYPE_BYTES.items() if TYPES[type_name] == values["type"]
            )
            value = Memory(None, 0) if value is None else memory_of(*describe(value), element)
        elif kind in STRUCTURES.values():
            value = operands(kind.__name__, describe, **value)
        setattr(filled, name, value)
    return filled
