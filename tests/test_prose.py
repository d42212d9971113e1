"""Beginnings of docstrings and comments, files that they name, and lengths of test names. People check the rest.

A docstring or comment that begins with one of `RIDDLES` is a clause without its subject, and a test name beyond `MAX_NAME`
characters a sentence.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
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


def docstrings_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text


def comments_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment that has a line to itself; a following line of a comment goes on with it."""
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            if token.start[0] != last + 1:
                yield token.start[0], token.string.lstrip("#: ")
            last = token.start[0]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_noun_or_a_verb(folder: str) -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {text[:60]}"
        for path in files_of(folder)
        for line, text in (*docstrings_of(path), *comments_of(path))
        if RIDDLES.match(text)
    ]
    assert found == []


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
        for line, text in (*docstrings_of(path), *comments_of(path))
        for name in FILE.findall(text)
        if name not in ends
    ]
    assert missing == []


def test_names_of_tests_are_short() -> None:
    names = {
        node.name
        for path in files_of("tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }
    assert len(names) > 1000, "the tests are found"
    assert sorted(name for name in names if len(name) > MAX_NAME) == []
