"""Vectors and scores over HTTP: a third party's numbers, identical bits under all conditions, and invalid requests."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest

from tests.e2e.engine_process import OPERATOR, EngineProcess
from tests.e2e.test_openapi import POOLING_ROUTES, fuzz, phases
from tests.pooled import MODELS, QUERY, TOLERANCE, write_checkpoint
from tests.waiting import WATCHDOG_S, wait_until

EMBEDDER, SCORER = "qwen3 mean", "bert classifier"
CASES = MODELS[EMBEDDER]["cases"]
TEXTS = [case["text"] for case in CASES]
MANY = [f"{text} {number}" for number in range(20) for text in TEXTS]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Engine that averages vectors over chunks of 16 tokens."""
    model = write_checkpoint(EMBEDDER, tmp_path_factory.mktemp("embedder") / "model")
    options = ("--dtype", "float32", "--max-num-batched-tokens", "16", "--max-num-seqs", "8", "--restart-limit", "100")
    options = (*options, "--trust-request-chat-template")
    with EngineProcess(model, *options, "--max-model-len", "200") as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    model = write_checkpoint(SCORER, tmp_path_factory.mktemp("scorer") / "model")
    with EngineProcess(model, "--dtype", "float32", "--restart-limit", "100") as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def sorter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Engine with three labels, named by the checkpoint."""
    model = write_checkpoint(SCORER, tmp_path_factory.mktemp("sorter") / "model", labels=("bad", "good", "so-so"))
    with EngineProcess(model, "--dtype", "float32", "--api-key", "k", "--trust-request-chat-template") as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def undisturbed(embedder: EngineProcess) -> list[bytes]:
    return vectors(embedder, MANY)


def post(engine: EngineProcess, path: str, **body: Any) -> Any:
    return httpx.post(f"{engine.url}{path}", json=body, timeout=WATCHDOG_S).raise_for_status().json()


def vectors(engine: EngineProcess, texts: Any, **options: Any) -> list[bytes]:
    answer = post(engine, "/v1/embeddings", input=texts, encoding_format="base64", **options)
    assert [each["index"] for each in answer["data"]] == [*range(len(answer["data"]))]
    return [base64.b64decode(each["embedding"]) for each in answer["data"]]


def test_the_openai_client(embedder: EngineProcess) -> None:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="any", max_retries=0) as client:
        model = client.models.list().data[0].id
        found = client.embeddings.create(model=model, input=TEXTS)  # which asks for base64
        for each, case in zip(found.data, CASES, strict=True):
            assert each.embedding == pytest.approx(case["vector"], abs=TOLERANCE)
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(len(case["token_ids"]) for case in CASES)
        as_floats = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
        assert [each.embedding for each in as_floats.data] == [each.embedding for each in found.data]
        by_ids = client.embeddings.create(model=model, input=[case["token_ids"] for case in CASES])
        assert [each.embedding for each in by_ids.data] == [each.embedding for each in found.data]
        one = client.embeddings.create(model=model, input=CASES[1]["token_ids"], dimensions=7)
        assert one.data[0].embedding == found.data[1].embedding[:7]  # this model's vectors are of no certain length


def test_the_ollama_client(embedder: EngineProcess) -> None:
    """Vectors have length 1, too long texts are truncated; the older route's vectors are not normalized."""
    with ollama.Client(embedder.url) as client:
        name, *_ = (model.model for model in client.list().models)
        assert name is not None
        assert client.show(name).capabilities == ["embedding"]
        found = client.embed(name, TEXTS)
        assert found.prompt_eval_count == sum(len(case["token_ids"]) for case in CASES)
        for vector, case in zip(found.embeddings, CASES, strict=True):
            assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
            assert vector == pytest.approx(np.array(case["vector"]) / np.linalg.norm(case["vector"]), abs=TOLERANCE)
        assert client.embed(name, TEXTS[1]).embeddings == found.embeddings[1:2]
        assert client.embeddings(name, TEXTS[1]).embedding == pytest.approx(CASES[1]["vector"], abs=TOLERANCE)
        assert len(client.embed(name, TEXTS[1], dimensions=7).embeddings[0]) == 7
        assert client.embed(name, []).embeddings == []
        for long in (LONG, "⚛" * 150, f"{TEXTS[0]} " * 60):
            cut = client.embed(name, long)
            assert 190 < (cut.prompt_eval_count or 0) <= 200
            assert client.embed(name, long + " and more").embeddings == cut.embeddings
            with pytest.raises(ollama.ResponseError, match="200 tokens") as raised:
                client.embed(name, long, truncate=False)
            assert raised.value.status_code == 400
        with pytest.raises(ollama.ResponseError, match="it supports embeddings"):
            client.generate(name, "a")


