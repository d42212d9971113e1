"""The real `openai` and `anthropic` clients against the real engine with the embedded model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import openai
import orjson
import pytest

from tests.e2e.engine_process import DEMO, EngineProcess
from tests.e2e.schemas import schemas

if TYPE_CHECKING:
    import anthropic  # else by who uses it: every process that collects tests would take two seconds longer

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    drafts = ("--speculative-config", '{"method": "ngram,suffix"}')
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--enable-auto-tool-choice")
    with EngineProcess(DEMO, "--api-key", "secret", "--served-model-name", "demo", *drafts, *parsers) as running:
        yield running


@pytest.fixture(scope="module")
def client(engine: EngineProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(engine: EngineProcess) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=engine.url, api_key="secret", max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def test_fingerprint_is_the_same_everywhere(client: openai.OpenAI, engine: EngineProcess) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": QUESTION, "max_tokens": 4}
    whole = client.chat.completions.create(**asked)
    chunks = [chunk.system_fingerprint for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
    text = client.completions.create(model="demo", prompt="a", max_tokens=1)
    card = client.models.retrieve("demo").model_extra or {}
    found = {whole.system_fingerprint, *chunks, text.system_fingerprint, card["system_fingerprint"]}
    assert len(found) == 1
    assert (whole.system_fingerprint or "").startswith("fp_")
    assert engine.metric("build_info", system_fingerprint=whole.system_fingerprint or "") == 1


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)  # type: ignore[arg-type]
    assert "42" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_predicted_answer_is_the_same_and_counted(client: openai.OpenAI) -> None:
    def ask(prediction: str = "") -> tuple[str | None, openai.types.CompletionUsage]:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Write a short story about a fox and a river."}],
            prediction={"type": "content", "content": prediction} if prediction else openai.omit,
            temperature=0,
            max_tokens=60,
        )
        assert answer.usage is not None
        return answer.choices[0].message.content, answer.usage

    text, usage = ask()
    assert text
    assert usage.completion_tokens_details is None
    for prediction, is_right in ((text, True), ("Zebras quack at noon, 9 8 7 6 5!", False)):
        found, usage = ask(prediction)
        assert found == text
        details = usage.completion_tokens_details
        assert details is not None
        num_accepted, num_rejected = details.accepted_prediction_tokens or 0, details.rejected_prediction_tokens or 0
        assert (num_accepted > 0.8 * usage.completion_tokens) == is_right
        assert (num_rejected > 5) != is_right
    with pytest.raises(openai.BadRequestError, match="prediction"):
        client.chat.completions.create(
            model="demo",
            messages=QUESTION,  # type: ignore[arg-type]
            prediction={"type": "contents", "content": "x"},  # type: ignore[typeddict-item]
        )


def test_chat_stream_equals_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)  # type: ignore[arg-type]
    stream = client.chat.completions.create(
        model="demo",
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, finish = "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content
    assert finish == "stop"
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_logprobs_and_n(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=1.0,
        seed=11,
        n=3,
        logprobs=True,
        top_logprobs=4,
        max_tokens=12,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        joined = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content).decode()
        assert joined.startswith(choice.message.content or "")
        for entry in choice.logprobs.content:
            assert entry.logprob <= 0
            assert len(entry.top_logprobs) == 4


def test_seed_repeats(client: openai.OpenAI) -> None:
    def once(seed: int) -> str:
        return client.completions.create(model="demo", prompt="q", temperature=2, seed=seed, max_tokens=20).choices[0].text

    assert once(3) == once(3)
    assert len({once(seed) for seed in range(6)}) > 1


def test_completions_batch_echo_stop(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=["ab", "cd"], n=2, max_tokens=4, temperature=1, echo=True, logprobs=1, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text.startswith("ab")
    assert answer.choices[2].text.startswith("cd")
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs[0] is None


def test_stop_string_and_best_of(client: openai.OpenAI) -> None:
    full = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)  # type: ignore[arg-type]
    text = full.choices[0].message.content or ""
    stop = text[3:5]
    cut = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, stop=[stop])  # type: ignore[arg-type]
    assert cut.choices[0].message.content == text[: text.index(stop)]
    best = client.completions.create(model="demo", prompt="ab", n=1, best_of=4, max_tokens=4, seed=5)
    assert len(best.choices) == 1


def test_errors_are_openais(client: openai.OpenAI, engine: EngineProcess) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=QUESTION)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="demo", messages=QUESTION, temperature=9)  # type: ignore[arg-type]
    assert raised.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="demo", prompt=[5] * 5000)
    assert "5000" in str(too_long.value)
    with (
        openai.OpenAI(base_url=f"{engine.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_async_streams_at_once(engine: EngineProcess) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="secret", max_retries=0) as client:

            async def one(left: int) -> str:
                question = [{"role": "user", "content": f"What is {left} + 7?"}]
                stream = await client.chat.completions.create(model="demo", messages=question, temperature=0, stream=True)  # type: ignore[call-overload]
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

            return list(await asyncio.gather(*(one(left) for left in range(20, 52))))

    texts = asyncio.run(run())
    right = [str(left + 7) in text for left, text in zip(range(20, 52), texts, strict=True)]
    assert sum(right) >= 31


def test_logprobs_of_named_tokens(client: openai.OpenAI) -> None:
    """Log-probabilities equal those of the top tokens, also where drafts are verified."""
    messages = [{"role": "user", "content": "Repeat: one two one two one two"}]

    def ask(**fields: Any) -> list[Any]:
        answer = client.chat.completions.create(
            model="demo",
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=24,
            logprobs=True,
            extra_body={"return_tokens_as_token_ids": True, **fields},
        )
        assert answer.choices[0].logprobs is not None
        return answer.choices[0].logprobs.content or []

    best = ask(top_logprobs=8)
    named = sorted({int(top.token.removeprefix("token_id:")) for entry in best for top in entry.top_logprobs})[:20]
    found = ask(logprob_token_ids=named)
    assert [entry.token for entry in found] == [entry.token for entry in best]
    for entry, expected in zip(found, best, strict=True):
        assert [top.token for top in entry.top_logprobs] == [f"token_id:{token_id}" for token_id in named]
        values = {top.token: top.logprob for top in entry.top_logprobs}
        for top in expected.top_logprobs:
            assert top.token not in values or values[top.token] == pytest.approx(top.logprob, abs=1e-4)


def test_salted_prefixes_are_shared_with_equal_salts_alone(client: openai.OpenAI) -> None:
    prompt = list(range(3, 60))

    def num_cached(salt: str | None) -> int:
        answer = client.completions.create(model="demo", prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt})
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [num_cached(salt) for salt in ("a", "a", "b", None, "b", None)] == [0, 48, 0, 0, 48, 48]


def test_unsupported_features_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support fill-in-the-middle"):
        client.completions.create(model="demo", prompt="a", suffix="b")
    with pytest.raises(openai.BadRequestError, match="chat template does not support them"):
        client.chat.completions.create(
            model="demo",
            messages=QUESTION,  # type: ignore[arg-type]
            extra_body={"documents": [{"text": "x"}]},
        )


def test_repetitive_answer_ends(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo",
        prompt="one two " * 8,
        max_tokens=200,
        temperature=0,
        extra_body={
            "ignore_eos": True,
            "allowed_token_ids": [5, 6],
            "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
            "return_token_ids": True,
        },
    )
    token_ids = (answer.choices[0].model_extra or {})["token_ids"]
    assert answer.choices[0].finish_reason == "repetition"
    assert any(token_ids[-3 * size :] == token_ids[-size:] * 3 for size in range(1, 5))
    assert len(token_ids) < 200


def test_progress_of_a_prompt_and_its_timings(client: openai.OpenAI) -> None:
    def told(token_id: int) -> list[int]:
        """Return the computed prompt tokens that each chunk reports; reports that coincide are merged."""
        stream = client.completions.create(
            model="demo",
            prompt=[token_id] * 1500,
            max_tokens=2,
            stream=True,
            extra_body={"return_progress": True, "timings": True, "ignore_eos": True},
        )
        chunks = [chunk.model_extra or {} for chunk in stream]
        progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        assert [one["total"] for one in progress] == [1500] * len(progress)
        assert chunks[-1]["timings"]["predicted_n"] == 2
        return [one["processed"] for one in progress]

    prompts = [told(token_id) for token_id in range(7, 27)]  # a new one each: nothing of it is known
    for processed in prompts:
        assert processed == sorted(set(processed))
        assert processed[-1] == 1500
    assert any(len(processed) >= 3 for processed in prompts)


SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "unit": {"enum": ["m", "km"]}},
    "required": ["count", "unit"],
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "measure", "description": "d", "parameters": SCHEMA | {"additionalProperties": False}},
    },
    {
        "type": "function",
        "function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    },
]


def streamed(client: openai.OpenAI, **body: Any) -> tuple[dict[str, Any], str | None]:
    """Return the message that a stream's pieces add up to, and its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    for chunk in client.chat.completions.create(model="demo", stream=True, temperature=0, **body):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += (choice.delta.model_extra or {}).get("reasoning_content", "")
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert call.index == len(message["tool_calls"])
                    message["tool_calls"].append({"id": call.id, "name": "", "arguments": ""})
                assert call.function is not None
                message["tool_calls"][call.index]["name"] += call.function.name or ""
                message["tool_calls"][call.index]["arguments"] += call.function.arguments or ""
    return message, finish


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", {"measure", "stop"}),
        ({"type": "function", "function": {"name": "measure"}}, {"measure"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}}]},
            },
            {"stop"},
        ),
    ],
)
def test_a_call_that_is_demanded(client: openai.OpenAI, choice: Any, expected: set[str]) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    answer = client.chat.completions.create(model="demo", temperature=0, **body)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in expected
    if call.function.name == "measure":
        arguments = json.loads(call.function.arguments)
        assert isinstance(arguments["count"], int)
        assert arguments["unit"] in ("m", "km")
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"
    message, finish = streamed(client, **body)
    ((streamed_call),) = message["tool_calls"]
    assert (streamed_call["name"], streamed_call["arguments"]) == (call.function.name, call.function.arguments)
    assert (message["content"], finish) == ("", "tool_calls")


