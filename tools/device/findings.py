"""Findings of `tools/test --device` and `tools/device/card`: whether each check on a card passed, and what could not be run."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

import msgspec


class Outcome(enum.Enum):
    HELD = "held"
    MISSED = "missed"
    NOT_RUN = "not run"


class Finding(msgspec.Struct, frozen=True):
    what: str
    outcome: Outcome
    text: str = ""  # the measurement, the failure, or why it was not run
    values: dict[str, float] = {}  # measurements by name with unit

    @staticmethod
    def of(what: str, is_held: bool, text: str = "", **values: float) -> Finding:
        return Finding(what, Outcome.HELD if is_held else Outcome.MISSED, text, values)

    @property
    def line(self) -> str:
        return f"{self.outcome.value}: {self.what}{': ' if self.text else ''}{self.text}"


Findings = Iterator[Finding]


def least(what: str, found: float, bar: float, unit: str = "") -> Finding:
    """Return the finding for a number that must be at least `bar`."""
    return Finding.of(what, found >= bar, f"{found:.3g}{unit} (bar: at least {bar:g})")


def summary(findings: Iterable[Finding]) -> tuple[list[str], int]:
    """Return the lines of the summary and the exit code: 1 if a check failed or nothing was run."""
    by_outcome: dict[Outcome, list[Finding]] = {outcome: [] for outcome in Outcome}
    for finding in findings:
        by_outcome[finding.outcome].append(finding)
    counts = ", ".join(f"{len(found)} {outcome.value}" for outcome, found in by_outcome.items())
    named = [finding.line for outcome in (Outcome.MISSED, Outcome.NOT_RUN) for finding in by_outcome[outcome]]
    return [counts, *named], int(bool(by_outcome[Outcome.MISSED]) or not by_outcome[Outcome.HELD])
