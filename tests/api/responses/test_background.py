"""Background responses, their conversations, and truncation of long ones."""

from __future__ import annotations

import threading
from typing import Any

import openai
import orjson
import pytest

from api.responses.background import MAX_OPEN
from api.responses.conversation import translate
from api.responses.requests import InputTokensRequest
from api.responses.store import MAX_RESPONSE_BYTES
from api.responses.truncation import choices_of
from api.schemas.requests import convert
from engine.messages import ChatPrompt
from tests.api.api_server import CHILD, ApiServer
from tests.api.tokenizer_peer import said_text
from tests.waiting import wait_until


def start(client: openai.OpenAI, num_tokens: int, **options: Any) -> Any:
    return client.responses.create(model="tiny", input="hi", max_output_tokens=num_tokens, background=True, **options)


def ended(client: openai.OpenAI, response_id: str) -> Any:
    """Return the response once it has ended."""
    found: list[Any] = []

    def has_ended() -> bool:
        found[:] = [client.responses.retrieve(response_id)]
        return found[0].status not in ("queued", "in_progress")

    wait_until(has_ended, what="the response has ended")
    return found[0]


def begun_text(stream: Any) -> list[Any]:
    """Return the events up to the first text. A busy engine sends several tokens in one event, so their number says nothing."""
    events = [next(stream)]
    while events[-1].type != "response.output_text.delta":
        events.append(next(stream))
    return events


def test_background_response_is_got_when_it_is_done(thinker: ApiServer, responder: openai.OpenAI) -> None:
    with thinker.paced(5):
        begun = start(responder, 20)
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        wait_until(lambda: responder.responses.retrieve(begun.id).status == "in_progress", what="it is made")
        with pytest.raises(openai.BadRequestError, match="is still in progress"):
            responder.responses.create(model="tiny", input="and?", previous_response_id=begun.id)
    done = ended(responder, begun.id)
    assert (done.status, done.output_text) == ("incomplete", said_text(20))
    assert done.usage is not None
    assert done.usage.output_tokens == 20
    assert [item.type for item in responder.responses.input_items.list(begun.id).data] == ["message"]
    second = responder.responses.create(model="tiny", input="and?", previous_response_id=begun.id, max_output_tokens=2)
    assert len(responder.responses.input_items.list(second.id).data) == 3


def test_background_response_outlives_the_tokenizer(thinker: ApiServer, responder: openai.OpenAI) -> None:
    with thinker.paced(5):
        begun = start(responder, 20)
        wait_until(lambda: responder.responses.retrieve(begun.id).status == "in_progress", what="it is made")
        thinker.restart_tokenizer()
    assert ended(responder, begun.id).output_text == said_text(20)


