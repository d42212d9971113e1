"""Imports go down only, and actors meet in messages: the architecture, held by reading every module's imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache

import pytest

from tests.paths import REPOSITORY

PACKAGES = ("api", "engine", "ops", "shm", "tools", "workers")
PACKAGE = REPOSITORY / "tools" / "package"  # has `tokamak`
FOREIGN_TO = {  # beginnings of module names -> beginnings of what must not be imported there
    "tokamak": ("api", "engine", "ops", "shm", "tools", "workers"),  # it runs in users' processes
    "shm": ("api", "engine", "ops", "tools", "workers"),
    "ops": ("api", "engine", "shm", "tools", "workers"),
    "engine": ("api", "ops", "tools", "workers"),
    "workers": (
        "api",
        "tools",
        "engine.cache",
        "engine.media",
        "engine.options",
        "engine.scheduler",
        "engine.supervisor",
        "engine.tokenizer",
    ),
    "api": (
        "ops",
        "tools",
        "workers",
        "engine.cache",
        "engine.media",
        "engine.scheduler",
        "engine.supervisor",
        "engine.tokenizer",
    ),
    "engine.messages": (
        "engine.media",
        "engine.cache",
        "engine.process",
        "engine.scheduler",
        "engine.supervisor",
        "engine.tokenizer",
    ),
    "engine.checkpoint": (
        "engine.media",
        "engine.cache",
        "engine.process",
        "engine.scheduler",
        "engine.supervisor",
        "engine.tokenizer",
    ),
    "engine.process": (
        "engine.media",
        "engine.cache",
        "engine.checkpoint",
        "engine.options",
        "engine.scheduler",
        "engine.supervisor",
    ),
    "engine.tokenizer": ("engine.cache", "engine.scheduler", "engine.supervisor"),
    "engine.media": ("engine.cache", "engine.options", "engine.scheduler", "engine.supervisor", "engine.tokenizer"),
    "engine.scheduler": ("engine.media", "engine.cache", "engine.checkpoint", "engine.supervisor", "engine.tokenizer"),
    "engine.cache": ("engine.media", "engine.checkpoint", "engine.scheduler", "engine.supervisor", "engine.tokenizer"),
    "engine.supervisor": ("engine.media", "engine.cache", "engine.scheduler", "engine.tokenizer"),
}
PADDLE_USERS = ("ops", "workers")


@cache
def modules() -> dict[str, ast.Module]:
    """Return every module of the repository by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else REPOSITORY).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(), str(path))
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module imports anywhere, in functions and for annotations too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_below(name: str, beginning: str) -> bool:
    return name == beginning or name.startswith(beginning + ".")


@pytest.fixture(scope="module")
def arrows() -> list[tuple[str, str]]:
    """Return (importing module, imported name) for every import."""
    return [(name, target) for name, tree in modules().items() for target in imported(tree)]


@pytest.mark.parametrize("place", FOREIGN_TO)
def test_imports_go_down_only(arrows: list[tuple[str, str]], place: str) -> None:
    ours = [(name, target) for name, target in arrows if is_below(name, place)]
    assert ours, f"there is no module below {place}"
    assert [arrow for arrow in ours if any(is_below(arrow[1], foreign) for foreign in FOREIGN_TO[place])] == []


def test_only_ops_and_workers_import_paddle(arrows: list[tuple[str, str]]) -> None:
    users = {name.partition(".")[0] for name, target in arrows if is_below(target, "paddle")}
    assert users == set(PADDLE_USERS)


def assert_no_circle(below: Mapping[str, set[str]]) -> None:
    open_: list[str] = []
    done: set[str] = set()

    def visit(name: str) -> None:
        assert name not in open_, " -> ".join([*open_[open_.index(name) :], name])
        if name not in done:
            open_.append(name)
            for target in sorted(below.get(name, ())):
                visit(target)
            done.add(open_.pop())

    for name in sorted(below):
        visit(name)


@pytest.fixture(scope="module")
def between_modules(arrows: list[tuple[str, str]]) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    names = set(modules())
    below: dict[str, set[str]] = {name: set() for name in names}
    for name, target in arrows:
        while target and target not in names:
            target = target.rpartition(".")[0]
        if target and target != name:
            below[name].add(target)
    return below


def test_no_module_is_in_a_circle_of_imports(between_modules: dict[str, set[str]]) -> None:
    assert_no_circle(between_modules)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_is_in_a_circle_of_imports(between_modules: dict[str, set[str]], package: str) -> None:
    """Sibling folders and files import each other in one direction only, at every level of a package."""
    folders = {name.rpartition(".")[0] for name in between_modules if is_below(name, package) and name != package}
    for folder in sorted(folders):
        length = folder.count(".") + 2
        beside: dict[str, set[str]] = {}
        for name, targets in between_modules.items():
            for target in targets:
                if name != folder != target and is_below(name, folder) and is_below(target, folder):
                    one, other = (".".join(each.split(".")[:length]) for each in (name, target))
                    beside.setdefault(one, set()).update({other} - {one})
        assert_no_circle(beside)


def test_actors_are_named_once_and_exist() -> None:
    """Children are known as `module:Class` only; the supervisor imports none of them."""
    from engine.process.topology import TARGETS

    for target in TARGETS.values():
        module, _, class_name = target.partition(":")
        source = REPOSITORY.joinpath(*module.split(".")).with_suffix(".py").read_text()
        assert any(isinstance(node, ast.ClassDef) and node.name == class_name for node in ast.parse(source).body), target
