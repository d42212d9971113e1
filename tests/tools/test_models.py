"""`tokamak models`: the list, and the files that `rm` leaves."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from engine.checkpoint.gguf.file import LINK_NAME
from engine.checkpoint.model_config import ModelConfig
from ops.cpu.executors import Immediate
from ops.cpu.table import make_table
from tools.demo import MODEL
from tools.models import main
from workers.models.loading import load_model
from workers.weights.cache import WeightCache
from workers.weights.loader import LoadOptions

TABLE = make_table(Immediate())
LONG_AGO_S = 1_000_000_000


def pack(checkpoint: Path, directory: Path, seed: int | None = None) -> str:
    """Store the packed weights of `checkpoint` and return the id of the file."""
    before = set(directory.glob("*"))
    config = ModelConfig.read(checkpoint)
    cache = WeightCache(directory, limit=1 << 30, is_shared=seed is not None)
    load_model(checkpoint, config, TABLE, 16, lambda done, total: None, LoadOptions(cache=cache, random_seed=seed))
    (path,) = (path for path in set(directory.glob("*.weights")) - before)
    os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    return path.stem.rpartition("-")[2]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a cache of the hub with one repository; return its snapshot."""
    from huggingface_hub import constants

    snapshot = tmp_path / "hub" / "models--owner--tiny" / "snapshots" / ("0" * 40)
    repository = snapshot.parent.parent
    for directory in (snapshot, repository / "blobs", repository / "refs"):
        directory.mkdir(parents=True)
    for file in MODEL.iterdir():
        shutil.copy(file, repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(repository / "blobs" / file.name)
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "modelscope"))
    directory = tmp_path / "weights"
    directory.mkdir()
    return directory


def models(weights: Path, *arguments: str) -> int:
    return main(["--weight-cache-dir", str(weights), *arguments])


def listed(weights: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines about models, without runs of spaces."""
    capsys.readouterr()
    assert models(weights) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[1:-1]]


def test_models_are_listed_by_name(hub: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantized = tmp_path / "mine-1234"  # as of a GGUF file
    shutil.copytree(MODEL, quantized)
    (tmp_path / "mine.gguf").touch()
    ids = [pack(each, weights) for each in (MODEL, hub)]
    ids.append(pack(quantized, weights, seed=3))
    (quantized / LINK_NAME).symlink_to(tmp_path / "mine.gguf")
    text, vision, *others = listed(weights, capsys)
    assert text.startswith("tokamak-demo ")
    assert text.endswith("tokamak serve")
    assert vision.endswith("tokamak serve --demo vision")
    for line, (name, id, about) in zip(
        others,
        [
            ("mine", ids[2], f"packed: qwen3, float32, random values, of {tmp_path}/mine.gguf"),
            ("owner/tiny", "", f"downloaded: qwen3, {json.loads((MODEL / 'config.json').read_text())['dtype']}"),
            ("owner/tiny", ids[1], f"packed: qwen3, float32, of {hub}"),
            ("tokamak-demo", ids[0], f"packed: qwen3, float32, of {MODEL}"),
        ],
        strict=True,
    ):
        assert line.startswith(f"{name} {id}".rstrip())
        assert line.endswith(about)


def test_listing_is_no_use(weights: Path, hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack(MODEL, weights)
    for _ in range(2):
        assert any("d" in line.split(" ago")[0].split()[-1] for line in listed(weights, capsys) if "packed" in line)
    (path,) = weights.glob("*.weights")
    assert path.stat().st_atime == LONG_AGO_S


def test_name_removes_all_and_id_one_of_them(hub: Path, weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack(hub, weights, seed=3)
    id = pack(MODEL, weights)
    assert models(weights, "rm", id) == 0
    assert [line.split()[0] for line in listed(weights, capsys)[2:]] == ["owner/tiny", "owner/tiny"]
    assert models(weights, "rm", "owner/tiny") == 0
    assert len(listed(weights, capsys)) == 2
    assert not hub.exists()


def test_models_of_modelscope_are_listed_and_removed(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = tmp_path / "modelscope" / "models" / "owner--tiny" / "snapshots" / "master"
    shutil.copytree(MODEL, snapshot)
    pack(snapshot, weights)
    (downloaded,) = (line for line in listed(weights, capsys) if "ModelScope" in line)
    assert downloaded.startswith("owner/tiny ")
    assert "downloaded from ModelScope: qwen3, " in downloaded
    assert sum(line.startswith("owner/tiny ") for line in listed(weights, capsys)) == 2, "its packed weights have its name"
    assert models(weights, "rm", "owner/tiny") == 0
    assert not snapshot.exists()
    assert len(listed(weights, capsys)) == 2


def test_weights_in_use_are_not_removed(weights: Path, hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack(MODEL, weights)
    (path,) = weights.glob("*.weights")
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert models(weights, "rm", "tokamak-demo") == 1
        assert "in use" in capsys.readouterr().err
    assert path.exists()


def test_unknown_names_remove_nothing(weights: Path, hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models(weights, "rm", "owner/tiny", "third") == 1
    assert "no model is named 'third'" in capsys.readouterr().err
    assert hub.exists()
    assert models(weights, "rm", "tokamak-demo") == 1
    assert "part of Tokamak" in capsys.readouterr().err


def test_damaged_files_are_listed_and_removed(weights: Path, hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (weights / "old-1a.weights").write_bytes(bytes(3 << 20))
    assert "cannot be used" in listed(weights, capsys)[2]
    assert models(weights, "rm", "old") == 0
    assert list(weights.iterdir()) == []


def test_cache_that_is_no_directory_is_an_error(
    hub: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(MODEL / "config.json"))
    assert models(weights) == 1
    assert "config.json cannot be read: " in capsys.readouterr().err
