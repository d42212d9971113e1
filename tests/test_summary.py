"""The summary of the tests names what a machine could not test; here no program is on the path."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.paths import REPOSITORY

PLACE = "tests/tools/deploy/test_files.py"


@pytest.mark.slow
def test_each_missing_tool_has_a_line() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", PLACE, "-k", "systemd_reads or kubectl"]
    bare = {**os.environ, "PATH": "/nowhere"}
    done = subprocess.run(command, cwd=REPOSITORY, env=bare, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    section = done.stdout.partition(" not tested here ")[2].partition("\n")[2].partition("\n=")[0].splitlines()
    named = [line.partition(" is missing")[0] for line in section if not line.startswith("chat templates")]  # if not fetched
    assert named == [
        "the page: chromium or chromedriver",
        "dashboards and alerts: prometheus or promtool",
        "1 test: kubectl",
        "1 test: systemd-analyze",
    ]
