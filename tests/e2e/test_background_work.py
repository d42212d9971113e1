"""Batches and background responses on a whole engine: the same answers, once each, whichever process dies meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.waiting import wait_until

NUM_REQUESTS = 40
FIELDS = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(GOLDEN / "qwen3", "--restart-limit", "100", "--max-num-seqs", "4") as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def client(engine: EngineProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=5) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(engine: EngineProcess, client: openai.OpenAI) -> dict[str, str]:
    return answers(client, finished(client, begin(client)))


def begin(client: openai.OpenAI) -> Any:
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"prompt": f"{n} the sun", **FIELDS}}
        for n in range(NUM_REQUESTS)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


def finished(client: openai.OpenAI, batch: Any) -> Any:
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", what="the batch is completed")
    return client.batches.retrieve(batch.id)


def answers(client: openai.OpenAI, batch: Any) -> dict[str, str]:
    found = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(int(each["custom_id"]) for each in found) == list(range(NUM_REQUESTS))
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in found}


@pytest.mark.parametrize("victim", ["worker0", "scheduler", "tokenizer0", "api0"])
def test_batch_outlives_any_process(
    engine: EngineProcess, client: openai.OpenAI, victim: str, undisturbed: dict[str, str]
) -> None:
    batch = begin(client)
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0, what="some are answered")
    engine.wait_for_restart(victim, engine.kill(victim))
    assert answers(client, finished(client, batch)) == undisturbed


@pytest.mark.parametrize("victim", ["worker0", "scheduler", "tokenizer0", "api0"])
def test_background_stream_outlives_the_engine(engine: EngineProcess, client: openai.OpenAI, victim: str) -> None:
    """The client leaves and reads the rest later."""
    model = client.models.list().data[0].id
    fields: Any = {
        "model": model,
        "input": "hi",
        "max_output_tokens": 200,
        "extra_body": {"ignore_eos": True, "temperature": 0},
    }
    expected = client.responses.create(**fields).output_text
    stream = client.responses.create(**fields, background=True, stream=True)
    seen = [next(stream) for _ in range(8)]
    stream.close()
    engine.wait_for_restart(victim, engine.kill(victim))
    rest = list(client.responses.retrieve(seen[0].response.id, stream=True, starting_after=7))
    events = [*seen, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    assert events[-1].response.output_text == expected