def test_call_result_is_accepted_as_history(client: openai.OpenAI) -> None:
    """The output of a first turn is accepted as history, with thinking and calls."""
    first = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,  # type: ignore[arg-type]
    )
    message = first.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    history: list[Any] = [*QUESTION, message.model_dump(exclude_none=True) | {"reasoning_content": "hm"}, result]
    second = client.chat.completions.create(model="demo", messages=history, tools=TOOLS, temperature=0, max_tokens=8)
    assert second.choices[0].finish_reason in ("stop", "length")


def test_thinking_ends_at_its_budget(client: openai.OpenAI) -> None:
    messages: list[Any] = [*QUESTION, {"role": "assistant", "content": "<think>"}]
    extra = {"thinking_token_budget": 6, "continue_final_message": True, "add_generation_prompt": False}
    body: dict[str, Any] = {"messages": messages, "max_tokens": 30, "extra_body": extra}
    answer = client.chat.completions.create(model="demo", temperature=0, **body)
    fields = answer.choices[0].message.model_extra or {}
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert fields["reasoning_content"] == fields["reasoning"]
    assert "</think>" not in (answer.choices[0].message.content or "") + fields["reasoning_content"]
    num_end_tokens = (details.reasoning_tokens or 0) - 6
    assert 1 <= num_end_tokens <= len("</think>")
    message, _ = streamed(client, **body)
    assert (message["content"], message["reasoning_content"]) == (answer.choices[0].message.content or "", fields["reasoning"])
    hidden = client.chat.completions.create(
        model="demo", temperature=0, **(body | {"extra_body": extra | {"include_reasoning": False}})
    )
    assert "reasoning" not in (hidden.choices[0].message.model_extra or {})
    assert hidden.choices[0].message.content == answer.choices[0].message.content
    for left_in in ({"separate_reasoning": False}, {"reasoning_format": "none"}):  # SGLang's, llama.cpp's
        asked = body | {"extra_body": extra | left_in}
        whole = client.chat.completions.create(model="demo", temperature=0, **asked).choices[0].message
        assert (whole.content or "").replace("\n", "") == "</think>".join(
            (fields["reasoning"], answer.choices[0].message.content or "")
        ).replace("\n", "")
        assert "reasoning" not in (whole.model_extra or {})
        message, _ = streamed(client, **asked)
        assert (message["content"], message["reasoning_content"]) == (whole.content, "")


