"""Options without effect are reported, each in a note of its own cause."""

from __future__ import annotations

import pytest

from engine.options.read import read_options
from engine.options.resolve import resolve
from tests.e2e.engine_process import GOLDEN
from tools.demo import MODEL


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (
            ["--gpu-memory-utilization", "0.5", "--ops", "reference"],
            "--gpu-memory-utilization has no effect: it applies to GPUs only",
        ),
        (["--max-loras", "4", "--max-lora-rank", "8"], "--max-loras and --max-lora-rank has no effect: LoRA"),
        (["--mm-chunk-tokens", "64"], "--mm-chunk-tokens has no effect: the model takes only text"),
        (["--disable-chunked-mm-input"], "--disable-chunked-mm-input has no effect: the model takes only text"),
        (["--max-media-bytes", "4096"], "--max-media-bytes has no effect: the model takes only text"),
        (
            ["--expert-placement-strategy", "linear"],
            "--expert-placement-strategy has no effect: expert parallelism is disabled",
        ),
        (["--eplb-config", "{}"], "--eplb-config has no effect: expert rebalancing is disabled"),
        (["--data-parallel-routing", "load"], "--data-parallel-routing has no effect: there is only one replica"),
        (["--weight-cache-limit", "1GiB", "--no-weight-cache"], "--weight-cache-limit has no effect: packed weights"),
    ],
)
def test_ineffective_options_are_noted(arguments: list[str], note: str) -> None:
    options = read_options([str(MODEL), *arguments], {})
    resolve(options)
    assert len(options.notes) == 1
    assert options.notes[0].startswith(note)


def test_media_options_of_a_text_only_engine() -> None:
    options = read_options([str(GOLDEN / "qwen2_5_vl"), "--language-model-only", "--max-image-pixels", "100000"], {})
    resolve(options)
    assert options.notes == ["--max-image-pixels has no effect: the vision encoder is disabled by --language-model-only"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--enable-lora", "--max-loras", "4"],
        ["--weight-cache-limit", "1GiB"],
        ["--no-disable-chunked-mm-input", "--no-enable-mm-embeds"],
        ["--limit-mm-per-prompt", '{"image": 0, "video": 0}'],
    ],
)
def test_effective_options_are_not_noted(arguments: list[str]) -> None:
    options = read_options([str(MODEL), *arguments], {})
    resolve(options)
    assert options.notes == []
