"""Settings: every value from the checkpoint's files of any age, overridden by the server's options, then by a request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.processor_files import IMAGE_PROCESSOR, PROCESSOR, VIDEO_PROCESSOR
from engine.checkpoint.record import ModelRecord
from engine.errors import CheckpointError, OptionError, RequestError
from engine.media.frames import FrameChoice
from engine.media.settings import MediaSettings
from engine.media.sizes import budget_size
from tests.engine.media.visions import record_of

GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "image_token_id": 5,
    "boi_token_id": 3,
    "eoi_token_id": 4,
    "text_config": {
        **{"vocab_size": 400, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "head_dim": 16},
        **{"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision", "sliding_window": 16},
    },
    "vision_config": {
        **{"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"patch_size": 6, "pooling_kernel_size": 2, "position_embedding_size": 600},
    },
}


def of(files: dict[str, Any], **processor_kwargs: Any) -> MediaSettings:
    return MediaSettings.of(record_of("qwen2_5_vl", files), processor_kwargs, {})


def test_values_come_from_any_processor_file() -> None:
    size = {"shortest_edge": 1000, "longest_edge": 2000}
    old = of({IMAGE_PROCESSOR: {"min_pixels": 1000, "max_pixels": 2000}})
    middle = of({IMAGE_PROCESSOR: {"size": {"min_pixels": 1000, "max_pixels": 2000}}})
    other = {"size": {"shortest_edge": 5, "longest_edge": 50_000}}
    new = of(
        {
            PROCESSOR: {"image_processor": {"size": size}, "video_processor": {"size": size}},
            IMAGE_PROCESSOR: other,
            VIDEO_PROCESSOR: other,
        }
    )
    for settings in (old, middle, new, of({IMAGE_PROCESSOR: {"size": size}})):
        assert (settings.picture.min_pixels, settings.picture.max_pixels) == (1000, 2000)
        assert (settings.clip.min_pixels, settings.clip.max_pixels) == (1000, 2000)
    apart = of(
        {IMAGE_PROCESSOR: {"size": size}, VIDEO_PROCESSOR: {"fps": 1, "max_frames": 10, "size": {"longest_edge": 500_000}}}
    )
    assert (apart.picture.max_pixels, apart.clip.max_pixels) == (2000, 500_000)
    assert apart.clip.frames == FrameChoice(1.0, 4, 10)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({IMAGE_PROCESSOR: {"patch_size": 16}}, "patch_size 16 differs from the model's 14"),
        ({IMAGE_PROCESSOR: b"no"}, "preprocessor_config.json is not valid JSON"),
        ({IMAGE_PROCESSOR: {"size": 5}}, "size 5 should be an object"),
        ({IMAGE_PROCESSOR: {"max_pixels": "many"}}, "max_pixels 'many' should be an integer from 1"),
    ],
)
def test_wrong_files_end_the_start(files: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        of(files)


def test_requests_may_only_lower_the_options() -> None:
    settings = of({IMAGE_PROCESSOR: {"min_pixels": 1000, "max_pixels": 2000}}, max_pixels=50_000, fps=4)
    assert (settings.picture.max_pixels, settings.clip.frames.fps) == (50_000, 4.0)
    with pytest.raises(OptionError, match=r"--mm-processor-kwargs, --media-io-kwargs: unknown setting colour"):
        of({}, colour=1)

    def asked(**given: Any) -> MediaSettings:
        return settings.for_request(json.dumps(given).encode())

    less = asked(mm_processor_kwargs={"size": {"longest_edge": 900}}, media_io_kwargs={"video": {"num_frames": 8}})
    assert (less.picture.min_pixels, less.picture.max_pixels, less.clip.frames.num_frames) == (900, 900, 8)
    one = asked(mm_processor_kwargs={"images_kwargs": {"max_pixels": 900}})
    assert (one.picture.max_pixels, one.clip.max_pixels) == (900, 50_000)
    assert asked(mm_processor_kwargs={"do_sample_frames": False}).clip.frames.num_frames == -1
    few = of({}, num_frames=8).for_request(b'{"mm_processor_kwargs": {"fps": 1}}').clip.frames
    assert (few.fps, few.num_frames, few.most) == (1.0, 0, 8)
    assert settings.for_request(b"") == settings
    for wrong, message in (
        ({"max_pixels": 50_001}, "max_pixels of images 50001 is more than the server's 50000; request less"),
        ({"fps": 4.5}, "fps 4.5 is more than the server's 4"),
        ({"num_frames": 769}, "num_frames 769 is more than the server's 768"),
        ({"max_frames": 10_000}, "max_frames 10000 is more than the server's 768"),
        ({"min_pixels": 60_000}, "min_pixels 60000 is more than max_pixels 50000"),
        ({"do_resize": False}, "unknown setting do_resize; available: min_pixels"),
        ({"max_pixels": 0}, "max_pixels 0 should be an integer from 1"),
        ({"fps": "nan"}, "fps 'nan' should be a positive number"),
        ({"images_kwargs": 3}, "images_kwargs 3 should be an object"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            asked(mm_processor_kwargs=wrong)
        assert caught.value.status == 400


@pytest.mark.parametrize(
    ("given", "factor", "max_tokens", "expected"),
    [
        ((480, 640), 48, 280, (672, 912)),
        ((1, 1), 48, 70, (384, 384)),
        ((3000, 20), 48, 280, (9792, 48)),
        ((20, 3000), 48, 70, (48, 3360)),
        ((1000, 1333), 28, 140, (280, 364)),
        ((777, 777), 48, 1120, (1584, 1584)),
    ],
)
def test_budget_of_tokens_is_used_up(given: tuple[int, int], factor: int, max_tokens: int, expected: tuple[int, int]) -> None:
    """The sizes of Gemma4ImageProcessor."""
    assert budget_size(*given, factor, 1, max_tokens * factor**2, 1) == expected


def test_pictures_of_gemma4_have_a_budget(tmp_path: Path) -> None:
    """Other settings are refused; the default needs no processor file."""
    record = gemma4_record(tmp_path)
    settings = MediaSettings.of(record, {}, {})
    assert settings.picture.size_of(480, 640) == (168, 228)
    less = settings.for_request(b'{"mm_processor_kwargs": {"max_soft_tokens": 70}}')
    assert less.picture.size_of(480, 640) == (84, 108)
    for wrong, message in (
        ({"max_soft_tokens": 560}, "max_soft_tokens 560 is more than the server's 280; request less"),
        ({"max_soft_tokens": 71}, "max_soft_tokens 71 should be one of 70, 140, 280, 560, 1120"),
        ({"max_pixels": 10}, "unknown setting max_pixels; available: max_soft_tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            settings.for_request(json.dumps({"mm_processor_kwargs": wrong}).encode())
    for content, message in (
        ({"max_soft_tokens": 1120}, "2240 patches of the longest side are more than position_embedding_size 600"),
        ({"pooling_kernel_size": 3}, "pooling_kernel_size 3 differs from the model's 2"),
        ({"do_resize": False}, "do_resize false is not supported"),
    ):
        with pytest.raises(CheckpointError, match=message):
            MediaSettings.of(gemma4_record(tmp_path, content), {}, {})


def gemma4_record(directory: Path, processor: dict[str, Any] | None = None) -> ModelRecord:
    (directory / "config.json").write_text(json.dumps(GEMMA4))
    files = {} if processor is None else {IMAGE_PROCESSOR: json.dumps(processor).encode()}
    return ModelRecord(str(directory), ModelConfig.read(directory), files)
