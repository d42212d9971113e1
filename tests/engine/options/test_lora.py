"""Options of LoRA adapters in vLLM's spelling, and contradictions with the model or each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig, LoraModule
from engine.errors import OptionError
from engine.options.read import read_options
from engine.options.resolve import resolve
from tests.paths import GOLDEN
from tests.pooled import write_checkpoint

QWEN3 = str(GOLDEN / "qwen3")


def config_of(*arguments: str, model: str = QWEN3) -> EngineConfig:
    return resolve(read_options(["--model", model, "--served-model-name", "base", *arguments], {}))[0]


def test_lora_is_off_by_default() -> None:
    config = config_of()
    assert (config.max_loras, config.max_lora_rank, config.adapter_bytes, config.lora_modules) == (0, 0, 0, ())


@pytest.mark.parametrize(
    "given",
    [
        ["a=/x", "b=/y=z"],
        ["a=/x,b=/y=z"],
        ['{"name": "a", "path": "/x"}', '{"name": "b", "path": "/y=z", "base_model_name": "base"}'],
        ['[{"name": "a", "path": "/x"}, {"name": "b", "path": "/y=z"}]'],
    ],
)
def test_spellings(given: list[str]) -> None:
    config = config_of("--enable-lora", "--lora-modules", *given)
    assert config.lora_modules == (LoraModule("a", "/x"), LoraModule("b", "/y=z"))
    assert (config.max_loras, config.max_lora_rank) == (4, 16)


def test_sizes() -> None:
    """The number of slots is that of adapters; memory depends on slots and ranks. A path becomes absolute."""
    modules = [f"a{number}=somewhere" for number in range(6)]
    config = config_of("--enable_lora", "--lora_modules", *modules, "--max_lora_rank", "8")
    assert config.max_loras == 6
    assert config.lora_modules[0].path == str(Path("somewhere").absolute())
    wider, more = config_of("--enable-lora", "--max-lora-rank", "32"), config_of("--enable-lora", "--max-loras", "8")
    base = config_of("--enable-lora", "--max-cpu-loras", "9", "--lora-dtype", "auto")
    assert base.max_loras == 4
    assert 1.9 < wider.adapter_bytes / base.adapter_bytes < 2.1
    assert 1.9 < more.adapter_bytes / base.adapter_bytes < 2.1


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ("--lora-modules a=/x", "--lora-modules needs --enable-lora"),
        ("--enable-lora --lora-modules a", "expected NAME=PATH"),
        ("--enable-lora --lora-modules =x", "expected NAME=PATH"),
        ("--enable-lora --lora-modules a=", "expected NAME=PATH"),
        ('--enable-lora --lora-modules {"name":"a"}', "missing required field `path`"),
        ('--enable-lora --lora-modules {"name":"a","path":"/x","y":1}', "unknown field `y`"),
        ("--enable-lora --lora-modules a\tb=/x", "expected a name of 1 to 256 characters"),
        ("--enable-lora --lora-modules base=/x", "the name 'base' is given twice"),
        ("--enable-lora --lora-modules a=/x a=/y", "the name 'a' is given twice"),
        ("--enable-lora --max-loras 1 --lora-modules a=/x b=/y", "less than the 2 adapters in --lora-modules"),
        ("--enable-lora --max-loras 65", "expected 1 to 64"),
        ("--enable-lora --max-lora-rank 0", "expected 1 to 512"),
        ("--enable-lora --enable-lora-bias", "biases in adapters are not supported"),
    ],
)
def test_invalid_options_are_refused(arguments: str, cause: str) -> None:
    with pytest.raises(OptionError) as caught:
        config_of(*arguments.split(" "))
    assert cause in str(caught.value)


def test_models_without_adapters(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="bert models do not support adapters, they are encoders"):
        config_of("--enable-lora", model=str(write_checkpoint("bert classifier", tmp_path / "model")))