def test_background_stream_resumes_after_any_event(thinker: ApiServer, responder: openai.OpenAI) -> None:
    """A client leaves in the middle and resumes; another one reads the whole stream again."""
    with thinker.paced(5):
        stream = start(responder, 20, stream=True)
        seen = begun_text(stream)
        stream.close()
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    response_id = seen[0].response.id
    rest = list(responder.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number))
    events = [*seen, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == said_text(20)
    assert events[-1].response.to_dict() == ended(responder, response_id).to_dict()
    assert list(responder.responses.retrieve(response_id, stream=True)) == events
    assert list(responder.responses.retrieve(response_id, stream=True, starting_after=10_000)) == []


def test_cancelled_response_keeps_its_partial_output(thinker: ApiServer, responder: openai.OpenAI) -> None:
    with thinker.paced(5):
        begun = start(responder, 20)
        wait_until(lambda: responder.responses.retrieve(begun.id).status == "in_progress", what="it is made")
        wait_until(lambda: thinker.count("open_requests") == 1, what="it is open")
        cancelled = responder.responses.cancel(begun.id)
        assert cancelled.status == "cancelled"
        wait_until(lambda: thinker.count("open_requests") == 0, what="the engine has dropped it")
    assert responder.responses.cancel(begun.id).to_dict() == cancelled.to_dict()
    whole = responder.responses.create(model="tiny", input="hi", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError, match="not created with background"):
        responder.responses.cancel(whole.id)
    with pytest.raises(openai.NotFoundError):
        responder.responses.cancel("resp_nothing")


def test_cancelled_stream_ends(thinker: ApiServer, responder: openai.OpenAI) -> None:
    with thinker.paced(5):
        stream = start(responder, 20, stream=True)
        seen = [next(stream) for _ in range(5)]
        responder.responses.cancel(seen[0].response.id)
        rest = list(stream)
    assert rest[-1].response.status == "cancelled"


def test_response_is_cancelled_before_it_is_deleted(thinker: ApiServer, responder: openai.OpenAI) -> None:
    with thinker.paced(5):
        begun = start(responder, 20)
        responder.responses.delete(begun.id)
        assert thinker.count("open_requests") == 0
    with pytest.raises(openai.NotFoundError):
        responder.responses.retrieve(begun.id)


def test_background_responses_are_limited(thinker: ApiServer, responder: openai.OpenAI) -> None:
    with thinker.paced(1):
        begun = [start(responder, 5) for _ in range(MAX_OPEN)]
        with pytest.raises(openai.RateLimitError, match="background"):
            start(responder, 5)
        threads = [threading.Thread(target=responder.responses.cancel, args=(each.id,)) for each in begun]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ended(responder, start(responder, 1).id).output_text == said_text(1)


def kill_http(server: ApiServer, *, is_gentle: bool = False) -> None:
    """Kill the HTTP process and start its next life."""
    if is_gentle:
        server.child.terminate()
    else:
        server.child.kill()
    server.child.wait()
    server.start_child(server.counters.actor(CHILD).epoch + 1)


@pytest.mark.slow
@pytest.mark.parametrize("is_gentle", [False, True])
def test_background_stream_outlives_its_http_process(thinker: ApiServer, responder: openai.OpenAI, is_gentle: bool) -> None:
    """The next life generates the same answer with the same seed, though in other pieces, and its events continue those that
    were read."""
    over = ended(responder, start(responder, 3).id)
    fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "metadata": {"a": "b"}}
    with thinker.paced(5):
        stream = start(responder, 20, stream=True, **fields)
        seen = begun_text(stream)
        response_id = seen[0].response.id
        first = thinker.peer.submits()[-1]
        thinker.peer.at_once = 3
        try:
            kill_http(thinker, is_gentle=is_gentle)
            wait_until(lambda: thinker.peer.submits()[-1].request_id != first.request_id, what="it is made again")
            again = thinker.peer.submits()[-1]
        finally:
            thinker.peer.at_once = 1
    assert (again.sampling, again.source, again.prompt) == (first.sampling, first.source, first.prompt)
    rest = list(responder.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number))
    events = [*seen, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    others = [event.type for event in events if not event.type.endswith(".delta")]
    assert len(set(others)) == len(others) == 9
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == said_text(20)
    done = ended(responder, response_id)
    assert (done.status, done.output_text, done.metadata) == ("incomplete", said_text(20), {"a": "b"})
    assert sum(len(event.logprobs or ()) for event in deltas) == 20
    assert events[-1].response.to_dict() == done.to_dict()
    assert done.created_at == seen[0].response.created_at
    assert responder.responses.retrieve(over.id) == over
    assert not list(thinker.run.responses_path.glob("*.request"))


def test_response_can_be_cancelled_after_its_process_died(thinker: ApiServer, responder: openai.OpenAI) -> None:
    with thinker.paced(5):
        begun = start(responder, 20)
        wait_until(lambda: responder.responses.retrieve(begun.id).status == "in_progress", what="it is made")
        kill_http(thinker)
        assert responder.responses.retrieve(begun.id).status == "in_progress"
        assert responder.responses.cancel(begun.id).status == "cancelled"
        wait_until(lambda: thinker.count("open_requests") == 0, what="the engine has dropped it")


def test_response_without_its_request_has_failed(thinker: ApiServer, responder: openai.OpenAI) -> None:
    """The process died after it had reserved room for the response."""
    with thinker.paced(5):
        stream = start(responder, 20, stream=True)
        seen = [next(stream) for _ in range(5)]
        response_id = seen[0].response.id
        (thinker.run.responses_path / f"{response_id}.request").unlink()
        kill_http(thinker)
    lost = responder.responses.retrieve(response_id)
    assert (lost.status, lost.error is not None) == ("failed", True)
    events = list(responder.responses.retrieve(response_id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.failed"
    assert responder.responses.cancel(response_id).status == "failed"


def test_logprobs_of_background_responses_are_released(thinker: ApiServer, responder: openai.OpenAI) -> None:
    fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 5}
    assert ended(responder, start(responder, 20, **fields).id).output_text == said_text(20)
    wait_until(lambda: thinker.count("held_logprobs") == 0, what="nothing is held")


def test_response_without_a_stream_has_no_events(thinker: ApiServer, responder: openai.OpenAI) -> None:
    for options in ({}, {"background": True}):
        made = responder.responses.create(model="tiny", input="hi", max_output_tokens=1, **options)
        answer = thinker.get(f"/v1/responses/{made.id}?stream=true")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
    made = ended(responder, next(iter(start(responder, 1, stream=True))).response.id)
    answer = thinker.get(f"/v1/responses/{made.id}?stream=true&starting_after=x")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")


@pytest.mark.parametrize("field", ["instructions", "user", "metadata"])
def test_long_background_response_is_refused(thinker: ApiServer, responder: openai.OpenAI, field: str) -> None:
    """Fields that a response returns count too, although they are no items: later there would be no room for the answer."""
    long = "x" * (MAX_RESPONSE_BYTES // 2)
    body = {"input": "hi", "background": True, field: {"a": long} if field == "metadata" else long}
    answer = thinker.post("/v1/responses", body)
    assert answer.status_code == 400, answer.text
    wait_until(lambda: thinker.count("open_requests") == 0, what="nothing is open")
    made = responder.responses.create(model="tiny", input="hi", max_output_tokens=1)
    assert thinker.get(f"/v1/responses/{made.id}?stream=maybe").json()["error"]["message"].startswith("stream: expected true")


def test_input_items_are_paged(responder: openai.OpenAI) -> None:
    items: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_own"},
        {"type": "function_call_output", "call_id": "c", "output": "d"},
    ]
    made = responder.responses.create(model="tiny", input=items, instructions="brief", max_output_tokens=2)
    found = responder.responses.input_items.list(made.id, order="asc").data
    assert [item.type for item in found] == ["message", "message", "function_call", "function_call_output"]
    assert found[2].id == "fc_own"
    assert found[0].to_dict()["content"] == [{"type": "input_text", "text": "a"}]
    page = responder.responses.input_items.list(made.id, limit=3)
    assert (page.data, page.has_more) == (found[:0:-1], True)
    assert [item.id for item in page] == [item.id for item in reversed(found)]  # which asks for the next page
    with pytest.raises(openai.NotFoundError):
        responder.responses.input_items.list("resp_nothing")


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=nobody"])
def test_wrong_page_is_refused(thinker: ApiServer, responder: openai.OpenAI, query: str) -> None:
    made = responder.responses.create(model="tiny", input="hi", max_output_tokens=1)
    answer = thinker.get(f"/v1/responses/{made.id}/input_items?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


def turns(num_turns: int, length: int) -> list[Any]:
    return [
        {"role": role, "content": f"{role[0]}{number} ".ljust(length, ".")}
        for number in range(num_turns)
        for role in ("user", "assistant")
    ]


def contents(server: ApiServer) -> list[str]:
    prompt = server.peer.submits()[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return [str(message["content"])[:2].strip() for message in orjson.loads(prompt.messages)]


def test_oldest_turns_are_dropped_from_long_prompts(thinker: ApiServer) -> None:
    """The model takes 256 tokens; each byte is a token here."""
    body = {"instructions": "S", "input": [*turns(6, 20), {"role": "user", "content": "now"}], "max_output_tokens": 40}
    answer = thinker.post("/v1/responses", body | {"truncation": "auto"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["truncation"] == "auto"
    assert "truncation: 4 items" in answer.headers["x-tokamak-dropped"]
    assert contents(thinker) == ["S", "u2", "a2", "u3", "a3", "u4", "a4", "u5", "a5", "no"]
    assert len(orjson.loads(thinker.get(f"/v1/responses/{answer.json()['id']}/input_items").content)["data"]) == 13
    counted = thinker.post(
        "/v1/responses/input_tokens", {key: body[key] for key in ("instructions", "input")} | {"truncation": "auto"}
    )
    assert counted.json()["input_tokens"] < 256
    short = {"input": [*turns(2, 20)], "truncation": "auto", "max_output_tokens": 2}
    assert "x-tokamak-dropped" not in thinker.post("/v1/responses", short).headers


def test_dropped_calls_take_their_results_along() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    given = [{"type": "message", "role": "user", "content": "do"}, call, output, call, call, output, output]
    body = convert({"input": given}, InputTokensRequest)
    assert isinstance(body.input, list)
    choices = choices_of(body.input)
    assert [sorted(choice) for choice in choices] == [[0, 3, 4, 5, 6]]
    translated = translate(body, body.input, 0, kept=choices[0])
    assert [message["role"] for message in translated.fields["messages"]] == ["user", "assistant", "tool", "tool"]
