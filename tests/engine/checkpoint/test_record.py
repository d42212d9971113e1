"""The record of a checkpoint made at the start, which every later life reads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.record import ModelRecord
from engine.errors import CheckpointError, TokamakError
from tests.paths import GOLDEN

QUANTIZATION = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "qwen2", tmp_path / "model"))


def kept(record: ModelRecord, path: Path) -> ModelRecord:
    path.write_bytes(record.encode())
    return ModelRecord.of_run(path)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "ernie4_5"])
def test_it_is_found_as_it_was(family: str, tmp_path: Path) -> None:
    record = ModelRecord.read(GOLDEN / family)
    assert kept(record, tmp_path / "record") == record
    assert record.config == ModelConfig.read(GOLDEN / family)
    assert record.files["tokenizer.json"] == (GOLDEN / family / "tokenizer.json").read_bytes()
    assert "model.safetensors" not in record.files


def test_options_of_every_type(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": 2.5, "rope_theta": 1e6, "original_max_position_embeddings": 128}
    odd = {"quantization_config": QUANTIZATION, "rope_parameters": rope, "rms_norm_eps": 1 / 3, "eos_token_id": [1, 2]}
    (model / "config.json").write_text(json.dumps(config | odd))
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("{{ 1 }}")
    record = ModelRecord.read(model)
    found = kept(record, tmp_path / "record")
    assert repr(found) == repr(record)
    assert found.files["additional_chat_templates/tools.jinja"] == b"{{ 1 }}"


def test_a_file_that_cannot_be_read_is_named(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    os.mkfifo(model / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read: .* not a regular file"):
        ModelRecord.read(model)


@pytest.mark.parametrize("content", [None, b"", b"\x83"])
def test_a_run_without_it(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "record").write_bytes(content)
    with pytest.raises(TokamakError, match=r"cannot read .*; restart the engine"):
        ModelRecord.of_run(tmp_path / "record")
