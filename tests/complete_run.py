"""Pytest plugin that fails a run which would silently lose tests: where two tests share a node id (xdist runs one of them), and
where fewer tests finished than were collected. `tests/conftest.py` registers it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

_NUM_NAMED = 10  # lost tests that the summary names


class CompleteRun:
    def __init__(self) -> None:
        self._collected = Counter[str]()
        self._finished = Counter[str]()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """Take the node ids of a worker: the process that distributes tests collects none itself."""
        self._collect(ids)

    def _collect(self, ids: Sequence[str]) -> None:
        self._collected = Counter(ids)
        if shared := [f"{nodeid} ({count} tests)" for nodeid, count in self._collected.items() if count > 1]:
            raise pytest.UsageError(f"tests share a node id, so that xdist would run one of them: {', '.join(shared)}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._finished[report.nodeid] += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if session.config.option.collectonly:
            self._collected.clear()
        elif exitstatus == pytest.ExitCode.OK and self._lost():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.OK or not (lost := self._lost()):
            return
        terminalreporter.section("tests that did not run", red=True)
        terminalreporter.write_line(f"collected {self._collected.total()} tests, {len(lost)} of them did not finish:")
        terminalreporter.write_line("\n".join(lost[:_NUM_NAMED]))

    def _lost(self) -> list[str]:
        return list((self._collected - self._finished).elements())
