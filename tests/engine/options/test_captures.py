"""The options of captured plans: default sizes, skipped sizes, and refused values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import OptionError
from engine.options.read import read_options
from engine.options.resolve import resolve
from tests.paths import GOLDEN

DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
CAPTURED = ("--plan", "captured")


def configure(*arguments: str) -> tuple[EngineConfig, list[str]]:
    options = read_options([str(GOLDEN / "qwen3_moe"), "--max-num-seqs", "20", *arguments], {})
    return resolve(options)[0], options.notes


def sizes(*arguments: str) -> list[int]:
    config, _ = configure(*CAPTURED, *arguments)
    assert config.max_cudagraph_capture_size == config.cudagraph_capture_sizes[0]
    return list(config.cudagraph_capture_sizes)


def test_captured_sizes() -> None:
    assert sizes() == [20, 16, 8, 4, 2, 1]
    assert sizes(*DRAFTS) == [80, 64, 32, 16, 8, 4]
    assert sizes("--max-cudagraph-capture-size", "35", *DRAFTS) == [32, 16, 8, 4]
    assert sizes("--cudagraph-capture-sizes", "8,4", "--cudagraph-capture-sizes", "16", *DRAFTS) == [16, 8, 4]
    assert sizes("--graph-only-prefill", "--cudagraph-capture-sizes", "30,100", *DRAFTS) == [100, 30]
    config, _ = configure(*DRAFTS)
    assert (config.plan, config.cudagraph_capture_sizes, config.max_cudagraph_capture_size) == ("tape", (), 0)


def test_skipped_sizes_are_one_note() -> None:
    config, notes = configure(*CAPTURED, "--cudagraph-capture-sizes", "5,8,8,64", "--max-cudagraph-capture-size", "32", *DRAFTS)
    assert config.cudagraph_capture_sizes == (8,)
    (note,) = [note for note in notes if "capture" in note]
    assert note.startswith("--cudagraph-capture-sizes 5,8,8,64: skipped 5 (not a multiple of 4")
    assert "8 (duplicate); 64 (more than 32" in note


def test_mixed_steps_have_their_own_option() -> None:
    """Plans do not change it."""
    experts = ("--enable-expert-parallel", "-dp", "2")
    for plan in ((), CAPTURED):
        assert configure(*experts, *plan)[0].ep_mixed_steps
        assert not configure(*experts, *plan, "--no-ep-mixed-steps")[0].ep_mixed_steps


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (*CAPTURED, "--cudagraph-capture-sizes", "3,5", *DRAFTS),
            "sizes 3,5: expected multiples of 4 (1 + num_speculative",
        ),
        ((*CAPTURED, "--cudagraph-capture-sizes", "400"), "sizes 400: a captured step has at most 20 rows"),
        (
            (*CAPTURED, "--cudagraph-capture-sizes", "8,84", *DRAFTS),
            "sizes 84: a captured step has at most 80 rows (--max-num-seqs 20 times 4, within",
        ),
        ((*CAPTURED, "--cudagraph-capture-sizes", "0"), "expected 1 to 1048576"),
        ((*CAPTURED, "--max-cudagraph-capture-size", "2", *DRAFTS), "size 2: one sequence needs 4 rows"),
        (("--plan", "tape", "--cudagraph-capture-sizes", "4,8"), "sizes 4,8 needs --plan captured, but the plan is tape; add"),
        (("--plan", "eager", "--max-cudagraph-capture-size", "4"), "size 4 needs --plan captured, but the plan is eager"),
        (("--graph-only-prefill",), "--graph-only-prefill needs --plan captured, but the plan is tape; add --plan captured"),
        ((*CAPTURED, "--ops", "reference"), "--plan captured: on --device cpu only native ops can be recorded"),
    ],
)
def test_invalid_sizes_are_refused(arguments: Any, text: str) -> None:
    with pytest.raises(OptionError) as error:
        configure(*arguments)
    assert text in str(error.value)


def test_a_flag_that_is_false_is_no_contradiction(tmp_path: Path) -> None:
    config, _ = configure("--no-graph-only-prefill")
    assert not config.graph_only_prefill
