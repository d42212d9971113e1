"""`/v1/completions` with the real client: every form of prompt, every shape of answer."""

from __future__ import annotations

import shutil

import openai
import pytest

from api.openai.logprobs import LEAST_LOGPROB
from engine.messages import TextPrompt, TokensPrompt
from tests.api.api_server import MODEL, ApiServer
from tests.api.tokenizer_peer import said_text


def test_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=20)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "tiny"
    assert answer.choices[0].text == said_text(20)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 20, 25)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.model_extra == {"weight_version": "1"}


def test_sixteen_tokens_unless_asked_for(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="alias", prompt="hello")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.model == "alias"


@pytest.mark.parametrize(
    ("prompt", "num_tokens"),
    [([104, 105], [2]), (["a", "bcd"], [1, 3]), ([[104], [105, 106, 107]], [1, 3])],
)
def test_prompt_types(server: ApiServer, client: openai.OpenAI, prompt: list[str], num_tokens: list[int]) -> None:
    num_before = len(server.peer.submits())
    answer = client.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(num_tokens)))
    assert [choice.text for choice in answer.choices] == [said_text(4, 0), said_text(4, 1)] * len(num_tokens)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(num_tokens)
    assert answer.usage.completion_tokens == 8 * len(num_tokens)
    submits = server.peer.submits()[num_before:]
    assert [submit.sampling.sample_index for submit in submits] == [0, 1] * len(num_tokens)
    assert len({submit.group_id for submit in submits}) == len(num_tokens)
    assert len({submit.request_id for submit in submits}) == 2 * len(num_tokens)
    assert len({submit.sampling.seed for submit in submits}) == 1


def test_parameters_reach_the_engine(server: ApiServer) -> None:
    body = {
        "prompt": "x",
        "add_special_tokens": False,
        "max_tokens": 3,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": -1,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "logit_bias": {"5": 1.5, "7": -100},
        "allowed_token_ids": [80, 108, 97],
        "bad_words": ["bad"],
        "stop": ["end"],
        "stop_token_ids": [200],
        "ignore_eos": True,
        "seed": -2,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "priority": -3,
        "timeout": 10,
        "user": "somebody",
        "something_unknown": {"is": "ignored"},
        "n": None,
    }
    assert server.post("/v1/completions", body, headers={"x-request-id": "all-of-it"}).status_code == 200
    (submit,) = server.peer.submits("all-of-it~")
    sampling, text = submit.sampling, submit.text
    assert submit.prompt == TextPrompt("x", False)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 0, 0.25, 0.125)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1, 2)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed, sampling.ignore_eos) == (3, 2, 2**64 - 2, True)
    assert (sampling.logit_bias, sampling.allowed_token_ids) == ({5: 1.5, 7: -100}, [80, 108, 97])
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs) == (-1, -1)
    assert (text.stop, text.include_stop_str_in_output, text.skip_special_tokens) == (["end"], True, False)
    assert (text.bad_words, sampling.stop_token_ids, submit.priority) == (["bad"], [200], -3)
    assert submit.deadline_ns - submit.arrival_ns == 10_000_000_000
    assert (submit.api, submit.api_epoch, submit.attempt) == ("api0", 1, 0)


def test_minus_one_is_no_seed(server: ApiServer) -> None:
    """vLLM and llama.cpp take -1 as no seed, and their clients send it."""
    for _ in range(2):
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "seed": -1}).status_code == 200
    first, second = server.peer.submits()[-2:]
    assert first.sampling.seed != second.sampling.seed


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=12, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [*"Plasma gl", "bytes:\\xc3", "bytes:\\xbc", "h"]
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10]
    assert logprobs.token_logprobs == [-1.0] * 12
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"Q": -0.9, "P": -1.0, "R": -2.0}
    alone = client.completions.create(model="tiny", prompt="hello", max_tokens=1, logprobs=0)
    assert alone.choices[0].logprobs is not None
    assert alone.choices[0].logprobs.top_logprobs == [{"P": -1.0}]


