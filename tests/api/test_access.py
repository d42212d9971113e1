"""Access control: names of the server, origins of pages, API keys, the admin key, and the commands themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from api.access import Access, priority_of, source_of
from engine.checkpoint.gguf.convert import gguf_checkpoint
from engine.errors import RequestError
from engine.keys import key_digest
from engine.messages import (
    AbortRequest,
    Detokenize,
    DropWeights,
    ListActors,
    Order,
    Pause,
    RebalanceExperts,
    ReloadWeights,
    Reply,
    ResetEncoderCache,
    ResetPrefixCache,
    RestartActor,
    Resume,
    Tokenize,
)
from tests.api.api_server import OPERATOR, ApiServer
from tests.ggufs import as_type, original_metadata, write_gguf
from tests.paths import REPOSITORY
from tests.waiting import WATCHDOG_S, wait_until

DEMO = REPOSITORY / "tools" / "demo" / "model"
OPEN_PATHS = ("/", "/page/main.js", "/health", "/health/live", "/metrics", "/version", "/load", "/openapi.json")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Server with API keys and without an admin key."""
    digests = tuple(map(key_digest, ("first", "s\xe9cond")))
    keys = {"api_key": digests, "api_key_priority": ((digests[1], 10),), "admin_key": ""}
    names = {"allowed_hosts": ("llm.example",)}
    with ApiServer(tmp_path_factory.mktemp("run"), **keys, **names, allowed_origins=("https://chat.example",)) as running:
        yield running


def asking_with(key: str) -> HTTPConnection:
    return HTTPConnection({"type": "http", "headers": [(b"authorization", f"Bearer {key}".encode())]})


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_api_keys(guarded: ApiServer) -> None:
    for path in OPEN_PATHS:
        assert guarded.get(path).status_code == 200, path
    for headers in ({}, bearer("wrong"), {"authorization": "Basic first"}, {"authorization": "first"}):
        for path in ("/v1/models", "/dashboard", "/dashboard/logs/api0"):
            answer = guarded.get(path, headers=headers)
            assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert guarded.get("/v1/models", headers=bearer("first")).status_code == 200
    assert guarded.get("/v1/models", headers={b"authorization": "bearer s\xe9cond".encode()}).status_code == 200
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/nothing"):
        assert guarded.post(path, {}).status_code == 401
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="first") as client:
        assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices[0].text == "P"


def test_priority_of_keys(guarded: ApiServer) -> None:
    """A key's priority bounds that of its requests; where requests may not choose one, those that do are refused."""
    for key, asked, expected in (
        ("s\xe9cond", None, 10),
        ("s\xe9cond", -5, 10),
        ("s\xe9cond", 20, 20),
        ("first", -5, -5),
        ("first", None, 0),
    ):
        body = {"prompt": "x", "max_tokens": 1, "priority": asked}
        assert guarded.post("/v1/completions", body, headers={b"authorization": f"Bearer {key}".encode()}).status_code == 200
        assert guarded.peer.submits()[-1].priority == expected, (key, asked)
    sources = [submit.source for submit in guarded.peer.submits()[-5:]]  # sources of the requests
    assert len(set(sources[:3])) == len(set(sources[3:])) == 1
    assert sources[0] != sources[4]
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [97]})):
        for key in ("s\xe9cond", "first"):
            assert guarded.post(path, body, headers={b"authorization": f"Bearer {key}".encode()}).status_code == 200
    calls = [message.source for message in guarded.peer.received if isinstance(message, (Tokenize, Detokenize))]
    assert calls[-4:] == [sources[0], sources[4]] * 2
    strict = msgspec.structs.replace(guarded.config, request_priority=False)
    assert [priority_of(asking_with("first"), asked, strict) for asked in (None, 0)] == [0, 0]
    for asked in (1, -1):
        with pytest.raises(RequestError, match="--no-request-priority") as error:
            priority_of(asking_with("first"), asked, strict)
        assert (error.value.status, error.value.param) == (400, "priority")


def test_addresses_of_one_user_are_one_source(server: ApiServer) -> None:
    """A host may use any number of addresses in its IPv6 network."""
    sources = [
        {source_of(HTTPConnection({"type": "http", "headers": [], "client": (host, 1)}), server.config) for host in hosts}
        for hosts in (
            ("2001:db8::1", "2001:0db8:0:0:ffff::2", "2001:db8::"),
            ("2001:db8:0:1::1",),
            ("192.0.2.1", "::ffff:192.0.2.1"),
            ("192.0.2.2", "::ffff:192.0.2.2", "64:ff9b::192.0.2.2"),
            ("64:ff9b::192.0.2.3",),  # its neighbour behind an IPv6 translator
            ("fe80::1%1", "fe80::2%2"),
        )
    ]
    assert [len(each) for each in sources] == [1] * len(sources)
    assert len(set().union(*sources)) == len(sources)


