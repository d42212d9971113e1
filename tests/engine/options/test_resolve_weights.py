"""Options about weights: resolved and refused values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.checkpoint.locate import resolve_model
from engine.config import EngineConfig
from engine.errors import OptionError
from engine.options.read import read_options
from engine.options.resolve import resolve
from engine.options.resolve_weights import processor_flags
from tests.ggufs import as_type, original_metadata, write_gguf
from tools.demo import MODEL as DEMO
from tools.demo import MODELS


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokamak"


def configure(*arguments: str) -> EngineConfig:
    return resolve(read_options(list(arguments), {}, MODELS))[0]


def test_dtype() -> None:
    for flags, dtype in ((frozenset({"avx512f"}), "float32"), (frozenset({"avx512f", "avx512_bf16"}), "bfloat16")):
        assert resolve(read_options([], {}, MODELS), flags)[0].dtype == dtype
    assert configure().dtype == ("bfloat16" if "avx512_bf16" in processor_flags() else "float32")
    assert configure("--dtype", "bfloat16").dtype == "bfloat16"
    assert configure("--dtype", "float32").dtype == "float32"
    assert configure("--ops", "reference").dtype == "float32"
    with pytest.raises(
        OptionError,
        match=r"--dtype bfloat16 needs native ops \(--ops cuda on GPUs\), but the ops are reference; use --dtype float32",
    ):
        configure("--ops", "reference", "--dtype", "bfloat16")


def test_dtype_of_pinned_kernels() -> None:
    """The dtype depends only on the kernels: engines on several machines that pin the same agree."""
    for flags in (frozenset({"avx2"}), frozenset({"avx2", "avx512_bf16"})):
        for kernels, dtype in (("avx2", "float32"), ("avx512", "float32"), ("avx512bf16", "bfloat16"), ("amx", "bfloat16")):
            config = resolve(read_options(["--cpu-kernels", kernels], {}, MODELS), flags)[0]
            assert (config.dtype, config.kv_cache_dtype) == (dtype, dtype)


def test_group_size() -> None:
    assert configure("--quantization", "wint8").quantization_group_size == 0
    assert configure("--quantization", "wint8", "--quantization-group-size", "64").quantization_group_size == 64
    with pytest.raises(OptionError, match="--quantization-group-size 48: expected one of 32, 64, 128, or 0"):
        configure("--quantization", "wint8", "--quantization-group-size", "48")
    options = read_options(["--quantization-group-size", "32"], {}, MODELS)
    assert resolve(options)[0].quantization_group_size == 0
    assert "--quantization-group-size 32 has no effect: weights are not quantized (--quantization)" in options.notes


def test_calibration(tmp_path: Path) -> None:
    file = tmp_path / "statistics.safetensors"
    given = ("--quantization-calibration", str(file))
    with pytest.raises(OptionError, match=r"statistics\.safetensors cannot be read: No such file or directory"):
        configure("--quantization", "wint4", *given)
    digests = []
    for text in ("one", "two"):
        file.write_text(text)
        config = configure("--quantization", "wint4", *given)
        assert config.quantization_calibration == str(file)
        digests.append(config.calibration_digest)
    assert digests[0] != digests[1]
    options = read_options(given, {}, MODELS)
    assert resolve(options)[0].quantization_calibration == ""
    assert f"--quantization-calibration {file} has no effect: weights are not quantized (--quantization)" in options.notes


def test_kernels(tmp_path: Path, user_cache: Path) -> None:
    """The given function chooses them, from the type of keys and values and the directory of stored choices."""
    asked = []

    def choose(kernels: str, kv_cache_dtype: str, directory: Path) -> dict[str, str]:
        asked.append((kernels, kv_cache_dtype, directory))
        return {"base": "one", "int8": "other", "attention": "other"}

    def configured(*arguments: str) -> EngineConfig:
        return resolve(read_options(list(arguments), {}, MODELS), frozenset(), choose)[0]

    assert configured().kernels_text == "one; other: int8, attention"
    configured("--cpu-kernels", "avx2", "--kv-cache-dtype", "int8", "--weight-cache-dir", str(tmp_path), "--no-weight-cache")
    configured("--quantization", "wint8", "--load-format", "dummy")
    weights = user_cache / "weights"
    assert asked == [("auto", "float32", weights), ("avx2", "int8", tmp_path), ("auto", "bfloat16", weights)]
    assert configured("--ops", "reference").cpu_kernels == {}
    assert len(asked) == 3
    with pytest.raises(OptionError, match="--cpu-kernels avx2 needs native ops, but the ops are reference; remove it"):
        configured("--ops", "reference", "--cpu-kernels", "avx2")
    assert (configure().kernels_text, configure("--cpu-kernels", "avx2").kernels_text) == ("", "avx2")


def test_quantization() -> None:
    assert configure().quantization == "none"
    assert configure("--quantization", "wint4").quantization == "wint4"
    with pytest.raises(OptionError, match=r"wint8 needs native ops \(--ops cuda on GPUs\), but the ops are reference; use"):
        configure("--ops", "reference", "--quantization", "wint8")
    with pytest.raises(OptionError, match="--quantization bitsandbytes: expected one of none, wint8, wint4"):
        configure("--quantization", "bitsandbytes")


def test_stored_integers_are_not_rounded_again(tmp_path: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match=r"already quantized \(awq\) and are used as they are; remove the option"):
        configure(str(tmp_path), "--quantization", "wint8")
    assert configure(str(tmp_path)).quantization == "none"


@pytest.mark.parametrize(("type_name", "is_refused"), [("F16", False), ("Q8_0", True)])
def test_gguf(type_name: str, is_refused: bool, tmp_path: Path) -> None:
    write_gguf(tmp_path / "demo.gguf", DEMO, as_type(type_name), **original_metadata(DEMO))
    path = resolve_model(str(tmp_path / "demo.gguf"))
    if not is_refused:
        assert configure(str(path), "--quantization", "wint4").quantization == "wint4"
        return
    with pytest.raises(OptionError, match=r"already quantized \(Q8_0\)"):
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ""),
        (["--no-weight-cache"], "stores only kernel timings"),
        (["--load-format", "dummy"], "stores only kernel timings"),
        (["--no-weight-cache", "--cpu-kernels", "avx2"], "stores nothing"),
        (["--ops", "reference"], "stores nothing"),
    ],
)
def test_limited_use_of_a_cache_directory_is_noted(tmp_path: Path, arguments: list[str], expected: str) -> None:
    options = read_options(["--weight-cache-dir", str(tmp_path), *arguments], {}, MODELS)
    assert (resolve(options)[0].weight_cache_dir == "") == (expected != "")
    assert [note.partition(":")[0] for note in options.notes] == ([f"--weight-cache-dir {expected}"] if expected else [])
