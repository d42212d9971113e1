"""SamplingParams and related classes: each field of vLLM is sent, is known to have no effect, or is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from api.schemas.requests import ChatRequest, CompletionRequest
from tokamak import PoolingParams, RepetitionDetectionParams, SamplingParams, StructuredOutputsParams

SET: dict[str, Any] = {  # of each field that is sent, a value that is not the default
    "n": 2,
    "best_of": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "stop": ["x", "y"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "max_tokens": 3,
    "min_tokens": 1,
    "logprobs": 1,
    "prompt_logprobs": 1,
    "logprob_token_ids": [3],
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "structured_outputs": StructuredOutputsParams(regex="a+"),
    "guided_decoding": StructuredOutputsParams(json={"type": "object"}),
    "logit_bias": {3: 1.5},
    "allowed_token_ids": [3, 4],
    "bad_words": ["x"],
    "repetition_detection": RepetitionDetectionParams(3, 1, 2),
    "truncate_prompt_tokens": 5,
    "top_n_sigma": 1.0,
    "typical_p": 0.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.5,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 10,
    "dry_sequence_breakers": ["x"],
    "timeout": 100.0,
}
WITHOUT_EFFECT = {"spaces_between_special_tokens": False, "output_kind": 2, "stream_interval": 3, "skip_clone": True}
HERE = {"detokenize": False, "skip_reading_prefix_cache": True}  # handled on this side
CHAT = {"thinking_token_budget": 5}
REFUSED: dict[str, Any] = {
    "prompt_logprob_token_ids": [3],
    "prompt_logprob_start": 3,
    "flat_logprobs": True,
    "extra_args": {"a": 1},
    "routed_experts_prompt_start": 3,
    "trace_decode_token_ids": [3],
    "logits_processors": [print],
}


def test_every_field_has_its_fate() -> None:
    fates = (SET, WITHOUT_EFFECT, HERE, CHAT, REFUSED)
    assert sorted(SamplingParams.__struct_fields__) == sorted(name for fate in fates for name in fate)


@pytest.mark.parametrize("name", SET | CHAT)
def test_sent_fields_are_fields_of_requests(name: str) -> None:
    """A set field changes only the fields of the request that it should."""
    plain, sent = SamplingParams().fields(), SamplingParams(**{name: (SET | CHAT)[name]}).fields()
    changed = {key: value for key, value in sent.items() if plain.get(key) != value}
    assert changed
    kind = ChatRequest if name in CHAT else CompletionRequest
    assert set(changed) <= set(kind.__struct_fields__)
    msgspec.convert({**sent, "prompt": "x"}, CompletionRequest, str_keys=True)


@pytest.mark.parametrize("name", WITHOUT_EFFECT | HERE)
def test_fields_that_are_not_sent(name: str) -> None:
    assert SamplingParams(**{name: (WITHOUT_EFFECT | HERE)[name]}).fields() == SamplingParams().fields()


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_fields_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: REFUSED[name]})
    params = SamplingParams()
    setattr(params, name, REFUSED[name])
    with pytest.raises(ValueError, match=name):
        params.fields()


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"logprobs": -1}, "whole vocabulary"),
        ({"prompt_logprobs": -1}, "whole vocabulary"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_n_sigma": float("inf")}, "top_n_sigma is inf"),
        ({"stop": "x", "detokenize": False}, "stop strings"),
        ({"structured_outputs": SET["structured_outputs"], "guided_decoding": SET["guided_decoding"]}, "the same"),
    ],
)
def test_contradictory_values_are_refused(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        SamplingParams(**fields).fields()


def test_unknown_names() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        StructuredOutputsParams(schema={})  # type: ignore[call-arg]


def test_defaults_equal_vllms() -> None:
    """Defaults do not depend on a model's files."""
    sent = SamplingParams().fields()
    assert sent["temperature"] == sent["top_p"] == sent["repetition_penalty"] == 1.0
    assert (sent["max_tokens"], sent["top_k"], sent["min_p"], sent["n"]) == (16, 0, 0.0, 1)
    assert SamplingParams(max_tokens=None).fields()["max_tokens"] == 2**31 - 1
    assert "seed" not in SamplingParams(seed=-1).fields()
    assert SamplingParams(logprobs=True).fields()["logprobs"] == 1
    assert SamplingParams.from_optional(top_p=None, n=2) == SamplingParams(n=2)
    assert SamplingParams(n=3).clone() == SamplingParams(n=3)


def test_structured_outputs() -> None:
    assert SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"])).fields()["structured_outputs"] == {
        "choice": ["a"]
    }
    for fields in ({}, {"regex": "a", "choice": ["b"]}):
        with pytest.raises(ValueError, match="one form"):
            StructuredOutputsParams(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="disable_additional_properties"):
        StructuredOutputsParams(json_object=True, disable_additional_properties=True)


def test_pooling() -> None:
    assert PoolingParams(dimensions=3).fields("dimensions") == {"dimensions": 3}
    with pytest.raises(ValueError, match="use_activation"):
        PoolingParams(use_activation=True).fields("dimensions")