def test_admin_key(server: ApiServer, guarded: ApiServer) -> None:
    """Servers without an admin key take commands only through the control socket."""
    for headers in ({}, bearer("wrong")):
        answer = server.get("/admin/actors", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_admin_key")
    assert server.get("/admin/actors", headers={**OPERATOR, "x-forwarded-for": "1.2.3.4"}).status_code == 200
    for headers in ({}, bearer("x"), bearer("first")):
        answer = guarded.post("/admin/pause", {}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
        assert "--admin-key" in answer.json()["error"]["message"]
    assert guarded.orders == []


PATHS = ("/", "/v1/models", "/tokenize", "/admin/actors", "/health", "/metrics", "/nothing")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"])
def test_foreign_host_name_is_refused(server: ApiServer, guarded: ApiServer, host: str) -> None:
    """Any DNS server can point a name at this machine, for a page of its own."""
    for path in PATHS:
        for each in (server, guarded):
            answer = each.get(path, headers={"host": host, "origin": f"http://{host}", **OPERATOR})
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error"), path
            assert "--allowed-hosts" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "a.localhost", "127.0.0.1:99", "[::1]:8000", "192.168.1.5", ""])
def test_names_that_are_this_machine_s(server: ApiServer, host: str) -> None:
    head = f"GET /version HTTP/1.1\r\nhost: {host}\r\n\r\n" if host else "GET /version HTTP/1.0\r\n\r\n"
    with server.connection(head.encode()) as client:
        assert client.recv(12) == b"HTTP/1.1 200"


def test_names_that_are_allowed(guarded: ApiServer) -> None:
    assert guarded.get("/version", headers={"host": "LLM.example:8000"}).status_code == 200
    everyone = Access(msgspec.structs.replace(guarded.config, allowed_hosts=("*",)))
    public = Access(msgspec.structs.replace(guarded.config, host="0.0.0.0", allowed_hosts=()))
    limited = Access(msgspec.structs.replace(guarded.config, host="0.0.0.0"))
    everyone.check("/", Headers({"host": "any.example"}))
    public.check("/", Headers({"host": "any.example"}))
    with pytest.raises(RequestError, match=r"--allowed-hosts any\.example"):
        limited.check("/", Headers({"host": "any.example"}))


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://[",
        "http://127.0.0.1.evil",
        "http://localhost@evil",
        "file://",
        "https://chat.example.evil",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/admin/pause"])
def test_foreign_origins_are_refused(server: ApiServer, guarded: ApiServer, path: str, origin: str) -> None:
    for each in (server, guarded):
        answer = each.post(path, {"prompt": "x"}, headers={"origin": origin, **OPERATOR})
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
        assert "access-control-allow-origin" not in answer.headers
        asked = {"origin": origin, "access-control-request-method": "POST"}
        assert httpx.options(each.url + path, headers=asked, timeout=WATCHDOG_S).status_code == 403
    assert not any(isinstance(order, Pause) for order in each.orders)


@pytest.mark.parametrize(
    "origin", ["https://chat.example", "http://localhost:3000", "http://127.0.0.1", "https://[::1]:8443", "http://ui.localhost"]
)
def test_local_and_allowed_origins_pass(guarded: ApiServer, server: ApiServer, origin: str) -> None:
    """A browser sends a preflight and then the request; the page can read the refusal. Commands are only for our own page."""
    page = {"origin": origin}
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-api-key"}
    allowed = httpx.options(f"{guarded.url}/v1/completions", headers=page | wanted, timeout=WATCHDOG_S)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, origin)
    assert "x-api-key" in allowed.headers["access-control-allow-headers"]
    for headers, status in ((bearer("first"), 200), ({}, 401)):
        answer = guarded.post("/v1/completions", {"prompt": "x"}, headers=page | headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, origin)
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    for each in (server, guarded):
        assert each.post("/admin/pause", {}, headers=page | OPERATOR).status_code == 403
        assert httpx.options(f"{each.url}/admin/pause", headers=page | wanted, timeout=WATCHDOG_S).status_code == 403
    is_here = origin != "https://chat.example"
    assert server.post("/v1/completions", {"prompt": "x"}, headers=page).status_code == (200 if is_here else 403)


def test_own_page_may_send_commands(server: ApiServer) -> None:
    answer = server.get("/admin/actors", headers={"origin": server.url, **OPERATOR})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


def test_keys_as_anthropic_s_clients_send_them(guarded: ApiServer, server: ApiServer) -> None:
    assert guarded.get("/v1/models", headers={"x-api-key": "first"}).status_code == 200
    assert guarded.get("/v1/models", headers={"x-api-key": "wrong", **bearer("first")}).status_code == 200
    assert guarded.get("/v1/models", headers={"x-api-key": "wrong", **bearer("x")}).status_code == 401
    assert server.get("/admin/actors", headers={"x-api-key": "operator"}).status_code == 200


@pytest.mark.parametrize("host", ["[", "a b", "a:b", "http://x", "[::1", "x" * 300])
def test_a_host_that_is_none(server: ApiServer, host: str) -> None:
    for path in PATHS:
        answer = server.get(path, headers={"host": host, **OPERATOR})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "host")


