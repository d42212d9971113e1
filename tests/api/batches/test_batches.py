"""Files and batches with the real client: contents, access, and refusals."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from api.batches.batch import MAX_REQUESTS, count_requests
from api.batches.routes import MAX_STORED
from engine.errors import RequestError
from tests.api.api_server import CHILD, ApiServer
from tests.api.tokenizer_peer import said_text
from tests.waiting import WATCHDOG_S, wait_until

LIMIT = 3 << 20


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("run"), max_files_size_per_user=LIMIT, max_num_seqs=4) as running:
        yield running


@pytest.fixture(scope="module")
def client(keeper: ApiServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{keeper.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def line(custom_id: str, num_tokens: int = 3, **fields: Any) -> str:
    body = {"prompt": custom_id, "max_tokens": num_tokens, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def begin(client: openai.OpenAI, *lines: str, endpoint: Any = "/v1/completions") -> Any:
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"})


def names(server: ApiServer) -> list[str]:
    return sorted(path.name for path in server.run.files_path.glob("*"))


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    found: list[Any] = []

    def is_over() -> bool:
        found[:] = [client.batches.retrieve(batch_id)]
        return found[0].status in ("completed", "failed", "expired", "cancelled")

    wait_until(is_over, what="the batch is over")
    return found[0]


def answers(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    found = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def test_file_content_is_returned_unchanged(client: openai.OpenAI, tmp_path: Path) -> None:
    content = os.urandom(200_000)
    (tmp_path / "ä b.bin").write_bytes(content)
    made = client.files.create(file=tmp_path / "ä b.bin", purpose="user_data")
    assert (made.object, made.bytes, made.filename, made.purpose) == ("file", len(content), "ä b.bin", "user_data")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content
    other = client.files.create(file=("x", b""), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert other.expires_at == other.created_at + 3600
    assert {file.id for file in client.files.list()} >= {made.id, other.id}
    assert {file.purpose for file in client.files.list(purpose="batch")} == {"batch"}
    page = client.files.list(limit=1)
    assert ([file.id for file in page.data], page.has_more) == ([client.files.list().data[0].id], True)
    for file in (made, other):
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        with pytest.raises(openai.NotFoundError):
            client.files.delete(file.id)


def test_batch_is_answered_line_by_line(keeper: ApiServer, client: openai.OpenAI) -> None:
    lines = [*(line(f"r{number}", 3 + number) for number in range(20)), line("wrong", temperature=7)]
    batch = begin(client, *lines)
    assert (batch.object, batch.endpoint, batch.completion_window, batch.metadata) == (
        "batch",
        "/v1/completions",
        "24h",
        {"a": "b"},
    )
    done = ended(client, batch.id)
    assert (done.status, done.errors) == ("completed", None)
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
    found = answers(client, done.output_file_id)
    assert {key: each["response"]["body"]["choices"][0]["text"] for key, each in found.items()} == {
        f"r{number}": said_text(3 + number) for number in range(20)
    }
    assert all(each["response"]["status_code"] == 200 and each["error"] is None for each in found.values())
    (failed,) = answers(client, done.error_file_id).values()
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("wrong", 400)
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    assert batch.id in [each.id for each in client.batches.list()]
    submits = [submit for submit in keeper.peer.submits() if submit.priority == 1_000_000]
    assert len(submits) == 20
    assert len({submit.source for submit in submits}) == 1
    client.completions.create(model="tiny", prompt="a", max_tokens=1)
    assert keeper.peer.submits()[-1].source != submits[0].source
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_every_endpoint_of_batches_is_answered(client: openai.OpenAI) -> None:
    bodies: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ]
    for endpoint, body in bodies:
        text = json.dumps({"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "tiny", **body}})
        done = ended(client, begin(client, text, endpoint=endpoint).id)
        assert (done.status, done.request_counts.completed) == ("completed", 1)
        assert answers(client, done.output_file_id)["a"]["response"]["body"]["model"] == "tiny"


@pytest.mark.parametrize("victim", ["tokenizer", "api"])
def test_batch_continues_after_a_kill(keeper: ApiServer, client: openai.OpenAI, victim: str) -> None:
    with keeper.paced(5):
        batch = begin(client, *(line(f"r{number}", 3 if number < 6 else 9) for number in range(20)))
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 6, what="some are answered")
        wait_until(lambda: keeper.count("open_requests") == 2, what="two are under way")
        if victim == "tokenizer":
            keeper.restart_tokenizer()
        else:
            keeper.child.kill()
            keeper.child.wait()
            keeper.start_child(keeper.counters.actor(CHILD).epoch + 1)
    done = ended(client, batch.id)
    assert (done.status, done.request_counts.completed) == ("completed", 20)
    found = answers(client, done.output_file_id)
    assert {key: each["response"]["body"]["choices"][0]["text"] for key, each in found.items()} == {
        f"r{number}": said_text(3 if number < 6 else 9) for number in range(20)
    }


def test_cancelled_batch_keeps_its_answers(keeper: ApiServer, client: openai.OpenAI) -> None:
    with keeper.paced(5):
        batch = begin(client, *(line(f"r{number}", 3 if number < 6 else 9) for number in range(20)))
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 6, what="some are answered")
        with pytest.raises(openai.ConflictError, match=batch.id):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        done = ended(client, batch.id)
        wait_until(lambda: keeper.count("open_requests") == 0, what="the engine has dropped the rest")
    assert (done.status, len(answers(client, done.output_file_id))) == ("cancelled", 6)
    assert client.batches.cancel(batch.id).status == "cancelled"
    assert client.files.delete(batch.input_file_id).deleted


def test_expired_batch_keeps_its_answers(keeper: ApiServer, client: openai.OpenAI) -> None:
    with keeper.paced(5):
        batch = begin(client, *(line(f"r{number}", 3 if number < 6 else 9) for number in range(20)))
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 6, what="some are answered")
        keeper.child.kill()
        keeper.child.wait()
        path = keeper.run.files_path / f"{batch.id}.json"
        stored = json.loads(path.read_text())
        stored["batch"]["expires_at"] = 1
        path.write_text(json.dumps(stored))
        keeper.start_child(keeper.counters.actor(CHILD).epoch + 1)
        done = ended(client, batch.id)
    assert done.status == "expired"
    assert len(answers(client, done.output_file_id)) >= 6


GOOD = line("a")
WRONG_FILES: list[tuple[bytes, str]] = [
    (b"", "no request"),
    (b"\n \n", "no request"),
    (b"{", "line 1"),
    (GOOD.encode() + b"\nnonsense", "line 2"),
    (b"\xff\xfe\x00", "line 1"),
    (b"[" * 100_000, "line 1"),
    (f"{GOOD}\n{GOOD}".encode(), "lines 1 and 2 have the same custom_id"),
    (GOOD.replace("/v1/completions", "/admin/pause").encode(), "line 1"),
    (GOOD.replace("/v1/completions", "/v1/embeddings").encode(), "endpoint of the batch is /v1/completions"),
    (GOOD.replace("POST", "GET").encode(), "method"),
    (line("a", stream=True).encode(), "stream"),
    (line("a", background=True).encode(), "background"),
    (b"\n".join(line(str(number)).encode() for number in range(8)) + b"\n{}", "line 9"),
]


@pytest.mark.parametrize(("content", "what"), WRONG_FILES)
def test_file_with_a_wrong_line_is_refused(client: openai.OpenAI, content: bytes, what: str) -> None:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    with pytest.raises(openai.BadRequestError) as raised:
        client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    assert raised.value.param == "input_file_id"
    assert what in raised.value.message
    client.files.delete(file.id)


def test_too_many_requests_are_refused(tmp_path: Path) -> None:
    requests = [b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{}}\n' % n for n in range(MAX_REQUESTS + 1)]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(requests[:-1]))
    assert count_requests(path, "/v1/completions") == MAX_REQUESTS
    path.write_bytes(b"".join(requests))
    with pytest.raises(RequestError, match="50000 requests"):
        count_requests(path, "/v1/completions")


def test_files_of_a_user_are_limited(keeper: ApiServer, client: openai.OpenAI) -> None:
    """A file over the limit is refused and leaves no bytes behind."""
    kept = client.files.create(file=("a", b"x" * (LIMIT // 2)), purpose="user_data")
    before = names(keeper)
    for size in (LIMIT // 2 + 4096, 4 * LIMIT):
        with pytest.raises(openai.APIStatusError) as raised:
            client.files.create(file=("b", b"x" * size), purpose="user_data")
        assert (raised.value.status_code, raised.value.code) == (413, "file_storage_full")
    assert names(keeper) == before
    client.files.delete(kept.id)
    client.files.delete(client.files.create(file=("b", b"x" * (LIMIT // 2)), purpose="user_data").id)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", ".", "a/b", "a\\b", "a\x1bb", "x" * 256])
def test_name_with_a_path_is_refused(keeper: ApiServer, name: str) -> None:
    files = {"file": (name, b"x")}
    answer = httpx.post(f"{keeper.url}/v1/files", files=files, data={"purpose": "batch"}, timeout=WATCHDOG_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file"), answer.text


BOUNDARY = "multipart/form-data; boundary=b"
PART = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
FILE, PURPOSE = PART % (b"file", b'; filename="f"', b"x"), PART % (b"purpose", b"", b"batch")
WRONG_BODIES: list[tuple[str, bytes]] = [
    ("application/json", b"{}"),
    ("multipart/form-data", FILE + PURPOSE + b"--b--\r\n"),
    (BOUNDARY, b""),
    (BOUNDARY, b"nonsense"),
    (BOUNDARY, b"--b--\r\n"),
    (BOUNDARY, FILE + b"--b--\r\n"),
    (BOUNDARY, PURPOSE + b"--b--\r\n"),
    (BOUNDARY, FILE + PART % (b"purpose", b"", b"fun") + b"--b--\r\n"),
    (BOUNDARY, FILE + PART % (b"purpose", b"", b"batch_output") + b"--b--\r\n"),
    (BOUNDARY, FILE + FILE + PURPOSE + b"--b--\r\n"),
    (BOUNDARY, FILE + PURPOSE + PART % (b"x", b"", b"y" * 5000) + b"--b--\r\n"),
    (BOUNDARY, FILE + PURPOSE * 30 + b"--b--\r\n"),
    (BOUNDARY, b"--b\r\n" + b"A: b\r\n" * 5000 + b"\r\nx\r\n--b--\r\n"),
    (BOUNDARY, b"--b\r\nA: " + b"b" * 100_000 + b"\r\n\r\nx\r\n--b--\r\n"),
    (BOUNDARY, FILE + PART % (b"purpose", b"", b"\xff") + b"--b--\r\n"),
    (BOUNDARY, FILE + PURPOSE),
    (BOUNDARY, FILE + PURPOSE + PART % (b"expires_after[seconds]", b"", b"000000003600" + b"9" * 900) + b"--b--\r\n"),
    (BOUNDARY, FILE + PURPOSE + b"--b--\r\n" + b"x" * 100_000),
]


@pytest.mark.parametrize(("kind", "body"), WRONG_BODIES)
def test_wrong_upload_is_refused(keeper: ApiServer, kind: str, body: bytes) -> None:
    before = names(keeper)
    headers = {"content-type": kind}
    answer = httpx.post(f"{keeper.url}/v1/files", content=body, headers=headers, timeout=WATCHDOG_S)
    assert answer.status_code == 400, answer.text
    assert names(keeper) == before


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        *(
            (f"/v1/files/{name}{end}", "", 404)
            for name, end in itertools.product(("file-x", "..%2f..", "a" * 5000), ("", "/content"))
        ),
        ("/v1/batches/batch_x", "", 404),
        ("/v1/batches/file-" + "0" * 32, "", 404),
        ("/v1/files", "limit=0", 400),
        ("/v1/files", "limit=000000001" + "9" * 5000, 400),
        ("/v1/batches", "limit=000000001" + "9" * 20, 400),
        ("/v1/files", "after=x", 400),
        ("/v1/batches", "limit=101", 400),
        ("/v1/batches", "limit=x", 400),
    ],
)
def test_unknown_id_or_wrong_query_is_refused(keeper: ApiServer, path: str, query: str, status: int) -> None:
    assert keeper.get(f"{path}?{query}").status_code == status


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input_file_id": "file-x"}, 404, "input_file_id"),
        ({"input_file_id": "../x"}, 404, "input_file_id"),
        ({"input_file_id": "batch_" + "0" * 32}, 404, "input_file_id"),
        ({"endpoint": "/admin/pause"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {str(number): "" for number in range(17)}}, 400, "metadata"),
        ({"metadata": {"a": "b" * 513}}, 400, "metadata[...]"),
        ({"metadata": {"a" * 65: "b"}}, 400, "metadata"),
    ],
)
def test_wrong_batch_is_refused(keeper: ApiServer, fields: dict[str, Any], status: int, param: str) -> None:
    body = {"input_file_id": "file-" + "0" * 32, "endpoint": "/v1/completions", "completion_window": "24h", **fields}
    answer = keeper.post("/v1/batches", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_batch_waits_for_storage_room(keeper: ApiServer, client: openai.OpenAI) -> None:
    """A batch without room for its output reports that, and goes on once files are deleted."""
    file = client.files.create(file=("in.jsonl", "\n".join(line(f"r{n}") for n in range(6)).encode()), purpose="batch")
    used = sum(entry.stat().st_size for entry in os.scandir(keeper.run.files_path))
    filler = client.files.create(file=("a", b"x" * (LIMIT - used - 2048)), purpose="user_data")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).errors is not None, what="it waits for room")
    errors = client.batches.retrieve(batch.id).errors
    assert errors is not None
    ((code, message),) = [(each.code, each.message or "") for each in errors.data or ()]
    assert code == "no_room"
    assert message.startswith("waiting for room: file storage is full")
    client.files.delete(filler.id)
    done = ended(client, batch.id)
    assert (done.status, done.errors, len(answers(client, done.output_file_id))) == ("completed", None, 6)


def test_oldest_batch_that_is_over_makes_room(keeper: ApiServer, client: openai.OpenAI) -> None:
    first = begin(client, line("a"))
    ended(client, first.id)
    stored = json.loads((keeper.run.files_path / f"{first.id}.json").read_text())
    owner = first.id[: len("batch_") + 8]
    old = [f"{owner}{number:024x}" for number in range(MAX_STORED)]
    for batch_id in old:
        stored["batch"] |= {"id": batch_id, "created_at": 1}
        (keeper.run.files_path / f"{batch_id}.json").write_text(json.dumps(stored))
    last = begin(client, line("a"))
    assert ended(client, last.id).status == "completed"
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve(old[0])
    assert client.batches.retrieve(first.id).status == "completed"
    left = {each.id for each in client.batches.list(limit=100)}
    assert {first.id, last.id} <= left
    for batch_id in old:
        (keeper.run.files_path / f"{batch_id}.json").unlink(missing_ok=True)


def test_file_lives_as_long_as_its_batch(client: openai.OpenAI) -> None:
    soon: Any = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("in.jsonl", line("a").encode()), purpose="batch", expires_after=soon)
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    assert client.files.retrieve(file.id).expires_at == batch.expires_at


def test_upload_of_a_dead_process_makes_room(keeper: ApiServer, client: openai.OpenAI) -> None:
    half = FILE[:-2] + b"x" * (LIMIT // 2)
    head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: {BOUNDARY}\r\nContent-Length: {LIMIT}\r\n\r\n"
    with keeper.connection(head.encode() + half):
        wait_until(
            lambda: any(path.stat().st_size >= LIMIT // 2 for path in keeper.run.files_path.glob(".file-*")), what="it is begun"
        )
        keeper.child.kill()
        keeper.child.wait()
    keeper.start_child(keeper.counters.actor(CHILD).epoch + 1)
    made = client.files.create(file=("b", b"x" * (LIMIT - LIMIT // 4)), purpose="user_data")
    assert not list(keeper.run.files_path.glob(".file-*"))
    client.files.delete(made.id)
