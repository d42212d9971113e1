"""Beginnings of docstrings and comments, files that they name, and lengths of test names. People check the rest.

A docstring or comment that begins with one of `RIDDLES` is a clause without its subject, and a test name beyond `MAX_NAME`
characters a sentence.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

FOLDERS = ("api", "engine", "ops", "shm", "tests", "tools", "workers")
RIDDLES = re.compile(r"(As|Of|So much|Such|That|What|Who|Whose)\b")
FILE = re.compile(r"`([a-z_0-9/]+\.(?:py|inc|h|cpp|cu))`")
MAX_NAME = 60  # characters of a test's name


def files_of(folder: str) -> Iterator[Path]:
    """Yield the sources below a folder of the repository."""
    return (path for path in sorted((REPOSITORY / folder).rglob("*.py")) if "build" not in path.relative_to(REPOSITORY).parts)


@dataclass(frozen=True, slots=True)
class Source:
    """Docstrings and comments of a file with their lines, and names of its tests."""

    texts: tuple[tuple[int, str], ...]
    tests: tuple[str, ...]


@cache
def read(path: Path) -> Source:
    """Read a file once for all tests. Of comments, those with a line to themselves; following lines belong to the first."""
    text = path.read_text()
    texts, tests, in_strings = [], [], set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                texts.append((node.body[0].lineno, docstring))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                tests.append(node.name)
        elif isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
            in_strings.update(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    last = 0
    for number, line in enumerate(text.splitlines(), 1):
        comment = line.lstrip()
        if comment.startswith("#") and number not in in_strings:
            if number != last + 1:
                texts.append((number, comment.lstrip("#: ")))
            last = number
    return Source(tuple(texts), tuple(tests))


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_noun_or_a_verb(folder: str) -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {text[:60]}"
        for path in files_of(folder)
        for line, text in read(path).texts
        if RIDDLES.match(text)
    ]
    assert found == []


@pytest.mark.slow
def test_named_files_exist() -> None:
    """A docstring names a file by its path, or by the end of it."""
    ends = {
        "/".join(path.parts[start:])
        for folder in FOLDERS
        for found in (REPOSITORY / folder).rglob("*.*")
        for path in (found.relative_to(REPOSITORY),)
        for start in range(len(path.parts))
    }
    missing = [
        f"{path.relative_to(REPOSITORY)}:{line}: {name}"
        for folder in FOLDERS
        for path in files_of(folder)
        for line, text in read(path).texts
        for name in FILE.findall(text)
        if name not in ends
    ]
    assert missing == []


def test_names_of_tests_are_short() -> None:
    names = {name for path in files_of("tests") for name in read(path).tests}
    assert len(names) > 1000, "the tests are found"
    assert sorted(name for name in names if len(name) > MAX_NAME) == []