@pytest.mark.parametrize(
    ("path", "body", "order"),
    [
        ("actors/worker0/restart", {}, RestartActor("worker0", "api0")),
        ("actors/worker0/restart", None, RestartActor("worker0", "api0")),
        ("pause", {}, Pause("abort", "pause")),
        ("pause", {"mode": "wait"}, Pause("wait", "pause")),
        ("resume", None, Resume()),
        ("sleep", {"mode": "keep"}, Pause("keep", "sleep")),
        ("wake", {}, Resume()),
        ("reset_prefix_cache", {}, ResetPrefixCache()),
        ("reset_encoder_cache", {}, ResetEncoderCache()),
        ("reload", {"path": str(DEMO), "mode": "wait", "ranks": [1]}, ReloadWeights(str(DEMO), "wait", [1])),
        ("reload", {}, ReloadWeights("", "requeue", [])),
        ("eplb/rebalance", None, RebalanceExperts(False)),
        ("eplb/rebalance", {"force": True}, RebalanceExperts(True)),
        ("clear_weights", {}, DropWeights("abort")),
        ("abort", {"request_id": "of-another-process"}, AbortRequest("of-another-process")),
    ],
)
def test_commands(server: ApiServer, path: str, body: Any, order: Order) -> None:
    answer = server.order(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["message"] == "done"
    assert server.orders.pop() == order


def test_answers_of_commands(server: ApiServer) -> None:
    ordinary = server.answer
    try:
        server.answer = lambda order: Reply("", 200, "", {"actors": [{"name": "api0", "pid": 1}]})
        assert server.get("/admin/actors", headers=OPERATOR).json()["actors"] == [{"name": "api0", "pid": 1}]
        assert server.orders.pop() == ListActors()
        server.answer = lambda order: Reply("", 409, "the engine is PAUSED")
        refused = server.order("pause", {})
        assert (refused.status_code, refused.json()["error"]["message"]) == (409, "the engine is PAUSED")
    finally:
        server.answer = ordinary


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("pause", {"mode": "maybe"}),
        ("reload", {"ranks": [-1]}),
        ("reload", {"path": 5}),
        ("reload", {"path": "/no/such/weights"}),
        ("reload", {"path": str(DEMO / "config.json")}),
        ("reload", {"path": "owner/model"}),
        ("reload", {"path": "a\0b"}),
        ("reload", {"path": "~nobody-of-this-name/x"}),
        ("abort", {}),
        ("abort", {"request_id": ""}),
    ],
)
def test_invalid_commands_are_refused(server: ApiServer, path: str, body: Any) -> None:
    answer = server.order(path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"]


def test_gguf_file_is_reloaded_as_its_checkpoint(server: ApiServer, tmp_path: Path) -> None:
    """`tokamak ctl reload` does the same."""
    write_gguf(tmp_path / "demo.gguf", DEMO, as_type("F32"), **original_metadata(DEMO))
    answer = server.order("reload", {"path": str(tmp_path / "demo.gguf")})
    assert answer.status_code == 200, answer.text
    assert server.orders.pop() == ReloadWeights(str(gguf_checkpoint(tmp_path / "demo.gguf")), "requeue", [])
    (tmp_path / "other.gguf").write_bytes(b"no such thing")
    answer = server.order("reload", {"path": str(tmp_path / "other.gguf")})
    assert (answer.status_code, "is not a GGUF file" in answer.text) == (400, True), answer.text


def test_abort_by_the_id_that_the_client_knows(server: ApiServer) -> None:
    with server.paced(3):
        answers = []
        body = {"prompt": ["a", "b"], "n": 2}
        asking = threading.Thread(
            target=lambda: answers.append(server.post("/v1/completions", body, headers={"x-request-id": "to-be-aborted"}))
        )
        asking.start()
        wait_until(lambda: len(server.peer.submits("to-be-aborted~")) == 4, what="submitted")
        wait_until(lambda: all(s.num_sent == 3 for s in list(server.peer.streams.values())), what="three tokens each")
        assert server.order("abort", {"request_id": "to-be-aborted"}).status_code == 200
        asking.join()
    assert [choice["finish_reason"] for choice in answers[0].json()["choices"]] == ["abort"] * 4
    wait_until(lambda: len(server.peer.aborts("to-be-aborted~")) == 4, what="told to the engine")


@pytest.mark.parametrize(("path", "order"), [("/clear_load_weight", DropWeights), ("/update_model_weight", ReloadWeights)])
def test_fastdeploys_weight_commands_need_the_admin_key(server: ApiServer, path: str, order: type[Order]) -> None:
    assert server.get(path).status_code == 401
    assert server.post(path, {}).status_code == 401
    num_before = len(server.orders)
    assert server.get(path, headers=OPERATOR).status_code == 200
    assert server.post(path, headers=OPERATOR).status_code == 200
    assert [type(each) for each in server.orders[num_before:]] == [order, order]