TURNS = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]


def test_conversation_is_embedded_as_its_prompt(embedder: EngineProcess) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
    )
    for options, text in (
        ({}, "<user>the cat<assistant>sat"),
        ({"add_generation_prompt": True}, "<user>the cat<assistant>sat<answer>"),
    ):
        body = {"messages": TURNS, "chat_template": template, **options}
        found = post(embedder, "/v1/embeddings", **body)["data"][0]["embedding"]
        assert found == post(embedder, "/v1/embeddings", input=text, add_special_tokens=False)["data"][0]["embedding"]
        assert found == post(embedder, "/pooling", **body)["data"][0]["data"]


def test_last_tokens_of_a_text_are_embedded(embedder: EngineProcess) -> None:
    """vLLM's `truncate_prompt_tokens`: the last k; -1: as many as the model takes."""
    token_ids = httpx.post(f"{embedder.url}/tokenize", json={"prompt": LONG}, timeout=WATCHDOG_S).json()["tokens"]
    for num_kept, expected in ((5, 5), (200, 200), (-1, 200)):
        for path, key in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
            (made,) = post(embedder, path, input=LONG, truncate_prompt_tokens=num_kept, return_token_ids=True)["data"]
            assert made["prompt_token_ids"] == token_ids[-expected:]
            assert made[key] == post(embedder, "/v1/embeddings", input=token_ids[-expected:])["data"][0]["embedding"]
    short = post(embedder, "/v1/embeddings", input=TEXTS[1], truncate_prompt_tokens=100)["data"]
    assert short == post(embedder, "/v1/embeddings", input=TEXTS[1])["data"]
    ranks = post(embedder, "/rerank", query=QUERY, documents=[LONG, TEXTS[0]], truncate_prompt_tokens=-1)["results"]
    assert len(ranks) == 2


def test_pair_is_cut_after_its_first_token(scorer: EngineProcess) -> None:
    body = {"text_1": QUERY, "text_2": LONG, "return_token_ids": True}
    whole = post(scorer, "/score", **body | {"text_2": TEXTS[0]})["data"][0]["prompt_token_ids"]
    for num_kept in (4, 20, -1):
        (made,) = post(scorer, "/score", **body, truncate_prompt_tokens=num_kept)["data"]
        assert len(made["prompt_token_ids"]) == (num_kept if num_kept > 0 else 128)
        assert made["prompt_token_ids"][0] == whole[0]
        assert made["prompt_token_ids"][-1] == whole[-1]
        assert (made["score"] > 0) == (made["score"] < 1)


