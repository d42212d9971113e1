"""Valid and invalid lines of a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from api.batches import lines
from api.batches.lines import MAX_LINE_BYTES, Request, answer_line, answered, requests_in
from tokamak.connection import Reply

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "é", "stream": False}}


def read(tmp_path: Path, *contents: bytes, max_line_bytes: int = MAX_LINE_BYTES) -> list[Request]:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\n".join(contents))
    return list(requests_in(file, max_line_bytes))


def test_valid_lines_are_read(tmp_path: Path) -> None:
    """Empty lines, Windows line ends and a byte order mark are skipped; the body is passed on unchanged."""
    text = json.dumps(GOOD, ensure_ascii=False).encode()
    found = read(tmp_path, b"\xef\xbb\xbf" + text + b"\r", b"", b"  ", text)
    assert [(each.number, each.custom_id, each.url, each.error) for each in found] == [
        (1, "a", "/v1/completions", None),
        (4, "a", "/v1/completions", None),
    ]
    assert json.loads(found[0].body) == GOOD["body"]


WRONG: list[tuple[Any, str | None, str, str]] = [
    ("{", None, "invalid_json_line", "truncated"),
    ("[]", None, "invalid_json_line", "object"),
    ("[" * 100_000, None, "invalid_json_line", ""),
    ({**GOOD, "custom_id": 3}, None, "invalid_json_line", "custom_id"),
    ({**GOOD, "custom_id": ""}, None, "invalid_request", "empty"),
    ({"custom_id": "a", "method": "POST", "url": "/v1/completions"}, "a", "invalid_request", "body"),
    ({**GOOD, "body": []}, "a", "invalid_request", "object"),
    ({**GOOD, "body": {"stream": True}}, "a", "invalid_request", "stream"),
    ({**GOOD, "method": "GET"}, "a", "invalid_method", "'GET'"),
    ({**GOOD, "url": "/admin/pause"}, "a", "invalid_url", "/v1/score"),
    ({**GOOD, "url": "http://elsewhere/v1/completions"}, "a", "invalid_url", "elsewhere"),
]


@pytest.mark.parametrize(("line", "custom_id", "code", "what"), WRONG)
def test_invalid_line_gets_an_error(tmp_path: Path, line: Any, custom_id: str | None, code: str, what: str) -> None:
    """The invalid line gets an error as its answer, and the next line is read."""
    text = line if isinstance(line, str) else json.dumps(line)
    found, following = read(tmp_path, text.encode(), json.dumps(GOOD).encode())
    assert following.error is None
    assert found.error is not None
    assert (found.custom_id, found.error.code) == (custom_id, code)
    assert found.error.message.startswith("line 1: ")
    assert what in found.error.message
    answer = json.loads(answer_line(found, None))
    assert (answer["custom_id"], answer["response"], answer["error"]["code"]) == (custom_id, None, code)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    found, _ = read(tmp_path, b'{"custom_id": "\xff"}', json.dumps(GOOD).encode())
    assert found.error is not None


def test_a_line_without_end(tmp_path: Path) -> None:
    found, following = read(tmp_path, b"x" * 5000, json.dumps(GOOD).encode(), max_line_bytes=200)
    assert found.error is not None
    assert (found.error.code, following.error, following.number) == ("line_too_long", None, 2)


@pytest.mark.parametrize(
    ("body", "shown"),
    [(b'{"a": 1.10}\n', {"a": 1.1}), (b'{\n "a": [\r\n]}', {"a": []}), (b"<html>\n</html>", "<html>\n</html>"), (b"", "")],
)
def test_an_answer_is_one_line(body: bytes, shown: Any) -> None:
    line = answer_line(Request(1, "é", "/v1/completions"), Reply(200, body, None, "the-id"))
    assert (line.count(b"\n"), line[-1:]) == (1, b"\n")
    assert line.startswith(lines.ANSWER_BEGINS)
    answer = json.loads(line)
    assert answer["response"] == {"status_code": 200, "request_id": "the-id", "body": shown}
    assert (answer["custom_id"], answer["error"]) == ("é", None)
    assert answered(line)[1:] == ("é", True)


def test_an_error_is_an_answer_too() -> None:
    line = answer_line(Request(1, "a", "/v1/completions"), Reply(400, b'{"error": {"message": "no"}}'))
    assert answered(line)[1:] == ("a", False)
    assert json.loads(line)["response"]["status_code"] == 400
