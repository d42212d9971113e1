"""Options for layers that draft, with checkpoints that have some and that have none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import OptionError
from engine.options.read import read_options
from engine.options.resolve import resolve
from tests.paths import GOLDEN
from tools.demo import MODEL, MODELS

MTP = ("--speculative-config", '{"method": "mtp"}')


def configure(model: Path, *arguments: str) -> EngineConfig:
    return resolve(read_options([str(model), *arguments], {}))[0]


@pytest.mark.parametrize(("name", "num_layers"), [("deepseek_v3", 3), ("ernie4_5_moe", 4)])
def test_their_keys_and_values_are_one_more_layer(name: str, num_layers: int) -> None:
    sizes = [configure(GOLDEN / name, "--num-kv-blocks", "11", *options).kv_cache_bytes for options in ((), MTP)]
    num_marks = 12 * 16  # a byte for each position of 11 blocks and the dummy block
    assert sizes[1] == sizes[0] // num_layers * (num_layers + 1) + num_marks


@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        ((), "mtp"),
        (("--max-num-seqs", "3", "--data-parallel-size", "2"), "mtp"),
        (("--speculative-config", "{}"), ""),
        (("--speculative-config", '{"method": "ngram"}'), "ngram"),
        ((str(MODEL),), ""),
        (("--demo", "vision"), ""),
        (("--max-num-batched-tokens", "3"), ""),
        (("--plan", "captured"), ""),
        (("--ops", "reference"), ""),
        (("--runner", "pooling"), ""),
        (("-tp", "2"), ""),
    ],
)
def test_embedded_model_drafts_by_default(arguments: tuple[str, ...], method: str) -> None:
    assert resolve(read_options(list(arguments), {}, MODELS))[0].speculative_config.method == method


def test_a_family_that_has_none() -> None:
    with pytest.raises(
        OptionError,
        match=r"method mtp does not work with .*llama models have no MTP layers; models that may have them: qwen3, ernie4_5",
    ):
        configure(GOLDEN / "llama", *MTP)


def test_a_model_that_has_none() -> None:
    with pytest.raises(OptionError, match=r"its config\.json has no num_nextn_predict_layers, or sets it to 0; use method"):
        configure(GOLDEN / "qwen3", *MTP)


@pytest.mark.parametrize("has_index", [False, True])
def test_promised_draft_layers_are_missing(has_index: bool, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "qwen3", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    index = tmp_path / "model" / "model.safetensors.index.json"
    names = ["model.norm.weight", "lm_head.weight"]
    if has_index:
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    with pytest.raises(
        OptionError,
        match=r"mtp\.fc\.weight is missing, although config\.json declares 2 MTP layers; use method ngram",
    ):
        configure(tmp_path / "model", *MTP)
    configure(tmp_path / "model", *MTP, "--load-format", "dummy")
    configure(tmp_path / "model")
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "mtp.fc.qweight"], "model.safetensors")}))
    configure(tmp_path / "model", *MTP)