def test_texts_get_the_labels_of_the_model(sorter: EngineProcess) -> None:
    def ask(path: str, **body: Any) -> Any:
        headers = {"authorization": "Bearer k"}
        return httpx.post(f"{sorter.url}{path}", json=body, headers=headers, timeout=WATCHDOG_S).raise_for_status().json()

    answer = ask("/classify", input=TEXTS)
    assert (answer["object"], answer["id"][:9]) == ("list", "classify-")
    logits = [made["probs"] for made in ask("/classify", input=TEXTS, use_activation=False)["data"]]
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for index, made in enumerate(answer["data"]):
        assert (made["index"], made["num_classes"]) == (index, 3)
        assert made["probs"] == pytest.approx(shares[index], abs=1e-6)
        assert made["label"] == ("bad", "good", "so-so")[int(np.argmax(shares[index]))]
    pooled = ask("/pooling", input=TEXTS, task="classify")
    assert [made["data"] for made in pooled["data"]] == [made["probs"] for made in answer["data"]]
    assert {made["object"] for made in pooled["data"]} == {"pooling"}
    as_bytes = ask("/pooling", input=TEXTS, encoding_format="base64")["data"]
    assert np.frombuffer(base64.b64decode(as_bytes[0]["data"]), np.float32) == pytest.approx(answer["data"][0]["probs"])
    turns = ask("/classify", messages=TURNS, chat_template="{{ messages[0].content }}")["data"]
    assert turns[0]["probs"] == ask("/classify", input="the cat", add_special_tokens=False)["data"][0]["probs"]
    assert (
        len(ask("/classify", input=LONG, truncate_prompt_tokens=7, return_token_ids=True)["data"][0]["prompt_token_ids"]) == 7
    )
    for path in ("/classify", "/pooling"):
        assert httpx.post(f"{sorter.url}{path}", json={"input": "a"}, timeout=WATCHDOG_S).status_code == 401


def test_alone_as_together(embedder: EngineProcess) -> None:
    assert [vectors(embedder, text)[0] for text in TEXTS] == vectors(embedder, TEXTS + TEXTS[::-1])[: len(TEXTS)]


@pytest.mark.parametrize("victim", ["worker0", "scheduler", "tokenizer0", "cache"])
def test_kills(embedder: EngineProcess, victim: str, undisturbed: list[bytes]) -> None:
    """The kill comes in the middle. Retried where all had been answered before it."""
    assert any(is_killed_meanwhile(embedder, victim, undisturbed) for _ in range(10))


def is_killed_meanwhile(embedder: EngineProcess, victim: str, undisturbed: list[bytes]) -> bool:
    found: list[list[bytes]] = []
    asking = threading.Thread(target=lambda: found.append(vectors(embedder, MANY)))
    steps = embedder.metric("worker_steps_total")
    asking.start()
    wait_until(lambda: embedder.metric("worker_steps_total") > steps + 20, what="some of it is computed")
    epoch = embedder.kill(victim)
    is_meanwhile = not found
    embedder.wait_for_restart(victim, epoch)
    asking.join(WATCHDOG_S)
    assert found == [undisturbed]
    return is_meanwhile


def test_small_request_overtakes_a_large_one(embedder: EngineProcess) -> None:
    """Both wait before the first step, in order of arrival. Retried where both answers came before this client could look at
    one."""
    assert any(answered_in_turn(embedder)[0] == "small" for _ in range(10))


def answered_in_turn(embedder: EngineProcess) -> list[str]:
    """Return the order in which a large request and a small one behind it were answered."""
    answered: list[str] = []

    def ask(name: str, texts: list[str]) -> None:
        vectors(embedder, texts)
        answered.append(name)

    asking = [threading.Thread(target=ask, args=("large", MANY)), threading.Thread(target=ask, args=("small", TEXTS[:1]))]
    httpx.post(f"{embedder.url}/admin/pause", headers=OPERATOR, timeout=WATCHDOG_S).raise_for_status()
    for thread, num_waiting in zip(asking, (len(MANY), len(MANY) + 1), strict=True):
        thread.start()
        wait_until(lambda: embedder.metric("num_requests_waiting") == num_waiting, what="they wait")  # noqa: B023
    httpx.post(f"{embedder.url}/admin/resume", headers=OPERATOR, timeout=WATCHDOG_S).raise_for_status()
    for thread in asking:
        thread.join(WATCHDOG_S)
    assert sorted(answered) == ["large", "small"]
    return answered


def test_dead_api_loses_only_its_own_requests(embedder: EngineProcess) -> None:
    expected = vectors(embedder, TEXTS)
    embedder.wait_for_restart("api0", embedder.kill("api0"))
    assert vectors(embedder, TEXTS) == expected


