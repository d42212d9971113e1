"""Choice of the format of each matrix, from the options and the stored formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from ops.weight_format import BFLOAT16, FLOAT32, WeightFormat
from tests.workers.checkpoints import TINY, write_config
from workers.models import declare_model
from workers.weights.declaration import Weights
from workers.weights.formats.tensor import Kept
from workers.weights.precision import Precision, choose_formats

INT8 = WeightFormat("int8")
WIDE = {**TINY, "hidden_size": 64, "intermediate_size": 96}


def declared(tmp_path: Path, **changes: object) -> Weights:
    return declare_model(write_config(tmp_path, {**WIDE, **changes}))[1]


def chosen(
    weights: Weights, precision: Precision, stored: dict[str, Kept] | None = None
) -> tuple[dict[str, WeightFormat], str]:
    """Return formats by the last part of a layer's first linear, and the log line."""

    def kept(name: str) -> Kept:
        return next((found for part, found in (stored or {}).items() if part in name), None)

    line = choose_formats(weights, precision, kept)
    formats = {linear.names[0].split(".")[-1]: linear.format for linear in weights.linears}
    return formats | {"embedding": weights.embeddings[0].format}, line


@pytest.mark.parametrize(("dtype", "expected"), [("float32", FLOAT32), ("bfloat16", BFLOAT16)])
def test_dtype_decides_the_formats(dtype: str, expected: WeightFormat, tmp_path: Path) -> None:
    formats, line = chosen(declared(tmp_path), Precision(dtype))
    assert (set(formats.values()), line) == ({expected}, "")


def test_wint8_rounds_linears(tmp_path: Path) -> None:
    formats, _ = chosen(declared(tmp_path), Precision("bfloat16", "wint8"))
    assert formats.pop("embedding") == BFLOAT16
    assert set(formats.values()) == {INT8}


def test_wint4_rounds_linears(tmp_path: Path) -> None:
    formats, _ = chosen(declared(tmp_path), Precision("float32", "wint4"))
    assert formats == {
        "q_proj": WeightFormat("int4", 64, is_folded=True),
        "o_proj": WeightFormat("int4", 64, is_folded=True),
        "gate_proj": WeightFormat("int4", 64, is_folded=True),
        "down_proj": WeightFormat("int4", 32, is_folded=True),  # 96 inputs
        "lm_head": INT8,
        "embedding": FLOAT32,
    }
    formats, _ = chosen(declared(tmp_path, intermediate_size=40), Precision("float32", "wint4"))
    assert formats["down_proj"] == INT8


def test_wint4_keeps_the_ends_of_deep_models_at_8_bits(tmp_path: Path) -> None:
    for num_layers, expected in ((15, set()), (16, {0, 15}), (17, {0, 16})):
        weights = declared(tmp_path, num_hidden_layers=num_layers)
        choose_formats(weights, Precision("float32", "wint4"), lambda name: None)
        found = {linear.name: linear.format for linear in weights.linears}
        downs = [found[f"model.layers.{layer}.mlp.down_proj"] for layer in range(num_layers)]
        assert {layer for layer, format in enumerate(downs) if format == INT8} == expected


def test_group_sizes_are_followed_where_they_fit(tmp_path: Path) -> None:
    for quantization, others, down in (
        ("wint4", WeightFormat("int4", 32, is_folded=True), WeightFormat("int4", 32, is_folded=True)),
        ("wint8", WeightFormat("int8", 32, scales="bfloat16"), WeightFormat("int8", 32, scales="bfloat16")),
    ):
        formats, _ = chosen(declared(tmp_path), Precision("float32", quantization, group_size=32))
        assert (formats["q_proj"], formats["down_proj"]) == (others, down)
        assert formats["lm_head"] == WeightFormat("int8", 32, scales="bfloat16")
    formats, _ = chosen(declared(tmp_path), Precision("float32", "wint8", group_size=64))
    assert (formats["q_proj"], formats["down_proj"]) == (WeightFormat("int8", 64, scales="bfloat16"), INT8)  # 96 inputs


def test_tied_embedding_follows_the_head(tmp_path: Path) -> None:
    for quantization in ("wint8", "wint4"):
        formats, _ = chosen(declared(tmp_path, tie_word_embeddings=True), Precision("bfloat16", quantization))
        assert formats["embed_tokens"] == formats["embedding"] == INT8


def test_stored_integers_are_kept(tmp_path: Path) -> None:
    four = WeightFormat("int4", 32, True)
    formats, line = chosen(declared(tmp_path), Precision("bfloat16"), {"layers": four})
    assert formats["q_proj"] == formats["down_proj"] == four
    assert formats["lm_head"] == formats["embedding"] == BFLOAT16
    assert line == "8 as stored (int4, groups of 32, offsets)"


def test_parts_share_the_most_precise_format(tmp_path: Path) -> None:
    """llama.cpp's Q4_K_M has values and down projections in 6 bits."""
    stored: dict[str, Kept] = {"v_proj": WeightFormat("int8", 16), "layers": WeightFormat("int4", 32, True)}
    formats, line = chosen(declared(tmp_path), Precision(), stored)
    assert formats["q_proj"] == WeightFormat("int8", 16, True)
    assert "2 as int8, groups of 16, offsets (int4, groups of 32, offsets beside int8, groups of 16)" in line


def test_unsupported_formats_become_floats(tmp_path: Path) -> None:
    stored: dict[str, Kept] = {"up_proj": "8-bit floats", "q_proj": INT8, "down_proj": "8-bit floats"}
    formats, line = chosen(declared(tmp_path), Precision("bfloat16"), stored)
    assert formats["q_proj"] == formats["gate_proj"] == formats["down_proj"] == BFLOAT16
    assert "2 as bfloat16 (8-bit floats)" in line
    assert "2 as bfloat16 (parts stored as floats)" in line
    assert "2 as bfloat16 (parts stored as floats, 8-bit floats)" in line


def test_stored_integers_are_not_rounded_again(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"q_proj.* is already quantized; remove --quantization wint4"):
        chosen(declared(tmp_path), Precision("float32", "wint4"), {"q_proj": INT8})
    assert ModelConfig.read(tmp_path).quantization is None