def test_calls_that_are_left_in_the_content(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    made = client.chat.completions.create(model="demo", temperature=0, **body).choices[0].message.tool_calls
    left = client.chat.completions.create(model="demo", temperature=0, extra_body={"parse_tool_calls": False}, **body)
    (call,) = made or []
    assert call.type == "function"
    assert left.choices[0].message.tool_calls is None
    assert f'"name": "{call.function.name}"' in (left.choices[0].message.content or "")
    assert left.choices[0].finish_reason in ("stop", "length")


def test_a_call_follows_thinking(client: openai.OpenAI) -> None:
    messages: list[Any] = [*QUESTION, {"role": "assistant", "content": "<think>"}]
    extra = {"thinking_token_budget": 4, "continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(
        model="demo", messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, extra_body=extra
    )
    assert answer.choices[0].message.tool_calls
    assert "reasoning_content" in (answer.choices[0].message.model_extra or {})


LOOKAHEAD = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(?=a)b"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}, "tools": TOOLS}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "strange"}}}]},
            "tools",
        ),
        ({"tools": TOOLS, "response_format": LOOKAHEAD}, "response_format"),
    ],
)
def test_tools_that_cannot_be(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="demo", messages=QUESTION, **fields)  # type: ignore[call-overload]
    assert raised.value.param == param