def test_ranks_by_the_angle(embedder: EngineProcess) -> None:
    """The model makes vectors."""
    query, *documents = (np.frombuffer(each, np.float32).astype(np.float64) for each in vectors(embedder, [QUERY, *TEXTS]))
    angles = [query @ each / np.linalg.norm(query) / np.linalg.norm(each) for each in documents]
    results = post(embedder, "/v1/rerank", query=QUERY, documents=TEXTS)["results"]
    assert [each["index"] for each in results] == np.argsort(-np.array(angles)).tolist()
    assert [each["relevance_score"] for each in results] == pytest.approx(sorted(angles, reverse=True))
    assert [each["document"]["text"] for each in results] == [TEXTS[each["index"]] for each in results]


def test_scores_of_pairs(scorer: EngineProcess) -> None:
    cases = MODELS[SCORER]["cases"]
    right = [case["score"] for case in cases]
    texts = [case["text"] for case in cases]
    found = [each["score"] for each in post(scorer, "/v1/score", text_1=QUERY, text_2=texts)["data"]]
    assert found == pytest.approx(right, abs=TOLERANCE)
    assert [each["score"] for each in post(scorer, "/v1/score", text_1=[QUERY] * 5, text_2=texts)["data"]] == found
    raw = post(scorer, "/v1/score", text_1=QUERY, text_2=texts, use_activation=False)["data"]
    assert [each["score"] for each in raw] == pytest.approx([case["logit"] for case in cases], abs=TOLERANCE)
    scorer.wait_for_restart("worker0", scorer.kill("worker0"))
    for path in ("/v1/rerank", "/v2/rerank"):
        answer = post(scorer, path, query=QUERY, documents=[{"text": text} for text in texts], top_n=3, return_documents=False)
        best = sorted(range(len(found)), key=lambda index: -found[index])[:3]
        assert answer["results"] == [{"index": index, "relevance_score": found[index]} for index in best]
        assert answer["usage"]["total_tokens"] == sum(len(case["token_ids"]) for case in cases)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_empty_document_is_ranked_last(embedder: EngineProcess, scorer: EngineProcess, path: str) -> None:
    for engine in (embedder, scorer):
        alone = post(engine, path, query=QUERY, documents=TEXTS)["results"]
        found = post(engine, path, query=QUERY, documents=["", *TEXTS, {"text": ""}])["results"]
        assert [(each["index"] - 1, each["relevance_score"]) for each in found[:-2]] == [
            (each["index"], each["relevance_score"]) for each in alone
        ]
        assert [(each["index"], each["relevance_score"]) for each in found[-2:]] == [(0, 0), (len(TEXTS) + 1, 0)]


def test_pair_with_empty_text_scores_zero(embedder: EngineProcess, scorer: EngineProcess) -> None:
    for engine in (embedder, scorer):
        alone = [each["score"] for each in post(engine, "/score", text_1=QUERY, text_2=TEXTS)["data"]]
        found = [each["score"] for each in post(engine, "/score", text_1=QUERY, text_2=["", *TEXTS])["data"]]
        assert found == [0, *alone]
        refused = httpx.post(f"{engine.url}/score", json={"text_1": "", "text_2": TEXTS}, timeout=WATCHDOG_S)
        assert refused.status_code == 400
        assert "empty" in refused.json()["error"]["message"]


def test_sleeping_engine_says_how_to_wake_it(embedder: EngineProcess) -> None:
    expected = vectors(embedder, TEXTS)
    assert httpx.post(f"{embedder.url}/sleep", timeout=WATCHDOG_S).status_code == 401

    def is_sleeping() -> bool:
        answer = httpx.get(f"{embedder.url}/is_sleeping", headers=OPERATOR, timeout=WATCHDOG_S).raise_for_status()
        return bool(answer.json()["is_sleeping"])

    wrong = httpx.post(f"{embedder.url}/sleep?mode=nap", headers=OPERATOR, timeout=WATCHDOG_S)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "mode")
    assert not is_sleeping()
    httpx.post(f"{embedder.url}/sleep?level=1&mode=wait", headers=OPERATOR, timeout=WATCHDOG_S).raise_for_status()
    assert is_sleeping()
    health = httpx.get(f"{embedder.url}/health", timeout=WATCHDOG_S)
    assert (health.status_code, "asleep; wake it with POST /wake_up" in health.json()["reason"]) == (503, True)
    httpx.post(f"{embedder.url}/wake_up", headers=OPERATOR, timeout=WATCHDOG_S).raise_for_status()
    assert not is_sleeping()
    assert vectors(embedder, TEXTS) == expected


