"""Models that see, over HTTP: golden outputs of a third party, the `openai` client, and pictures that outlive whoever dies."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.api.media.file_server import FileServer
from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.test_golden import TOLERANCE, body_of, check_prompt_logprobs, golden_cases
from tests.e2e.workload import answers_together
from tests.waiting import WATCHDOG_S, wait_until
from tools.bench.pictures import picture

KILLED = {"qwen2_5_vl": ("media0", "worker0"), "qwen3_vl": ("scheduler", "tokenizer0"), "ernie4_5_vl_moe": ("cache", "media0")}
SERVED = [
    ("qwen2_5_vl", ()),
    ("qwen3_vl", ("--max-num-batched-tokens", "16", "--max-num-seqs", "8")),
    ("ernie4_5_vl_moe", ("--block-size", "4", "--num-kv-blocks", "60")),
]
LINK_OPTIONS = ("--allowed-media-networks", "127.0.0.0/8", "--restart-limit", "100")


@pytest.fixture(scope="module", params=SERVED, ids=lambda served: served[0])
def seeing(request: pytest.FixtureRequest) -> Iterator[tuple[str, EngineProcess]]:
    architecture, options = request.param
    with EngineProcess(
        GOLDEN / architecture, "--dtype", "float32", "--max-model-len", "400", *options, *LINK_OPTIONS
    ) as engine:
        yield architecture, engine


def data(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def with_pictures(architecture: str, case: dict[str, Any]) -> dict[str, Any]:
    links = [data((GOLDEN / architecture / name).read_bytes()) for name in case["images"]]
    return body_of(case) | {"multi_modal_data": {"image": links}}


def test_golden_outputs(seeing: tuple[str, EngineProcess]) -> None:
    """Pictures behind runs of placeholders, and behind single ones; alone, and all at once."""
    architecture, engine = seeing
    cases = golden_cases(architecture)
    for case in cases:
        body = with_pictures(architecture, case) | {"prompt_logprobs": 2}
        choice = (
            httpx.post(f"{engine.url}/v1/completions", json=body, timeout=WATCHDOG_S).raise_for_status().json()["choices"][0]
        )
        assert choice["token_ids"] == case["greedy_token_ids"]
        best = [entry[0][1] for entry in case["top_logprobs"]]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(best, abs=TOLERANCE)
        check_prompt_logprobs(choice["prompt_logprobs"], case)
    bodies = [with_pictures(architecture, case) for case in cases]
    shrunk = [body | {"prompt": [token for token, _ in itertools.groupby(body["prompt"])]} for body in bodies]
    for case, answer in zip(cases * 4, answers_together(engine, (bodies + shrunk) * 2), strict=True):
        assert answer.token_ids == case["greedy_token_ids"]


def asking(*parts: str | bytes) -> list[Any]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image_url", "image_url": {"url": data(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def test_the_openai_client(seeing: tuple[str, EngineProcess]) -> None:
    architecture, engine = seeing
    question = asking("Which? ", picture(60, 90, 1), " or ", picture(90, 60, 2))
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="-", max_retries=0) as client:
        options: dict[str, Any] = {
            "model": architecture,
            "temperature": 0,
            "max_tokens": 12,
            "extra_body": {"ignore_eos": True},
        }
        whole = client.chat.completions.create(messages=question, **options)
        stream = client.chat.completions.create(messages=question, stream=True, **options)
        pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        assert whole.usage is not None
        counted = (
            httpx.post(f"{engine.url}/tokenize", json={"messages": question}, timeout=WATCHDOG_S).raise_for_status().json()
        )
        assert counted["count"] == whole.usage.prompt_tokens
        swapped = asking("Which? ", picture(60, 90, 3), " or ", picture(90, 60, 2))
        other = client.chat.completions.create(messages=swapped, logprobs=True, **options)
        again = client.chat.completions.create(messages=question, logprobs=True, **options)
        assert _logprobs(other) != _logprobs(again), "another picture, another answer"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(messages=asking("a", b"no picture"), **options)
        assert (caught.value.code, caught.value.param) == ("unsupported_image_media_type", "messages[0].content[1]")


def _logprobs(answer: Any) -> list[float]:
    return [entry.logprob for entry in answer.choices[0].logprobs.content]


def test_a_picture_outlives_whoever_dies(seeing: tuple[str, EngineProcess]) -> None:
    """The link leads to another picture each time; the answer is that of the one that was fetched, before and after."""
    architecture, engine = seeing
    for actor in KILLED[architecture]:
        outlives(engine, actor)


def outlives(engine: EngineProcess, actor: str) -> None:
    url = f"{engine.url}/v1/chat/completions"
    options = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    files = FileServer()
    files.make = lambda number: picture(56 + 28 * number, 84, number)
    with files.running():
        link = {"type": "image_url", "image_url": {"url": f"{files.url}/new/{actor}"}}
        body = {"messages": [{"role": "user", "content": [link, {"type": "text", "text": "?"}]}], "stream": True, **options}
        epoch = int(engine.actors()[actor]["epoch"])
        with httpx.stream("POST", url, json=body, timeout=WATCHDOG_S) as stream:
            assert stream.status_code == 200, stream.read()
            lines = stream.iter_lines()
            events = [next(lines)]
            engine.kill(actor)
            events += lines
    said = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    text = "".join(choice["delta"].get("content", "") for event in said for choice in event["choices"])
    engine.wait_for_restart(actor, epoch)
    wait_until(engine.is_healthy, what="all ready again")
    (fetched,) = files.served
    expected = httpx.post(url, json={"messages": asking(fetched, "?"), **options}, timeout=WATCHDOG_S).raise_for_status()
    assert text == expected.json()["choices"][0]["message"]["content"]
    assert engine.metric("media_held_bytes") == 0