def test_messages(claude: anthropic.Anthropic) -> None:
    """Whole, streamed, and a second turn with a cached prefix although the client's billing header differs."""
    import anthropic

    def system(nonce: str) -> list[anthropic.types.TextBlockParam]:
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"
        return [{"type": "text", "text": header}, {"type": "text", "text": "You are a careful assistant. " * 8}]

    turn: anthropic.types.MessageParam = {"role": "user", "content": "What is 12 + 30?"}
    first = claude.messages.create(model="demo", max_tokens=21_000, messages=[turn], system=system("36ee5"), extra_body=GREEDY)
    (block,) = first.content
    assert block.type == "text"
    assert first.stop_reason == "end_turn"
    turns: list[anthropic.types.MessageParam] = [turn, {"role": "assistant", "content": block.text}, turn]
    with claude.messages.stream(
        model="demo", max_tokens=20, messages=turns, system=system("0aaa9"), extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        second = stream.get_final_message()
    assert [block.to_dict() for block in second.content] == [{"type": "text", "text": text}]
    assert (second.usage.cache_read_input_tokens or 0) > first.usage.input_tokens // 2
    counted = claude.messages.count_tokens(model="demo", messages=[turn], system=system("1bbb9"))
    assert counted.input_tokens == first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
    cut = claude.messages.create(
        model="demo", max_tokens=20, messages=[turn], system=system(""), stop_sequences=[block.text[2:4]], extra_body=GREEDY
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", block.text[2:4])
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        claude.messages.create(model="demo", max_tokens=1, messages=[{"role": "user", "content": "x" * 50_000}])


def test_responses(client: openai.OpenAI) -> None:
    """Whole, streamed and continued; the same as chat."""
    chat = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)  # type: ignore[arg-type]
    whole = client.responses.create(model="demo", input="What is 12 + 30?", temperature=0)
    assert (whole.status, whole.output_text) == ("completed", chat.choices[0].message.content)
    with client.responses.stream(model="demo", input="What is 12 + 30?", temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        streamed = stream.get_final_response()
    assert streamed.output_text == text == whole.output_text
    assert client.responses.retrieve(streamed.id).output_text == text
    going_on = client.responses.create(model="demo", input="And 7 + 8?", previous_response_id=whole.id, temperature=0)
    turns = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "And 7 + 8?"}]
    chat = client.chat.completions.create(model="demo", messages=turns, temperature=0)  # type: ignore[arg-type]
    assert going_on.output_text == chat.choices[0].message.content
    assert chat.usage is not None
    assert going_on.usage is not None
    assert going_on.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize("effort", ["none", "low"])
