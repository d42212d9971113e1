"""Options of vision models: their resolved values, and unsupported ones."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.errors import OptionError
from engine.options.read import read_options
from engine.options.resolve import resolve
from engine.process.topology import default_plan
from tests.paths import GOLDEN


def resolved(family: str, *arguments: str) -> EngineConfig:
    return resolve(read_options([str(GOLDEN / family), *arguments], {}))[0]


def test_vision_model_gets_media_process_and_memory() -> None:
    config = resolved("qwen2_5_vl")
    assert [plan.name for plan in default_plan(config)].count("media0") == 1
    assert (config.encoder_cache_size, config.encoder_row_width) == (16384, 64)
    assert config.limit_mm_per_prompt == {"image": 999, "video": 999}
    other = resolved("qwen3_vl", "--media-processes", "2", "--limit-mm-per-prompt", "image=3", "--encoder-cache-size", "2000")
    assert (other.media_processes, other.encoder_cache_size, other.encoder_row_width) == (2, 2000, 64 * 3)
    assert other.limit_mm_per_prompt == {"image": 3, "video": 999}


@pytest.mark.parametrize("arguments", [(), ("--language-model-only",)])
def test_text_alone_needs_none(arguments: tuple[str, ...]) -> None:
    config = resolved("qwen2_5_vl" if arguments else "llama", *arguments)
    assert (config.media_processes, config.encoder_cache_size, config.encoder_row_width) == (0, 0, 0)
    with pytest.raises(OptionError, match=r"--media-processes 2 .*; remove it"):
        resolved("qwen2_5_vl" if arguments else "llama", *arguments, "--media-processes", "2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--encoder-cache-size", "1000"), "--encoder-cache-size 1000 is too small for the 1280 tokens of the largest image"),
        (("--mm-processor-cache-gb", "0.002"), "--mm-processor-cache-gb 0.002 is too small for the 0.00560"),
        (
            ("--media-memory", "8MiB"),
            "--media-memory .* is too small for .* bytes of a video, twice --max-media-bytes; raise it",
        ),
        (("--mm-processor-kwargs", "{"), "expected a JSON object"),
        (("--mm-processor-kwargs", '{"colour": 1}'), "unknown setting colour"),
        (("--limit-mm-per-prompt", "audio=1"), "expected numbers up to 10000 for image and video"),
        (("--mm-processor-cache-gb", "nan"), "expected a number of GiB from 0.001 to 1024"),
    ],
)
def test_too_small_sizes_name_the_needed_ones(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        resolved("qwen2_5_vl", *arguments)


def test_smaller_pictures_need_less() -> None:
    config = resolved("qwen2_5_vl", "--mm-processor-kwargs", '{"max_pixels": 50176}', "--encoder-cache-size", "64")
    assert config.encoder_cache_size == 64
