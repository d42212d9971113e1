"""The pages of `.github/decisions/` are numbered without a gap, have their sections and are listed."""

from __future__ import annotations

import re

from tests.paths import REPOSITORY

DECISIONS = REPOSITORY / ".github" / "decisions"
HEAD = re.compile(r"# (\d+)\. \S.*\n\n\d{4}-\d{2}-\d{2}, \S.*\n\n## Context\n\n")


def test_decisions_are_numbered_dated_and_listed() -> None:
    pages = sorted(path for path in DECISIONS.glob("*.md") if path.name != "README.md")
    listed = re.findall(r"^- \[(\d{4})\]\((\S+)\) \S", (DECISIONS / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [(path.name[:4], path.name) for path in pages]
    assert [int(path.name[:4]) for path in pages] == list(range(1, len(pages) + 1))
    for path in pages:
        text = path.read_text()
        head = HEAD.match(text)
        assert head is not None, f"{path.name} does not begin with its number, title, date and context"
        assert (int(head[1]), "\n## Decision\n\n" in text) == (int(path.name[:4]), True), path.name
