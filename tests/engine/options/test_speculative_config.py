"""`--speculative-config`: accepted values, and messages for others."""

from __future__ import annotations

import pytest

from engine.config import SpeculativeConfig
from engine.options.speculative_config import parse_speculative_config


def test_it_is_read() -> None:
    assert parse_speculative_config("{}") == SpeculativeConfig()
    assert parse_speculative_config("{}").max_drafts == 0
    text = '{"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 3, "prompt_lookup_max": 3, "adaptive": false}'
    found = parse_speculative_config(text)
    assert found == SpeculativeConfig(
        method="ngram", num_speculative_tokens=7, prompt_lookup_min=3, prompt_lookup_max=3, adaptive=False
    )
    assert found.max_drafts == 7


def test_suffix_and_lists() -> None:
    found = parse_speculative_config('{"method": "suffix, ngram", "suffix_decoding_max_spec_factor": 2}')
    assert (found.method, found.methods, found.num_speculative_tokens) == ("ngram,suffix", ("ngram", "suffix"), 16)
    assert (found.suffix_decoding_max_spec_factor, found.suffix_decoding_min_token_prob) == (2.0, 0.1)
    assert (found.suffix_decoding_max_tree_depth, found.suffix_decoding_max_cached_requests) == (24, 10000)
    assert parse_speculative_config('{"method": "suffix", "num_speculative_tokens": 5}').max_drafts == 5


@pytest.mark.parametrize("name", ["deepseek_mtp", "ernie_mtp", "qwen3_next_mtp"])
def test_other_names_of_mtp(name: str) -> None:
    assert parse_speculative_config(f'{{"method": "{name}"}}').methods == ("mtp",)
    assert parse_speculative_config(f'{{"method": "{name},ngram"}}').method == "ngram,mtp"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected a JSON object, such as"),
        ("{", "expected a JSON object"),
        ('{"method": "eagle"}', '"eagle": eagle is not supported; expected ngram, suffix or mtp, or several'),
        ('{"method": "medusa"}', "medusa is not supported"),
        ('{"method": "draft_model"}', "draft_model is not supported"),
        ('{"method": "sufix"}', r"did you mean suffix\?"),
        ('{"method": "ngram,ngram"}', "ngram is given 2 times; give it once"),
        ('{"method": "ngram,mtp,deepseek_mtp"}', "mtp is given 2 times"),
        ('{"method": 5}', "method 5: expected ngram"),
        ('{"num_speculative_tokens": 3}', "method is missing"),
        ('{"method": "ngram", "num_speculative_tokens": 17}', "expected an integer from 1 to 16"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "expected an integer from 1 to 16"),
        ('{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}', "prompt_lookup_min 5 exceeds"),
        ('{"method": "ngram", "adaptive": 1}', "adaptive 1: expected true or false"),
        ('{"method": "ngram", "model": "x"}', 'model "x": draft models are not supported'),
        ('{"method": "ngram", "num_speculative_token": 2}', r"unknown key .*; did you mean num_speculative_tokens\?"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": 1.5}', "1.5: expected a number from 0 to 1"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 1}', "expected an integer from 2 to 256"),
    ],
)
def test_invalid_values_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_speculative_config(text)
