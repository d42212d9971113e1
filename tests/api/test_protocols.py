"""Properties of every streaming protocol: an answer survives a crash behind the api with the same events and ids."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import orjson
import pytest

from tests.api.api_server import ApiServer
from tests.api.tokenizer_peer import said_text
from tests.waiting import WATCHDOG_S, wait_until

TURN = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": TURN, "max_tokens": 20},
    "/v1/responses": {"input": TURN, "max_output_tokens": 20},
    "/api/chat": {"messages": TURN, "options": {"num_predict": 20}},
}


class Reader:
    """Reader of a stream in a thread, event by event."""

    def __init__(self, server: ApiServer, path: str, name: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._request = {"json": BODIES[path] | {"stream": True}, "headers": {"x-request-id": name}}
        self._url = server.url + path
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with httpx.stream("POST", self._url, timeout=WATCHDOG_S, **self._request) as answer:
            for line in answer.iter_lines():
                if line.startswith(("data: ", "{")):
                    self.events.append(orjson.loads(line.removeprefix("data: ")))

    @property
    def text(self) -> str:
        deltas = [event.get("delta") or event.get("message") or "" for event in self.events]
        return "".join(delta if isinstance(delta, str) else delta.get("text") or _content(delta) for delta in deltas)

    def finish(self) -> None:
        self._thread.join(WATCHDOG_S)
        assert not self._thread.is_alive()


def _content(message: dict[str, Any]) -> str:
    content = message.get("content", "")
    return content if isinstance(content, str) else ""


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_outlives_the_tokenizer(thinker: ApiServer, path: str) -> None:
    name = f"survivor{path.replace('/', '-')}"
    with thinker.paced(10):
        reader = Reader(thinker, path, name)
        wait_until(lambda: reader.text == said_text(9), what="nine tokens, and half a character")
        thinker.restart_tokenizer()
        wait_until(lambda: len(thinker.peer.submits(name)) == 2, what="submitted again")
    reader.finish()
    assert reader.text == said_text(20)
    if path == "/api/chat":
        assert [event["done"] for event in reader.events] == [False] * (len(reader.events) - 1) + [True]
        return
    kinds = [event["type"] for event in reader.events if event["type"] != "ping"]
    if path == "/v1/messages":
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    else:
        assert [event["sequence_number"] for event in reader.events] == list(range(len(reader.events)))
        assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")
        ids = {event["item_id"] for event in reader.events if "item_id" in event}
        assert ids == {item["id"] for item in reader.events[-1]["response"]["output"]}


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
def test_leaving_client_aborts_its_request(thinker: ApiServer, path: str, is_stream: bool) -> None:
    name = f"leaves{path.replace('/', '-')}-{is_stream}"
    body = orjson.dumps(BODIES[path] | {"stream": is_stream})
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nx-request-id: {name}\r\nContent-Length: {len(body)}\r\n\r\n"
    with thinker.paced(3):
        with thinker.connection(head.encode() + body):
            wait_until(lambda: thinker.peer.submits(name), what="submitted")
        wait_until(lambda: thinker.peer.aborts(name), what="aborted")
    wait_until(lambda: thinker.count("open_requests") == 0, what="nothing is open")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_sampling_fields_are_those_of_chat(thinker: ApiServer, path: str) -> None:
    fields = {"min_p": 0.5, "logit_bias": {"5": -3}, "bad_words": ["x"], "stop": ["END"], "truncate_prompt_tokens": 7}
    answer = thinker.post(
        path, BODIES[path] | fields | {"guided_regex": "a+", "priority": 4, "seed": 7, "cache_salt": "s", "n": None}
    )
    assert answer.status_code == 200, answer.text
    submit = thinker.peer.submits()[-1]
    assert (submit.sampling.min_p, submit.sampling.logit_bias, submit.sampling.seed, submit.priority) == (0.5, {5: -3.0}, 7, 4)
    assert submit.text.format is not None
    assert (submit.text.stop, submit.text.bad_words, submit.text.format.text) == (["END"], ["x"], "a+")
    assert (submit.text.truncate_prompt_tokens, submit.options.cache_salt) == (7, "s")
    assert (
        thinker.post(path, BODIES[path] | {"user": "me", "stream_options": {"include_obfuscation": False}}).status_code == 200
    )


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/v1/messages", {"n": 2}, "n: only supported at /v1/chat/completions"),
        ("/v1/messages", {"stop_sequences": ["a"], "stop": ["b"]}, "stop: send stop_sequences"),
        ("/v1/messages", {"guided_json": {"not": 1}, "guided_regex": "a"}, "guided_regex"),
        ("/v1/messages", {"min_p": 2}, "min_p: expected"),
        ("/v1/responses", {"max_tokens": 5}, "max_tokens: send max_output_tokens"),
        ("/v1/responses", {"return_token_ids": True}, "return_token_ids: "),
        (
            "/v1/responses",
            {"response_format": {"type": "json_object"}, "text": {"format": {"type": "json_object"}}},
            "send text.f",
        ),
        ("/v1/responses", {"stop": 1}, "stop: expected"),
    ],
)
def test_fields_of_chat_that_other_protocols_lack(thinker: ApiServer, path: str, fields: dict[str, Any], says: str) -> None:
    answer = thinker.post(path, BODIES[path] | fields)
    assert (answer.status_code, answer.json()["error"]["message"].count(says)) == (400, 1), answer.text