def test_impossible_tokens_have_a_number(server: ApiServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "logprobs": 20}).json()
    top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    assert min(top.values()) > LEAST_LOGPROB
    deepest = server.post("/v1/completions", {"prompt": "xy", "max_tokens": 1, "prompt_logprobs": 20}).json()
    assert len(deepest["choices"][0]["prompt_logprobs"][1]) == 20


@pytest.mark.parametrize("prompt", ["h\xfcllo", list("h\xfcllo".encode())])
def test_echo(client: openai.OpenAI, prompt: str) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=2, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "h\xfclloPl"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["h", "bytes:\\xc3", "bytes:\\xbc", *"lloPl"]
    assert choice.logprobs.token_logprobs == [None, *[-0.5] * 5, -1.0, -1.0]
    assert choice.logprobs.text_offset == [0, 1, 2, 2, 3, 4, 5, 6]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] is None
    assert set(choice.logprobs.top_logprobs[3] or {}) == {"l", "m"}


def test_scoring_a_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("hello", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list("hello")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_prompt_logprobs_and_token_ids(server: ApiServer) -> None:
    body = {"prompt": "abc", "max_tokens": 3, "prompt_logprobs": 1, "return_token_ids": True}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert choice["token_ids"] == list(b"Pla")
    assert choice["prompt_token_ids"] == list(b"abc")
    assert choice["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -0.5, "rank": 2, "decoded_token": "b"},
            "99": {"logprob": -0.4, "rank": 1, "decoded_token": "c"},
        },
        {
            "99": {"logprob": -0.5, "rank": 2, "decoded_token": "c"},
            "100": {"logprob": -0.4, "rank": 1, "decoded_token": "d"},
        },
    ]


def test_prompts_of_one_token_have_a_null_alone(server: ApiServer) -> None:
    choice = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "prompt_logprobs": 1}).json()["choices"][0]
    assert choice["prompt_logprobs"] == [None]


def test_best_of_returns_the_likeliest(client: openai.OpenAI) -> None:
    """Sequence i has the log-probability -1 / (i + 1): the last is the best."""
    answer = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, best_of=4, max_tokens=5)
    assert [choice.text for choice in answer.choices] == [said_text(5, 3), said_text(5, 2)] * 2
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 40)


def test_stop_reason(server: ApiServer) -> None:
    choice = server.post("/v1/completions", {"prompt": "a", "stop_token_ids": [ord("m")]}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Plasm", "stop", ord("m"))


def test_request_ids_and_weight_versions(server: ApiServer) -> None:
    given = server.post("/v1/completions", {"prompt": "a"}, headers={"x-request-id": "my.own:id_1"})
    assert given.headers["x-request-id"] == "my.own:id_1"
    assert given.json()["id"] == "cmpl-my.own:id_1"
    made = server.post("/v1/completions", {"prompt": "a"})
    assert made.json()["id"] == f"cmpl-{made.headers['x-request-id']}"
    assert made.headers["x-tokamak-weight-version"] == "1"
    submit = server.peer.submits("my.own:id_1~")[0]
    assert submit.request_id.partition("~")[0] == "my.own:id_1"
    assert isinstance(submit.prompt, TextPrompt)


def test_defaults_are_the_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> None:
    """generation_config.json gives the defaults, as in vLLM."""
    model = tmp_path_factory.mktemp("model")
    shutil.copy(MODEL / "config.json", model)
    (model / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "top_p": 0.25, "max_new_tokens": 9}')
    with ApiServer(tmp_path_factory.mktemp("run"), model=str(model)) as other:
        other.post("/v1/completions", {"prompt": [1, 2], "top_p": 0.75})
        other.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 3})
        submit, shorter = other.peer.submits()
    assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.top_p) == (0.5, 7, 0.75)
    assert (submit.sampling.max_tokens, shorter.sampling.max_tokens) == (9, 3)
    assert isinstance(submit.prompt, TokensPrompt)
