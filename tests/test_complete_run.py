"""A run that would lose tests fails, in one process and with xdist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

CONFTEST = """
import pytest
from tests.complete_run import CompleteRun

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(CompleteRun())

class Nameless(pytest.Item):
    nodeid = property(lambda self: "test_tiny.py::test_nameless")
    def runtest(self):
        pass

def pytest_collection_modifyitems(config, session, items):
    if config.getoption("--nameless"):
        items += [Nameless.from_parent(session, name=str(index)) for index in range(2)]

def pytest_addoption(parser):
    parser.addoption("--nameless", action="store_true")
    parser.addoption("--lose", action="store_true")

def pytest_runtest_protocol(item):
    return True if item.config.getoption("--lose") and item.name == "test_second" else None
"""
TESTS = "def test_first(): pass\ndef test_second(): pass\n"
pytestmark = pytest.mark.slow
PROCESSES = ("0", "1")


def run(place: Path, *options: str) -> subprocess.CompletedProcess[str]:
    place.joinpath("conftest.py").write_text(CONFTEST)
    place.joinpath("test_tiny.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:schemathesis",
        "--rootdir",
        str(place),
        *options,
    ]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("processes", PROCESSES)
def test_whole_run_passes(tmp_path: Path, processes: str) -> None:
    done = run(tmp_path, "-n", processes)
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.parametrize("processes", PROCESSES)
def test_unfinished_test_fails_the_run(tmp_path: Path, processes: str) -> None:
    done = run(tmp_path, "-n", processes, "--lose")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "collected 2 tests, 1 of them did not finish:\ntest_tiny.py::test_second\n" in done.stdout


@pytest.mark.parametrize("processes", PROCESSES)
def test_shared_node_id_fails_the_run(tmp_path: Path, processes: str) -> None:
    done = run(tmp_path, "-n", processes, "--nameless")
    assert done.returncode != 0
    assert "tests share a node id" in done.stdout + done.stderr
    assert "test_tiny.py::test_nameless (2 tests)" in done.stdout + done.stderr


def test_selected_and_listed_tests_pass(tmp_path: Path) -> None:
    assert run(tmp_path, "-k", "first").returncode == 0
    assert run(tmp_path, "--collect-only").returncode == 0
