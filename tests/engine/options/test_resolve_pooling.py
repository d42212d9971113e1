"""Whether and how an engine pools: by its checkpoint's files, and by options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import OptionError
from engine.options.read import read_options
from engine.options.resolve import resolve
from tests.paths import GOLDEN
from tests.pooled import MODELS, write_checkpoint

MEAN = '{"pooling_type": "mean", "normalize": false}'


def configure(model: Path, *arguments: str) -> EngineConfig:
    return resolve(read_options([str(model), *arguments], {}))[0]


EXPECTED: dict[str, tuple[Any, ...]] = {  # task, kind, values, of length 1, activation, tokens
    "qwen3 last, normalized": ("embed", "last", 48, True, "none", ()),
    "qwen3 mean": ("embed", "mean", 48, False, "none", ()),
    "qwen3 two tokens": ("classify", "last", 1, False, "sigmoid", (300, 400)),
    "qwen3 classifier": ("classify", "last", 1, False, "sigmoid", ()),
    "bert mean, normalized": ("embed", "mean", 48, True, "none", ()),
    "bert classifier": ("classify", "cls", 1, False, "sigmoid", ()),
    "xlm-roberta first, normalized": ("embed", "cls", 48, True, "none", ()),
    "xlm-roberta classifier": ("classify", "cls", 1, False, "sigmoid", ()),
}


@pytest.mark.parametrize("name", MODELS)
def test_by_the_files(name: str, tmp_path: Path) -> None:
    pooling = configure(write_checkpoint(name, tmp_path / "model")).pooling
    assert pooling is not None
    found = pooling.task, pooling.kind, pooling.num_values, pooling.is_normalized, pooling.activation, pooling.class_token_ids
    assert found == EXPECTED[name]


def test_options_decide(tmp_path: Path) -> None:
    generating = GOLDEN / "qwen3"
    assert configure(generating).pooling is None
    pooling = configure(generating, "--runner", "pooling").pooling
    assert pooling is not None
    assert (pooling.task, pooling.kind, pooling.is_normalized) == ("embed", "last", True)
    pooling = configure(generating, "--pooler-config", MEAN).pooling
    assert pooling is not None
    assert (pooling.kind, pooling.is_normalized) == ("mean", False)
    pooling = configure(generating, "--pooler-config", '{"classifier_from_token": ["<|im_start|>", "<|im_end|>"]}').pooling
    assert pooling is not None
    assert (pooling.task, pooling.class_token_ids) == ("classify", (1, 2))
    embedder = write_checkpoint("qwen3 last, normalized", tmp_path / "model")
    assert configure(embedder, "--runner", "generate").pooling is None


def test_prompts_of_encoders_are_whole(tmp_path: Path) -> None:
    encoder = write_checkpoint("bert mean, normalized", tmp_path / "model")
    config = configure(encoder)
    assert config.max_model_len == 100  # max_seq_length
    assert not config.enable_prefix_caching
    assert config.num_kv_blocks == 2 * (512 // 16 + 32)
    assert configure(encoder, "--max-num-batched-tokens", "64").max_model_len == 64
    assert (
        configure(write_checkpoint("xlm-roberta classifier", tmp_path / "other")).max_model_len == 128
    )  # rows behind padding's


@pytest.mark.parametrize(
    ("name", "arguments", "what"),
    [
        ("bert classifier", ["--runner", "generate"], "cannot generate text"),
        ("bert classifier", ["--tensor-parallel-size", "2"], "encoder models support only 1"),
        ("bert classifier", ["--pooler-config", '{"pooling_type": "MEAN"}'], "does not apply to a model that scores"),
        ("qwen3 mean", ["--speculative-config", '{"method": "ngram"}'], "which generates no text"),
        ("qwen3 two tokens", ["--pooler-config", '{"classifier_from_token": ["no such", "yes"]}'], "'no such' is no token"),
        ("qwen3 mean", ["--pooler-config", '{"pooling_type": "MAX"}'], "expected LAST, MEAN, CLS"),
        ("qwen3 mean", ["--pooler-config", '{"kind": "MEAN"}'], "unknown key kind"),
    ],
)
def test_refusals(name: str, arguments: list[str], what: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=what):
        configure(write_checkpoint(name, tmp_path / "model"), *arguments)


@pytest.mark.parametrize(
    ("file", "content", "what"),
    [
        ("modules.json", [{"type": "a.Transformer"}, {"type": "a.Dense", "path": "2_Dense"}], "'Dense' is not supported"),
        ("modules.json", [{"type": "a.Pooling", "path": "../1_Pooling"}], "points outside the checkpoint"),
        ("modules.json", {"no": "list"}, "cannot be read"),
        ("sentence_bert_config.json", {"max_seq_length": 8, "do_lower_case": True}, "do_lower_case: true is not supported"),
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "max is not supported"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "mean and cls"),
    ],
)
def test_files_that_cannot_be_followed(file: str, content: Any, what: str, tmp_path: Path) -> None:
    model = write_checkpoint("qwen3 mean", tmp_path / "model")
    (model / file).write_text(json.dumps(content))
    with pytest.raises(OptionError, match=what):
        configure(model)
