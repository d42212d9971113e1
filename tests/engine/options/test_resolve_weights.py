"""Options about weights: what each comes to, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.checkpoint.locate import resolve_model
from engine.config import EngineConfig
from engine.errors import OptionError
from engine.options.resolve import resolve
from engine.options.resolve_weights import processor_flags
from engine.options.table import read_options
from tests.ggufs import as_type, original_metadata, write_gguf
from tools.demo import MODEL as DEMO


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokamak"


def configure(*arguments: str) -> EngineConfig:
    return resolve(read_options(list(arguments), {}, str(DEMO)))


def test_dtype() -> None:
    for flags, dtype in ((frozenset({"avx512f"}), "float32"), (frozenset({"avx512f", "avx512_bf16"}), "bfloat16")):
        assert resolve(read_options([], {}, str(DEMO)), flags).dtype == dtype
    assert configure().dtype == ("bfloat16" if "avx512_bf16" in processor_flags() else "float32")
    assert configure("--dtype", "bfloat16").dtype == "bfloat16"
    assert configure("--dtype", "float32").dtype == "float32"
    assert configure("--ops", "reference").dtype == "float32"
    with pytest.raises(OptionError, match="--dtype bfloat16 needs native ops, the ops are reference; use --dtype float32"):
        configure("--ops", "reference", "--dtype", "bfloat16")


def test_quantization() -> None:
    assert configure().quantization == "none"
    assert configure("--quantization", "wint4").quantization == "wint4"
    with pytest.raises(OptionError, match="--quantization wint8 needs native ops"):
        configure("--ops", "reference", "--quantization", "wint8")
    with pytest.raises(OptionError, match="--quantization awq: expected one of none, wint8, wint4"):
        configure("--quantization", "awq")


def test_stored_integers_are_not_rounded_again(tmp_path: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match=r"quantized already \(awq\) and are kept as they are; leave the option out"):
        configure(str(tmp_path), "--quantization", "wint8")
    assert configure(str(tmp_path)).quantization == "none"


@pytest.mark.parametrize(("type_name", "is_refused"), [("F16", False), ("Q8_0", True)])
def test_gguf(type_name: str, is_refused: bool, tmp_path: Path) -> None:
    write_gguf(tmp_path / "demo.gguf", DEMO, as_type(type_name), **original_metadata(DEMO))
    path = resolve_model(str(tmp_path / "demo.gguf"))
    if not is_refused:
        assert configure(str(path), "--quantization", "wint4").quantization == "wint4"
        return
    with pytest.raises(OptionError, match=r"quantized already \(Q8_0\)"):
        configure(str(path), "--quantization", "wint4")


def test_weight_cache(user_cache: Path, tmp_path: Path) -> None:
    config = configure()
    assert (config.weight_cache_dir, config.weight_cache_limit) == (str(user_cache / "weights"), 20 << 30)
    assert not user_cache.exists()
    assert configure("--weight-cache-dir", str(tmp_path / "w")).weight_cache_dir == str(tmp_path / "w")
    assert configure("--weight-cache-limit", "3GiB").weight_cache_limit == 3 << 30
    assert configure("--no-weight-cache").weight_cache_dir == ""
    assert configure("--ops", "reference").weight_cache_dir == ""
    assert configure("--load-format", "dummy").weight_cache_dir == ""


def test_a_directory_without_effect_is_noted(tmp_path: Path) -> None:
    options = read_options(["--weight-cache-dir", str(tmp_path), "--no-weight-cache"], {}, str(DEMO))
    assert resolve(options).weight_cache_dir == ""
    assert any("--weight-cache-dir has no effect" in note for note in options.notes)
