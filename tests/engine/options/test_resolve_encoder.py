"""Encoder budget of a step, from the shapes of both models."""

from __future__ import annotations

import pytest

from engine.checkpoint.record import ModelRecord
from engine.config import EngineConfig
from engine.errors import OptionError
from engine.options.read import read_options
from engine.options.resolve import resolve
from tests.engine.echo_engine import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden"


def configure(name: str, *arguments: str) -> EngineConfig:
    return resolve(read_options([str(GOLDEN / name), *arguments], {}), frozenset({"avx2"}))[0]


def test_by_default_as_much_as_the_tokens_cost() -> None:
    config = configure("qwen2_5_vl", "--max-num-batched-tokens", "256")
    twice = configure("qwen2_5_vl", "--max-num-batched-tokens", "512")
    assert config.encoder_depth > 0
    assert config.mm_chunk_tokens == 256
    assert 0 < config.max_num_batched_encoder_embeds < 256 * 8
    assert abs(twice.max_num_batched_encoder_embeds - 2 * config.max_num_batched_encoder_embeds) <= 1
    assert not config.disable_chunked_mm_input


def test_attention_costs_more_beside_faster_matrices() -> None:
    """Float32, as it is, next to weights of 8 bits; a layer with windows costs almost nothing."""
    plain, rounded = (configure("qwen2_5_vl", *arguments) for arguments in ((), ("--vision-quantization", "wint8")))
    vision = ModelRecord.read(GOLDEN / "qwen2_5_vl").config.vision
    assert vision is not None
    assert plain.encoder_whole_layers == vision.full_attention_layers
    per_row_and_number = 4 * vision.hidden_size + 3 * vision.intermediate_size
    assert plain.encoder_attention_cost == 2 * vision.spatial_merge_size**2 / per_row_and_number
    assert rounded.encoder_attention_cost == pytest.approx(3 * plain.encoder_attention_cost)
    assert 3 * plain.max_num_batched_encoder_embeds <= rounded.max_num_batched_encoder_embeds
    both = configure("qwen2_5_vl", "--vision-quantization", "wint8", "--quantization", "wint8")
    assert both.max_num_batched_encoder_embeds == plain.max_num_batched_encoder_embeds
    whole = configure("qwen3_vl")
    assert whole.encoder_whole_layers == tuple(range(whole.encoder_depth))


def test_explicit_options_win() -> None:
    config = configure(
        "qwen3_vl", "--max-num-batched-encoder-embeds", "77", "--mm-chunk-tokens", "64", "--disable-chunked-mm-input"
    )
    assert (config.max_num_batched_encoder_embeds, config.mm_chunk_tokens) == (77, 64)
    assert config.disable_chunked_mm_input


@pytest.mark.parametrize(("name", "arguments"), [("llama", ()), ("qwen2_5_vl", ("--language-model-only",))])
def test_text_alone_has_no_encoder(name: str, arguments: tuple[str, ...]) -> None:
    config = configure(name, *arguments)
    assert (config.encoder_depth, config.max_num_batched_encoder_embeds, config.mm_chunk_tokens) == (0, 0, 0)


def test_a_chunk_is_no_longer_than_a_step() -> None:
    with pytest.raises(OptionError, match="--mm-chunk-tokens 513 exceeds --max-num-batched-tokens 512"):
        configure("qwen2_5_vl", "--mm-chunk-tokens", "513")
