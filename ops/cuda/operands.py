"""Operands of rows as `operands.h` declares them: a ctypes structure for each struct there, shapes, and the call.

The header is the only list of operands: bindings, sizes of results that the caller does not give, and checks are derived from
it. A wrong number, type or size is an error before anything runs, and so is a structure with another layout in the compiler.
"""

from __future__ import annotations

import ast
import ctypes
import math
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HEADER = Path(__file__).with_name("operands.h")
TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "float8": 4, "int4": 5, "float4": 6}  # as `Type` in numbers.h
TYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8": 1}

_STRUCT = re.compile(r"struct (\w+) \{\n(.*?)\n\};", re.DOTALL)
_MEMBER = re.compile(r"^ +(\S[^;(\n]*?) (\w+);(?: +// (.*))?$", re.MULTILINE)
_SHAPE = re.compile(r"(?:(out) )?\[([^]]+)\]")


class Memory(ctypes.Structure):
    """A `Buffer` or `Untyped`: its address and size in numbers."""

    _fields_ = [("data", ctypes.c_void_p), ("count", ctypes.c_longlong)]


_NUMBERS: dict[str, Any] = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "float": ctypes.c_float}
_ELEMENTS = {"int": ("int32", 4), "float": ("float32", 4), "unsigned char": ("uint8", 1)}
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
Dimension = Callable[[Any], int]  # computes a size from the numbers of the structure


class Member(NamedTuple):
    """Memory among the operands."""

    name: str
    dtype: str  # "": the type of the operand `type`
    element_bytes: int
    dimensions: tuple[Dimension, ...] | None  # None: not in the header
    shape: str  # as in the header
    is_result: bool  # allocated if not given
    may_be_empty: bool


def _dimension(node: ast.expr) -> Dimension:
    match node:
        case ast.Constant(value=int(number)):
            return lambda numbers: number
        case ast.Name(id="_"):
            return lambda numbers: 1
        case ast.Name() | ast.Attribute():
            found: Dimension = operator.attrgetter(ast.unparse(node))
            return found
        case ast.BinOp(left=left, op=op, right=right):
            function, first, second = _OPERATORS[type(op)], _dimension(left), _dimension(right)
            return lambda numbers: function(first(numbers), second(numbers))
    raise ValueError(f"{HEADER}: {ast.unparse(node)} is not a dimension")


def _member(name: str, declared: str, comment: str) -> Member:
    dtype, element_bytes = ("", 0)
    if declared != "Untyped":
        dtype, element_bytes = _ELEMENTS[declared.removeprefix("Buffer<").removesuffix(">")]
    said = _SHAPE.search(comment)
    dimensions = None
    if said is not None:
        shape = ast.parse(f"[{said[2]}]", mode="eval").body
        assert isinstance(shape, ast.List)
        dimensions = tuple(map(_dimension, shape.elts))
    text, is_result = ("", False) if said is None else (f"[{said[2]}]", said[1] is not None)
    return Member(name, dtype, element_bytes, dimensions, text, is_result, "empty: " in comment)


def _structures(text: str) -> tuple[dict[str, type[ctypes.Structure]], dict[str, dict[str, Member]]]:
    found: dict[str, type[ctypes.Structure]] = {}
    members: dict[str, dict[str, Member]] = {}
    for name, body in _STRUCT.findall(text):
        if name == "Untyped":
            continue
        fields: list[tuple[str, Any]] = []
        members[name] = {}
        for declared, member, comment in _MEMBER.findall(body):
            if declared == "Untyped" or declared.startswith("Buffer<"):
                fields.append((member, Memory))
                members[name][member] = _member(member, declared, comment)
            else:
                fields.append((member, _NUMBERS.get(declared) or found[declared]))
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found, members


STRUCTURES, MEMBERS = _structures(HEADER.read_text())
_FIELDS: list[Any] = [field[1] for structure in STRUCTURES.values() for field in structure._fields_]
ROWS = tuple(name for name, structure in STRUCTURES.items() if structure not in _FIELDS)  # other structures are parts of these
_TYPE_NAMES = {number: name for name, number in TYPES.items()}

Describe = Callable[[Any], tuple[int, int]]  # a tensor's address and bytes
Make = Callable[[tuple[int, ...], str], Any]  # a tensor of a shape and type


def memory_of(address: int, num_bytes: int, element_bytes: int) -> Memory:
    assert num_bytes % element_bytes == 0, f"{num_bytes} bytes are not a multiple of {element_bytes}"
    return Memory(address, num_bytes // element_bytes)


def operands(row: str, describe: Describe, **values: Any) -> ctypes.Structure:
    """Return the structure of a row. `values`: a tensor or None for memory, numbers, and a dict for a nested struct.
    AssertionError for missing or unknown operands, or memory with fewer numbers than its shape."""
    return bound(row, describe, None, values)[0]


def bound(row: str, describe: Describe, make: Make | None, values: dict[str, Any]) -> tuple[ctypes.Structure, dict[str, Any]]:
    """Return the structure like `operands`, and the results missing in `values`, which are allocated."""
    structure: Any = STRUCTURES[row]
    members = MEMBERS[row]
    names = [name for name, _ in structure._fields_]
    lacking = [name for name in names if name not in values]
    can_be_made = all(make is not None and name in members and members[name].is_result for name in lacking)
    is_known = len(names) - len(lacking) == len(values)
    assert can_be_made and is_known, f"{row}: expected the operands {names}, got {sorted(values)}"  # noqa: PT018 - one thing is said
    filled: ctypes.Structure = structure()
    for name, kind in structure._fields_:
        if kind is not Memory:
            value = values[name]
            setattr(filled, name, operands(kind.__name__, describe, **value) if isinstance(value, dict) else value)
    made: dict[str, Any] = {}
    for member in members.values():
        dtype = member.dtype or _TYPE_NAMES[values["type"]]
        if member.name in lacking:
            assert make is not None
            made[member.name] = make(shape_of(member, filled), dtype)
        tensor = made.get(member.name, values.get(member.name))
        memory = Memory(None, 0) if tensor is None else memory_of(*describe(tensor), member.element_bytes or TYPE_BYTES[dtype])
        if member.dimensions is not None:
            _check_size(row, member, filled, memory, is_there=tensor is not None)
        setattr(filled, member.name, memory)
    return filled, made


def shape_of(member: Member, numbers: Any) -> tuple[int, ...]:
    """Return the shape of a result, from the row's other operands."""
    assert member.dimensions is not None
    return tuple(dimension(numbers) for dimension in member.dimensions)


def _check_size(row: str, member: Member, numbers: Any, memory: Memory, *, is_there: bool) -> None:
    if not is_there:
        assert member.may_be_empty, f"{row}: {member.name} {member.shape} is missing"
        return
    count = math.prod(shape_of(member, numbers))
    assert memory.count >= count, f"{row}: {member.name} {member.shape} has {memory.count} numbers, expected {count}"
