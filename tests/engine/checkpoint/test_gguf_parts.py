"""GGUF models in several files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.checkpoint.gguf.parts import GgufModel, stem_of
from engine.checkpoint.locate import resolve_model
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.stored_weights import StoredWeights
from engine.errors import CheckpointError
from tests.ggufs import add_value, as_type, original_metadata, write, write_gguf
from tools.demo import MODEL as DEMO


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("parts")
    write_gguf(folder / "demo-F16.gguf", DEMO, as_type("F16"), tensors_per_part=12, **original_metadata(DEMO))
    return sorted(folder.glob("*.gguf"))


def part(path: Path, number: int, count: int, tensors: int, name: str = "extra.weight", **metadata: Any) -> Path:
    """Write a part with one tensor."""
    writer = gguf.GGUFWriter(path, "qwen3")
    for key, value in ({"split__no": number, "split__count": count, "split__tensors__count": tensors} | metadata).items():
        writer.kv_data[0].pop(key.replace("__", "."), None)
        add_value(writer, key, value)
    writer.add_tensor(name, np.zeros((2, 2), np.float32))
    write(writer)
    return path


def test_any_part_stands_for_the_model(parts: list[Path], tmp_path: Path) -> None:
    """The same directory from the first and the last part; all tensors and all bytes are counted."""
    write_gguf(tmp_path / "whole.gguf", DEMO, as_type("F16"), **original_metadata(DEMO))
    assert len(parts) > 2
    found, whole = resolve_model(str(parts[-1])), resolve_model(str(tmp_path / "whole.gguf"))
    assert found == resolve_model(str(parts[0]))
    assert found.name.startswith("demo-F16-")
    assert ModelConfig.read(found) == ModelConfig.read(whole)
    assert StoredWeights.read(found) == StoredWeights.read(whole)
    models = [GgufModel.of_checkpoint(path) for path in (found, whole)]
    names = [sorted(model.tensors) for model in models if model]
    assert len(names) == 2
    assert names[0] == names[1]


def test_replaced_part_gives_another_directory(parts: list[Path], tmp_path: Path) -> None:
    own = [Path(shutil.copy(path, tmp_path / path.name)) for path in parts]
    first = resolve_model(str(own[0]))
    own[1].write_bytes(own[1].read_bytes())
    assert resolve_model(str(own[0])) != first


def test_missing_parts_are_named(parts: list[Path], tmp_path: Path) -> None:
    shutil.copy(parts[0], tmp_path / parts[0].name)
    with pytest.raises(CheckpointError, match=rf"lacks demo-F16-00002-of-.*; the model has {len(parts)} parts"):
        resolve_model(str(tmp_path / parts[0].name))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"number": 0}, "split.no: 1 is the part's number, but its name says 2"),
        ({"count": 3}, "split.count: 3 differs from the number of parts in the file's name, 2"),
        ({"tensors": 5}, "split.tensors.count is 5, and 2 in a-00001-of-00002.gguf"),
        ({"general__architecture": "llama"}, "general.architecture is 'llama', and 'qwen3' in"),
        ({"name": "token_embd.weight"}, "token_embd.weight is also in another part"),
    ],
)
def test_parts_of_different_models_are_refused(second: dict[str, Any], message: str, tmp_path: Path) -> None:
    part(tmp_path / "a-00001-of-00002.gguf", 0, 2, 2, "token_embd.weight")
    part(tmp_path / "a-00002-of-00002.gguf", **{"number": 1, "count": 2, "tensors": 2, **second})
    with pytest.raises(CheckpointError, match=message):
        resolve_model(str(tmp_path / "a-00002-of-00002.gguf"))


def test_fewer_tensors_than_stated_are_refused(tmp_path: Path) -> None:
    for number in range(2):
        part(tmp_path / f"a-0000{number + 1}-of-00002.gguf", number, 2, 3, f"blk.{number}.weight")
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count is 3, the parts have 2"):
        resolve_model(str(tmp_path / "a-00001-of-00002.gguf"))


@pytest.mark.parametrize(
    ("name", "place"), [("a-00001-of-00000", "1 of 0"), ("a-00003-of-00002", "3 of 2"), ("a-00000-of-00001", "0 of 1")]
)
def test_part_with_an_impossible_number_is_refused(name: str, place: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{name}.gguf: part {place} does not exist"):
        resolve_model(str(part(tmp_path / f"{name}.gguf", 0, 1, 1)))


def test_few_of_many_missing_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"lacks a-00002-of-09999\.gguf, .*a-00006-of-09999\.gguf, \.\.\.; the model has 9999"
    ):
        resolve_model(str(part(tmp_path / "a-00001-of-09999.gguf", 0, 9999, 1)))


@pytest.mark.parametrize("name", ["m-Q4_K_M.gguf", "m-Q4_K_M-00002-of-00003.gguf", "m-Q4_K_M-00002-of-00003.GGUF", "m-Q4_K_M"])
def test_stem_has_no_part_number(name: str) -> None:
    assert stem_of(name) == "m-Q4_K_M"
