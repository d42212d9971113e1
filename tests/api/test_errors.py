"""A user's mistake is a 4xx in OpenAI's shape that names the parameter, and the server keeps serving."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from api.schemas.unsupported import FIELDS, OF_CHATS
from tests.api.api_server import OPERATOR, ApiServer
from tests.waiting import WATCHDOG_S

CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(autouse=True)
def no_server_errors(server: ApiServer) -> Iterator[None]:
    """Check that no test caused a 5xx."""
    before = server.count("http_responses_total", status="5xx")
    yield
    assert server.count("http_responses_total", status="5xx") == before
    assert server.counters.errors.entries() == []
    assert server.count("open_requests") == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b'{"prompt": "\xff\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "x", "deep": ' + b"[" * 500 + b"]" * 500 + b"}]}",
        b'{"messages": [], "chat_template_kwargs": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    ],
)
@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize", "/detokenize", "/admin/reload"],
)
def test_malformed_bodies(server: ApiServer, path: str, content: bytes) -> None:
    if (path == "/admin/reload" and content in (b"", b'{"prompt": "a"}')) or (b'"messages"' in content and "admin" in path):
        return  # a reload of the weights in use, with unknown fields
    answer = server.post(path, content=content, headers=OPERATOR)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) >= ({"message", "type"} if "messages" in path else {"message", "type", "param", "code"})
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("param", "value", "says"),
    [
        ("prompt", 5, "a list of at least 1 entries, got 5"),
        ("prompt", None, "null"),
        ("prompt", [], "at least 1"),
        ("prompt", [[]], "at least 1"),
        ("prompt", [1, "a"], "a list must contain"),
        ("prompt", [-1], "got -1"),
        ("prompt", [10**12], "got 1000000000000"),
        ("prompt", [1024], "1024"),
        ("prompt", [1.5], "got 1.5"),
        ("prompt", [True], "got true"),
        ("temperature", -0.1, "got -0.1"),
        ("temperature", "hot", "got 'hot'"),
        ("temperature", 2.1, "from 0 to 2"),
        ("top_p", -0.1, "from 0 to 1"),
        ("top_p", 1.1, "from 0 to 1"),
        ("top_k", -2, "from -1 to"),
        ("min_p", 1.5, "from 0 to 1"),
        ("repetition_penalty", 0, "above 0 to 10"),
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("frequency_penalty", -2.5, "from -2 to 2"),
        ("n", 0, "from 1 to 128"),
        ("n", 100_000, "from 1 to 128"),
        ("best_of", 0, "from 1 to 128"),
        ("max_tokens", -1, "from 0 to"),
        ("max_tokens", 1.5, "got 1.5"),
        ("min_tokens", 50, "max_tokens"),
        ("logprobs", 21, "--max-logprobs"),
        ("logprobs", 129, "from 0 to 128"),
        ("logprobs", True, "got true"),
        ("prompt_logprobs", -1, "from 0 to 128"),
        ("stop", 5, "got 5"),
        ("stop", [""], "1 to 1024 characters"),
        ("stop", ["a"] * 1000, "at most 64"),
        ("stop_token_ids", [99999], "99999"),
        ("allowed_token_ids", [], "at least 1"),
        ("bad_words", [""], "1 to 1024 characters"),
        ("logit_bias", {"x": 1}, "str"),
        ("logit_bias", {"5": 101}, "<= 100"),
        ("logit_bias", {"99999": 1}, "99999"),
        ("logit_bias", [1], "array"),
        ("seed", "x", "got 'x'"),
        ("seed", 2**63, "to 9223372036854775807"),
        ("seed", 2**70, "to 9223372036854775807"),
        ("stream", "yes", "true or false"),
        ("stream_options", {}, "stream is true"),
        ("priority", 2**70, "from -2147483647 to"),
        ("timeout", 0, "above 0 to 86400"),
        ("model", 5, "a string, got 5"),
        ("suffix", 5, "got 5"),
    ],
)
def test_wrong_parameters_name_themselves(server: ApiServer, param: str, value: Any, says: str) -> None:
    answer = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 4, param: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].partition("[")[0] == param
    assert param in error["message"]
    assert says in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 600, "n": 2}, "prompt"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": [[5], [5000]]}, "prompt"),
        ({"prompt": "x" * 3_000_000}, "prompt"),
        ({"prompt": "x" * 10_000_000}, "prompt"),
    ],
)
def test_parameters_that_do_not_go_together(server: ApiServer, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/completions", {"prompt": "hello", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "structured_outputs": {"json_object": True}}, "guided_regex"),
        ({"tool_choice": "requires"}, "tool_choice"),
        ({"tool_choice": "x - at `$.messages[9]`"}, "tool_choice"),
        ({"tool_choice": "x - at `key` in `$.messages[9]`"}, "tool_choice"),
        ({"tool_choice": "Object missing required field `x` - at `$.y`"}, "tool_choice"),
        ({"response_format": {"type": "x - at `$.messages[9]`"}}, "response_format.type"),
        ({"response_format": {"type": "x - at `$" * 300_000}}, "response_format.type"),
        ({"tools": [{}] * 70_000}, None),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"max_completion_tokens": 1000, "fit_max_tokens": False}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ],
)
def test_wrong_conversations(server: ApiServer, fields: dict[str, Any], param: str | None) -> None:
    of_both = fields.keys() & {"messages", "tool_choice", "tools", "chat_template_kwargs"}
    for path in ("/v1/chat/completions", "/tokenize") if of_both else ("/v1/chat/completions",):
        answer = server.post(path, {**CHAT, **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert len(answer.content) < 1000


ASKED: dict[str, Any] = {
    **{"audio": {"voice": "x"}, "function_call": {"name": "f"}, "functions": [{"name": "f"}], "modalities": ["text", "audio"]},
    **{"verbosity": "low", "web_search_options": {}, "ebnf": "x", "logits_processors": ["x"], "prompt_embeds": "x"},
    **{
        "regex": "a",
        "spaces_between_special_tokens": False,
        "stop_regex": "a",
        "use_beam_search": True,
        "vllm_xargs": {"a": 1},
    },
    **{"custom_logit_processor": "x", "lora_path": "a", "no_stop_trim": True},
    **{"dynatemp_range": 0.5, "grammar": "root ::= x", "json_schema": {}, "lora": [{"id": 0}], "mirostat": 2, "n_predict": 5},
    **{"adaptive_target": 0.5, "image_data": [{"data": ""}], "min_keep": 2, "n_cmpl": 2, "n_indent": 1, "repeat_last_n": 64},
    **{"post_sampling_probs": True, "reasoning_in_content": True, "response_fields": ["content"], "return_tokens": True},
    **{
        "system_prompt": "x",
        "thinking_forced_open": True,
        "custom_params": {"a": 1},
        "input_ids": [5],
        "input_embeds": [[0.5]],
    },
    **{"return_hidden_states": True, "return_prompt_token_ids": True, "return_routed_experts": True, "stream_reasoning": False},
    **{"session_params": {"id": "x"}, "adapter_id": "x", "do_sample": False, "encoder_no_repeat_ngram_size": 2},
    **{"epsilon_cutoff": 3, "eta_cutoff": 3, "guidance_scale": 1.5, "max_new_tokens": 5, "min_new_tokens": 5},
    **{"mirostat_mode": 2, "negative_prompt": "x", "no_repeat_ngram_size": 3, "num_beams": 4, "penalty_alpha": 0.6},
    **{"return_full_text": True, "smoothing_factor": 0.2, "tfs": 0.9, "tfs_z": 0.9, "top_a": 0.2, "watermark": True},
    **{"enable_thinking": False, "reasoning": {"effort": "low"}, "thinking": {"type": "disabled"}, "thinking_budget": 100},
    **{"n_probs": 3, "repeat_penalty": 1.1, "samplers": ["top_k"], "t_max_predict_ms": 5, "add_special_tokens": True},
}


def test_unsupported_fields_are_refused_by_name(server: ApiServer) -> None:
    assert ASKED.keys() == FIELDS.keys() | OF_CHATS.keys()
    bodies = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "x", "max_tokens": 1}}
    for path, body in bodies.items():
        fields = {name: field for name, field in {**FIELDS, **OF_CHATS}.items() if path != "/v1/completions" or name in FIELDS}
        for name, field in fields.items():
            beside = {other: 0.5 for other, _ in field.beside}
            error = server.post(path, {**body, **beside, name: ASKED[name]}).json()["error"]
            assert (error["param"], error["code"]) == (name, "invalid_value")
            assert error["message"].endswith(field.remedy)
        assert server.post(path, {**body, **dict.fromkeys(fields)}).status_code == 200
        for place in (0, -1):
            nothing = {name: field.asks_nothing[place] for name, field in fields.items() if field.asks_nothing}
            assert server.post(path, {**body, **nothing}).status_code == 200
    both = {"max_tokens": 5, "n_predict": 5, "repetition_penalty": 1.1, "repeat_penalty": 1.1, "logprobs": 2, "n_probs": 2}
    assert server.post("/v1/completions", {"prompt": "x", **both}).status_code == 200
    for name, other in (("n_predict", 6), ("n_predict", [5]), ("repeat_penalty", 1.2), ("n_probs", 3)):
        error = server.post("/v1/completions", {"prompt": "x", **both, name: other}).json()["error"]
        assert (error["param"], error["code"]) == (name, "invalid_value")
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": None}
    for penalties, status in (({}, 200), (neutral, 200), ({**neutral, "presence_penalty": 1}, 400)):
        assert server.post("/v1/completions", {"prompt": "x", "repeat_last_n": 64, **penalties}).status_code == status
    for target, status in ((-1, 200), (-0.01, 200), (0, 400), ("-1", 400), ([-1], 400)):  # clients differ in what is none
        assert server.post("/v1/completions", {"prompt": "x", "adaptive_target": target}).status_code == status
    deep = b'{"prompt": "x", "n_predict": %s, "max_completion_tokens": %s}' % ((b"[" * 900 + b"]" * 900,) * 2)
    assert server.post("/v1/completions", content=deep).json()["error"]["param"] == "n_predict"
    rendered = server.post("/v1/chat/completions/render", {**CHAT, "functions": [{"name": "f"}]})
    assert (rendered.status_code, rendered.json()["error"]["param"]) == (400, "functions")


def test_texts_that_no_ring_takes(server: ApiServer) -> None:
    for path, body, param in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 3_000_000}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 900_000}] * 30}, "messages"),
        ("/tokenize", {"prompt": "x" * 3_000_000}, "prompt"),
        ("/detokenize", {"tokens": [5] * 524_288}, "tokens"),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400, path
        assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, "context_length_exceeded")


def test_missing_fields_are_named(server: ApiServer) -> None:
    error = server.post("/v1/completions", {}).json()["error"]
    assert error == {
        "message": "prompt is required",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "missing_required_parameter",
    }
    assert server.post("/v1/chat/completions", {}).json()["error"]["param"] == "messages"


def test_the_client_understands(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="nobody", prompt="x")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="tiny", prompt="x", temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model="tiny", prompt="!reject 429")
    assert refused.value.response.headers["retry-after"] == "7"


def test_unknown_places(server: ApiServer) -> None:
    nothing = server.post("/v1/nothing", {})
    assert (nothing.status_code, nothing.json()["error"]["code"]) == (404, "not_found")
    wrong = server.get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"], wrong.headers["allow"]) == (405, "method_not_allowed", "POST")
    for path, methods in (
        ("/v1/batches", "GET, HEAD, POST"),
        ("/v1/files/x", "DELETE, GET, HEAD"),
        ("/api/blobs/x", "HEAD, POST"),
    ):
        assert httpx.put(server.url + path, headers=OPERATOR, timeout=WATCHDOG_S).headers["allow"] == methods
    assert server.get("/v1/models/").status_code == 404


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("a b", "a_b"),
        ("a~b", "a_b"),
        ("x" * 129, "x" * 128),
        ("Root=1-67891233;Parent=53", "Root_1-67891233_Parent_53"),
        ("\xe4", "_"),
    ],
)
def test_any_request_id_is_made_safe(server: ApiServer, given: str, made: str) -> None:
    answer = server.post("/v1/completions", {"prompt": "x"}, headers=[(b"x-request-id", given.encode("latin-1"))])
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, made)


def test_empty_request_id_is_replaced(server: ApiServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": ""})
    assert (answer.status_code, len(answer.headers["x-request-id"])) == (200, 32)


def test_huge_bodies_are_refused_unread(server: ApiServer) -> None:
    """Bodies are refused by their declared length, or without one as soon as they exceed the limit."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=WATCHDOG_S) as connection:
        connection.sendall(head + b"content-length: %d\r\n\r\n{" % (1 << 40))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
    with socket.create_connection(("127.0.0.1", server.port), timeout=WATCHDOG_S) as connection:
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        part = b"%x\r\n" % (1 << 20) + b" " * (1 << 20) + b"\r\n"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(64):
                connection.sendall(part)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "nonsense", [b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: -5\r\n\r\n", b"A" * 100_000]
)
def test_bytes_that_are_not_http(server: ApiServer, nonsense: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WATCHDOG_S) as connection:
        reply = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(nonsense)
            connection.shutdown(socket.SHUT_WR)
            reply = connection.recv(65536)
    assert not reply or (reply.startswith(b"HTTP/1.1 400 ") and b'"error"' in reply)


def test_stalled_connections_do_not_stop_others(server: ApiServer) -> None:
    starts = [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{"]
    with contextlib.ExitStack() as stack:
        for index in range(300):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WATCHDOG_S))
            connection.sendall(starts[index % 3])
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