LONG = "the sun " * 300
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {}, "input", "required"),
    ("/v1/embeddings", {"input": ""}, "input", "at least 1"),
    ("/v1/embeddings", {"input": []}, "input", "at least 1"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "at least 1"),
    ("/v1/embeddings", {"input": ["a", 3]}, "input", "only texts"),
    ("/v1/embeddings", {"input": [[]]}, "input[0]", "at least 1"),
    ("/v1/embeddings", {"input": [1024]}, "input", "1024"),
    ("/v1/embeddings", {"input": LONG}, "input", "200 tokens"),
    ("/v1/embeddings", {"input": ["a", LONG]}, "input", "200 tokens"),
    ("/v1/embeddings", {"input": ["a"] * 5000}, "input", "the limit"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "from 1 to"),
    ("/v1/embeddings", {"input": "a", "dimensions": 49}, "dimensions", "48"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
    ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype", "float16"),
    ("/v1/embeddings", {"input": "a", "endianness": "big"}, "endianness", "big"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "from -1"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 201}, "truncate_prompt_tokens", "200"),
    ("/v1/embeddings", {"input": "a", "messages": TURNS}, "messages", "send one"),
    ("/v1/embeddings", {"messages": []}, "messages", "at least 1"),
    (
        "/v1/embeddings",
        {"messages": [{"role": "user", "content": LONG}], "chat_template": "{{ messages[0].content }}"},
        "messages",
        "200 tokens",
    ),
    ("/pooling", {}, "input", "required"),
    ("/pooling", {"input": "a", "task": "classify"}, "model", "it supports embeddings"),
    ("/pooling", {"input": "a", "task": "token_embed"}, "task", "token_embed"),
    ("/classify", {"input": "a"}, "model", "it supports embeddings"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents", "at least 1"),
    ("/v1/rerank", {"query": "a", "documents": ["", ""]}, "documents", "empty"),
    ("/v1/rerank", {"query": "a", "documents": ["b", LONG]}, "documents", "200 tokens"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "as many"),
    ("/v1/completions", {"prompt": "a"}, "model", "it supports embeddings"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model", "it supports embeddings"),
]


@pytest.mark.parametrize(("path", "body", "param", "what"), WRONG)
def test_mistakes(embedder: EngineProcess, path: str, body: dict[str, Any], param: str, what: str) -> None:
    answer = httpx.post(f"{embedder.url}{path}", json=body, timeout=WATCHDOG_S)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert what in error["message"]


def test_no_time_for_an_answer(embedder: EngineProcess) -> None:
    """No partial answer could be sent."""
    answer = httpx.post(f"{embedder.url}/v1/embeddings", json={"input": MANY, "timeout": 1e-6}, timeout=WATCHDOG_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")


def test_a_model_of_the_other_kind(scorer: EngineProcess) -> None:
    answer = httpx.post(f"{scorer.url}/v1/embeddings", json={"input": "a"}, timeout=WATCHDOG_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_model")
    answer = httpx.post(f"{scorer.url}/v1/rerank", json={"query": LONG, "documents": ["a"]}, timeout=WATCHDOG_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_openapi_document_is_correct(embedder: EngineProcess, pytestconfig: pytest.Config) -> None:
    """schemathesis finds no mismatch on any route of an embedding model."""
    fuzz(embedder, "--include-path-regex", POOLING_ROUTES, "--phases", phases(pytestconfig), "--max-examples", "3")
