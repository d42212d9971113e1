"""The README says what is there: every option, route, command, test and package that it names exists, and none is missing."""

from __future__ import annotations

import re

import pytest
from starlette.routing import Route

from api.app import routes
from engine.options.table import OPTIONS
from tests.paths import REPOSITORY
from tools.cli import BENCHES, COMMANDS

README = (REPOSITORY / "README.md").read_text()


def test_every_option_is_in_the_table() -> None:
    rows = re.findall(r"^\| `--(no-)?([a-z-]+)` \| ([^|]*?) ?\|", README, re.MULTILINE)
    named = {name for _, name, _ in rows}
    for negation, name, default in rows:
        option = OPTIONS[name.replace("-", "_")]
        if option.kind.is_flag:
            assert (bool(negation), default) == (option.default, ""), name
        elif option.default not in (None, "", ()):
            assert option.kind.parse(default.partition(" (")[0]) == option.default, name
    assert named == {option.name for option in OPTIONS.values()}


def test_every_route_is_in_the_table() -> None:
    named = set(re.findall(r"`(?:GET|POST|DELETE) (/[^`]*)`", README))
    assert {re.sub(r":\w+", "", route.path) for route in routes() if isinstance(route, Route)} == named


def test_every_command_is_in_the_table() -> None:
    named = set(re.findall(r"^\| `tokamak ([a-z -]+)` \|", README, re.MULTILINE))
    assert named == {command for command in COMMANDS if command != "bench"} | {f"bench {bench}" for bench in BENCHES}


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:tests|tools|engine|workers|api|shm|ops)/[\w./]*)`", README))))
def test_every_path_exists(path: str) -> None:
    assert (REPOSITORY / path).exists()


def test_every_whole_engine_test_is_named() -> None:
    tests = {path.name for path in (REPOSITORY / "tests" / "e2e").glob("test_*.py")}
    assert {name for name in tests if name not in README} == set()
