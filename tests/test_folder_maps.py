"""The `__init__.py` of each package says what its folders are for: a line `    name/  what it is` for each at the top, a
mention of `name/` further down."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

PACKAGES = ("api", "engine", "ops", "shm", "tests", "tools", "workers")
LINE = re.compile(r"^ {0,4}(\w+)/ +\S", re.MULTILINE)


def folders_of(package: Path) -> set[str]:
    """Return the names of folders that have files of the repository, not only leftovers that Python compiled."""
    files = (path.relative_to(package) for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.parts[0] for path in files if len(path.parts) > 1}


def docstring_of(package: Path) -> str:
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text()), clean=False) or ""


def nested_packages() -> Iterator[str]:
    """Yield the packages below the top that have folders, except tests, where names follow the tested folders."""
    for name in PACKAGES:
        for path in sorted((REPOSITORY / name).rglob("*/__init__.py")):
            if folders_of(path.parent) and name != "tests":
                yield str(path.parent.relative_to(REPOSITORY))


@pytest.mark.parametrize("name", PACKAGES)
def test_folder_map_lists_every_folder(name: str) -> None:
    listed = LINE.findall(docstring_of(REPOSITORY / name))
    folders = folders_of(REPOSITORY / name)
    assert sorted(folders - set(listed)) == [], f"folders without a line in the docstring of {name}/__init__.py"
    assert sorted(set(listed) - folders) == [], f"lines for folders that do not exist in the docstring of {name}/__init__.py"
    assert len(listed) == len(set(listed)), f"{name}/__init__.py lists a folder twice"


@pytest.mark.parametrize("name", list(nested_packages()))
def test_nested_package_mentions_its_folders(name: str) -> None:
    docstring = docstring_of(REPOSITORY / name)
    unnamed = [folder for folder in sorted(folders_of(REPOSITORY / name)) if not re.search(rf"\b{folder}/", docstring)]
    assert unnamed == [], f"folders that the docstring of {name}/__init__.py does not mention"