def test_logprobs_of_responses_cover_their_text(client: openai.OpenAI, effort: Any) -> None:
    """The token that ended the answer is not among them, also in a stream, however tokens were grouped."""
    asked: dict[str, Any] = {"model": "demo", "input": "What is 12 + 30?", "temperature": 0, "reasoning": {"effort": effort}}
    asked |= {"include": ["message.output_text.logprobs"]}
    with client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    for response in (client.responses.create(**asked), streamed):
        (text,) = [part for item in response.output if item.type == "message" for part in item.content]
        assert text.type == "output_text"
        assert text.logprobs
        assert b"".join(bytes(token.bytes) for token in text.logprobs).decode() == text.text


def test_formats_are_enforced_in_every_protocol(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"], "additionalProperties": False}
    message = claude.messages.create(
        model="demo",
        max_tokens=60,
        extra_body=GREEDY,
        messages=[{"role": "user", "content": "What is 12 + 30?"}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert message.content[0].type == "text"
    response = client.responses.create(
        model="demo",
        max_output_tokens=60,
        temperature=0,
        input="What is 12 + 30?",
        text={"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}},
    )
    for text in (message.content[0].text, response.output_text):
        assert list(orjson.loads(text)) == ["sum"]


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED = {"call": "What is the weather in Oslo?", "answer": 'Give a JSON object with name "bob" and age 7'}


def ask_in_chat(question: str, client: openai.OpenAI, strict: bool) -> tuple[list[Any], str]:
    function = {"name": "get_weather", "description": "The weather in a city", "parameters": WEATHER, "strict": strict}
    answer = client.chat.completions.create(
        model="demo",
        temperature=0,
        max_tokens=60,
        messages=[{"role": "user", "content": question}],
        tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": PERSON, "strict": True}},
    )
    message = answer.choices[0].message
    calls = [json.loads(call.function.arguments) for call in message.tool_calls or [] if call.type == "function"]
    return calls, message.content or ""


def ask_in_messages(question: str, claude: anthropic.Anthropic) -> tuple[list[Any], str]:
    message = claude.messages.create(
        model="demo",
        max_tokens=60,
        extra_body=GREEDY,
        messages=[{"role": "user", "content": question}],
        tools=[{"name": "get_weather", "description": "The weather in a city", "input_schema": WEATHER}],
        output_config={"format": {"type": "json_schema", "schema": PERSON}},
    )
    text = "".join(block.text for block in message.content if block.type == "text")
    return [block.input for block in message.content if block.type == "tool_use"], text


def ask_in_responses(question: str, client: openai.OpenAI) -> tuple[list[Any], str]:
    response = client.responses.create(
        model="demo",
        max_output_tokens=60,
        temperature=0,
        input=question,
        tools=[{"type": "function", "name": "get_weather", "description": "The weather in a city", "parameters": WEATHER,
                "strict": True}],
        text={"format": {"type": "json_schema", "name": "answer", "schema": PERSON, "strict": True}},
    )  # fmt: skip
    return [json.loads(item.arguments) for item in response.output if item.type == "function_call"], response.output_text


def ask_in_ollama(question: str, engine: EngineProcess) -> tuple[list[Any], str]:
    function = {"name": "get_weather", "description": "The weather in a city", "parameters": WEATHER}
    body = {
        "model": "demo", "stream": False, "options": {"temperature": 0, "num_predict": 60}, "format": PERSON,
        "messages": [{"role": "user", "content": question}], "tools": [{"type": "function", "function": function}],
    }  # fmt: skip
    answer = httpx.post(f"{engine.url}/api/chat", json=body, headers={"Authorization": "Bearer secret"}, timeout=60)
    message = answer.raise_for_status().json()["message"]
    return [call["function"]["arguments"] for call in message.get("tool_calls", [])], message["content"]


def test_answer_follows_tools_or_format(engine: EngineProcess, client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    ask = (
        lambda question: ask_in_chat(question, client, strict=False),
        lambda question: ask_in_chat(question, client, strict=True),
        lambda question: ask_in_messages(question, claude),
        lambda question: ask_in_responses(question, client),
        lambda question: ask_in_ollama(question, engine),
    )
    assert [each(ASKED["call"]) for each in ask] == [([{"city": "Oslo"}], "")] * 5
    assert [each(ASKED["answer"]) for each in ask] == [([], '{"name": "bob", "age": 7}')] * 5


def test_schemas_hold_and_other_answers_are_unchanged(engine: EngineProcess) -> None:
    """Greedy and sampled. Plain requests beside them have the bytes that they have alone, and invalid schemas stall no other
    request."""
    made = schemas(24, seed=7)

    async def ask(client: openai.AsyncOpenAI, gate: asyncio.Semaphore, temperature: float, **format_: Any) -> tuple[str, str]:
        async with gate:
            answer = await client.chat.completions.create(
                model="demo",
                messages=QUESTION,  # type: ignore[arg-type]
                temperature=temperature,
                seed=5,
                max_tokens=120,
                **format_,
            )
        choice = answer.choices[0]
        return choice.finish_reason, choice.message.content or ""

    async def run() -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[tuple[str, str]]]:
        gate = asyncio.Semaphore(16)
        async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="secret", max_retries=0) as client:
            alone = [await ask(client, gate, temperature) for temperature in (0.0, 1.0)]
            formats = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in made]
            wanted = [ask(client, gate, temperature, response_format=each) for each in formats for temperature in (0.0, 1.0)]
            plain = [ask(client, gate, temperature) for temperature in (0.0, 1.0) * 8]
            hostile = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "https://example.com/x"}}}
            refused = [ask(client, gate, 0.0, response_format=hostile) for _ in range(4)]
            found = await asyncio.gather(*wanted, *plain, *refused, return_exceptions=True)
        assert all(isinstance(each, openai.BadRequestError) for each in found[-4:])
        assert [each for each in found[:-4] if isinstance(each, BaseException)] == []
        return alone, found[: len(wanted)], found[len(wanted) : -4]  # type: ignore[return-value]

    alone, found, plain = asyncio.run(run())
    assert plain == alone * 8
    assert sum(reason == "stop" for reason, _ in found) > len(found) // 3
    for index, (reason, text) in enumerate(found):
        if reason == "stop":
            jsonschema.Draft202012Validator(made[index // 2]).validate(json.loads(text))


def test_schema_beyond_the_limits_is_an_error(engine: EngineProcess) -> None:
    """Each token of this answer takes longer than the last. Only this answer ends; streams beside it keep their bytes."""
    form = {"structured_outputs": {"grammar": 'start: s\ns: s s | "Z"'}, "ignore_eos": True}

    async def ask(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str, str | None]:
        text, reason = "", None
        stream = await client.completions.create(model="demo", prompt="Z", stream=True, **fields)
        try:
            async for chunk in stream:
                text += chunk.choices[0].text
                reason = chunk.choices[0].finish_reason or reason
        except openai.APIError as error:
            return text, f"{reason}, {error.message}"
        return text, reason

    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="secret", max_retries=0) as client:
            plain = {"max_tokens": 300, "seed": 3, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
            alone = await ask(client, **plain)
            hostile = {"max_tokens": 1900, "temperature": 0, "extra_body": form}
            whole = client.completions.create(model="demo", prompt="Z", **hostile)  # type: ignore[call-overload]
            found = await asyncio.gather(
                ask(client, **hostile), whole, *(ask(client, **plain) for _ in range(4)), return_exceptions=True
            )
            assert found[2:] == [alone] * 4
            return found[:2]

    (text, reason), refused = asyncio.run(run())
    assert set(text) == {"Z"}
    assert str(reason).startswith("None, the structured output exceeds the limits of the engine: ")
    assert isinstance(refused, openai.BadRequestError)
    assert "the structured output exceeds the limits of the engine: " in refused.message
