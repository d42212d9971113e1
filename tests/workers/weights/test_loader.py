"""Checkpoints of every layout load to the same model, and invalid ones are refused with all of their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from ops.cpu.table import TABLE as NATIVE
from ops.paddle.reference import TABLE
from tests.workers.checkpoints import TINY, drawn_tensors, to_paddle_layout, write_checkpoint, write_config, write_safetensors
from workers.models import declare_model
from workers.models.loading import LoadedModel, load_model
from workers.weights.formats.floats import is_finite
from workers.weights.loader import LoadOptions
from workers.weights.precision import Precision
from workers.weights.reader import Checkpoint

SQUARE = {**TINY, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16, "tie_word_embeddings": True}
ERNIE = {
    **TINY,
    "architectures": ["Ernie4_5_ForCausalLM"],
    "model_type": "ernie4_5",
    "head_dim": 8,
    "tie_word_embeddings": True,
    "use_bias": True,
    "dtype": "bfloat16",
}
del ERNIE["transformers_version"]


def checkpoint_of(path: Path) -> Checkpoint:
    config = ModelConfig.read(path)
    _, weights = declare_model(config)
    return Checkpoint(path, config, weights)


def assert_holds(path: Path, expected: dict[str, np.ndarray]) -> None:
    """Check that every declared tensor is read as [out, in], bit for bit."""
    checkpoint = checkpoint_of(path)
    for name, values in expected.items():
        np.testing.assert_array_equal(checkpoint.read(name), values, err_msg=name)


@pytest.mark.parametrize("config", [TINY, SQUARE, ERNIE], ids=["tiny", "square", "ernie"])
def test_hugging_face_layout_is_read(config: dict[str, Any], tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, config)
    assert_holds(tmp_path, drawn_tensors(model))


def test_shards_are_read(tmp_path: Path) -> None:
    tensors = drawn_tensors(write_config(tmp_path, TINY))
    names = list(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        write_safetensors(tmp_path / file, {name: tensors[name] for name in part})
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_holds(tmp_path, tensors)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        checkpoint_of(tmp_path)
    for text, message in (
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("null", "cannot be read: Expected `object`, got `null`"),
        ('{"weight_map": {"a": [1]}}', "cannot be read: Expected `str`, got `array`"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "names '../b.safetensors', which is outside of the checkpoint"),
        ('{"weight_map": {"a": "/b.safetensors"}}', "names '/b.safetensors', which is outside of the checkpoint"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=rf"index\.json.* {message}"):
            checkpoint_of(tmp_path)


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    tensors = drawn_tensors(write_config(tmp_path, TINY))
    write_safetensors(tmp_path / "model.safetensors", tensors, dtype="F16")
    assert_holds(tmp_path, {name: tensor.astype(np.float16).astype(np.float32) for name, tensor in tensors.items()})


def load(path: Path) -> LoadedModel:
    return load_model(path, ModelConfig.read(path), TABLE, 16, lambda done, total: None)


def packed(path: Path, precision: Precision) -> list[bytes]:
    loaded = load_model(path, ModelConfig.read(path), NATIVE, 16, lambda done, total: None, LoadOptions(precision=precision))
    return arrays_of(loaded)


def arrays_of(loaded: LoadedModel) -> list[bytes]:
    """Return every array of the linears."""
    layers: Any = loaded.model.layers
    linears = [linear for layer in layers for linear in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)]
    weights = [linear.weight for linear in (*linears, loaded.model.embedding, loaded.model.head)]
    kept = [array for weight in weights for array in (weight.values, weight.scales, weight.multipliers) if array is not None]
    return [array.owner.tobytes() for array in kept]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(dtype: str, value: float, tmp_path: Path) -> None:
    tensors = drawn_tensors(write_config(tmp_path, TINY))
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][2:, 3] = value
    write_safetensors(tmp_path / "model.safetensors", tensors, dtype=dtype)
    with pytest.raises(CheckpointError, match=rf"22 of 384 values of {name} are NaN or infinite, the first at \[2, 3\]"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    "precision", [Precision(), Precision("bfloat16"), Precision("bfloat16", "wint8"), Precision("bfloat16", "wint4")], ids=str
)
def test_packing_by_rows_equals_the_whole(
    precision: Precision, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panel at a time, also across two tensors: the same as the whole matrix; NaN is reported with its place in the whole."""
    config = write_config(tmp_path, {**TINY, "hidden_size": 64, "intermediate_size": 72})
    tensors = drawn_tensors(config)
    write_safetensors(tmp_path / "model.safetensors", tensors, dtype=dtype)
    expected = packed(tmp_path, precision)
    read: list[int] = []
    monkeypatch.setattr("ops.cpu.cuts._BYTES", 1)
    read_rows = Checkpoint.read_rows

    def count_rows(checkpoint: Checkpoint, name: str, begin: int, end: int) -> np.ndarray:
        read.append(end - begin)
        return read_rows(checkpoint, name, begin, end)

    monkeypatch.setattr(Checkpoint, "read_rows", count_rows)
    assert packed(tmp_path, precision) == expected
    assert {8, 16} <= set(read)  # 72 outputs end in the middle of a panel
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][20:, 3] = np.inf
    write_safetensors(tmp_path / "model.safetensors", tensors, dtype=dtype)
    with pytest.raises(CheckpointError, match=rf"52 of 4608 values of {name} are NaN or infinite, the first at \[20, 3\]"):
        packed(tmp_path, precision)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_largest_finite_values_are_accepted(dtype: type) -> None:
    """Either sign, at any place; NaN of every kind is not finite."""
    infinity = {np.float32: 0x7F800000, np.float16: 0x7C00, np.uint16: 0x7F80}[dtype]
    bits = np.dtype(dtype).itemsize * 8
    values = np.zeros((3, 5), f"u{bits // 8}")
    for sign in (0, 1 << bits - 1):
        values[1, 2] = infinity - 1 + sign
        assert is_finite(values.view(dtype))
        assert is_finite(values.view(dtype).T)
        for beyond in (infinity, infinity + 1, (1 << bits - 1) - 1):
            values[1, 2] = beyond + sign
            assert not is_finite(values.view(dtype))
            assert not is_finite(values.view(dtype).T[1:])
    assert is_finite(values[:0].view(dtype))


class TestPaddleLayout:
    def test_shapes_decide_the_layout(self, tmp_path: Path) -> None:
        tensors = drawn_tensors(write_config(tmp_path, TINY))  # a config that transformers wrote
        write_safetensors(tmp_path / "model.safetensors", to_paddle_layout(tensors))
        assert_holds(tmp_path, tensors)

    @pytest.mark.parametrize("prefix", ["model.", "ernie."])
    def test_ernie_layout_is_read(self, prefix: str, tmp_path: Path) -> None:
        tensors = drawn_tensors(write_config(tmp_path, ERNIE))
        stored = {name.replace("model.", prefix, 1): tensor for name, tensor in to_paddle_layout(tensors).items()}
        write_safetensors(tmp_path / "model.safetensors", stored, metadata={"format": "pd"})
        assert_holds(tmp_path, tensors)

    @pytest.mark.parametrize("num_kv_heads", [1, 2])
    def test_fused_projections_are_split(self, num_kv_heads: int, tmp_path: Path) -> None:
        """q, k and v side by side; with as many kv heads as heads: per head."""
        tensors = drawn_tensors(write_config(tmp_path, {**ERNIE, "num_key_value_heads": num_kv_heads}))
        write_safetensors(tmp_path / "model.safetensors", fuse(to_paddle_layout(tensors), num_kv_heads))
        assert_holds(tmp_path, tensors)

    @pytest.mark.parametrize("is_paddle", [True, False])
    @pytest.mark.parametrize("evidence", ["header", "names", "config"])
    def test_square_weights_follow_the_header(self, evidence: str, is_paddle: bool, tmp_path: Path) -> None:
        """Ambiguous shapes are decided by the header's format, then Paddle's names, then the writer of the config."""
        config = dict(SQUARE)
        if is_paddle and evidence != "header":
            del config["transformers_version"]
        tensors = drawn_tensors(write_config(tmp_path, config))
        stored = to_paddle_layout(tensors) if is_paddle else tensors
        if is_paddle and evidence == "names":
            stored = {name.replace("model.", "ernie.", 1): tensor for name, tensor in stored.items()}
        metadata = {"format": "pd" if is_paddle else "pt"} if evidence == "header" else None
        write_safetensors(tmp_path / "model.safetensors", stored, metadata=metadata)
        assert_holds(tmp_path, tensors)


def fuse(tensors: dict[str, np.ndarray], num_kv_heads: int) -> dict[str, np.ndarray]:
    fused = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            q, k, v = (tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv")
            if num_kv_heads == 2:
                heads = [part.reshape(*part.shape[:-1], 2, 8) for part in (q, k, v)]
                joined = np.concatenate(heads, axis=-1).reshape(*q.shape[:-1], -1)
            else:
                joined = np.concatenate([q, k, v], axis=-1)
            fused[name.replace("q_proj", "qkv_proj")] = joined
        elif "gate_proj" in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            fused[name.replace("gate_proj", "up_gate_proj")] = np.concatenate([tensor, up], axis=-1)
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            fused[name] = tensor
    return fused


class TestTiedEmbeddings:
    @pytest.mark.parametrize("has_head", [True, False])
    def test_tied_head_in_the_file_is_ignored(self, has_head: bool, tmp_path: Path) -> None:
        config = write_config(tmp_path, {**TINY, "tie_word_embeddings": True})
        tensors = drawn_tensors(config)
        head = {"lm_head.weight": np.zeros((40, 16), np.float32)} if has_head else {}
        write_safetensors(tmp_path / "model.safetensors", {**tensors, **head})
        assert_holds(tmp_path, tensors)

    def test_untied_head_is_required(self, tmp_path: Path) -> None:
        tensors = drawn_tensors(write_config(tmp_path, TINY))
        del tensors["lm_head.weight"]
        write_safetensors(tmp_path / "model.safetensors", tensors)
        with pytest.raises(CheckpointError, match=r"lm_head\.weight \[40, 16\] is missing"):
            checkpoint_of(tmp_path)


class TestRefused:
    def test_every_wrong_tensor_is_named(self, tmp_path: Path) -> None:
        tensors = drawn_tensors(write_config(tmp_path, TINY))
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = np.ones(17, np.float32)
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(16, np.float32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)  # harmless
        write_safetensors(tmp_path / "model.safetensors", tensors)
        with pytest.raises(CheckpointError) as raised:
            checkpoint_of(tmp_path)
        text = str(raised.value)
        assert "model.layers.1.mlp.up_proj.weight [24, 16] is missing" in text
        assert "model.norm.weight has shape [17], expected [16]" in text
        assert "model.layers.0.self_attn.q_proj.bias [16] is unexpected" in text
        assert "inv_freq" not in text

    def test_long_lists_are_cut(self, tmp_path: Path) -> None:
        write_config(tmp_path, {**TINY, "num_hidden_layers": 9})
        write_safetensors(tmp_path / "model.safetensors", {"model.norm.weight": np.ones(16, np.float32)})
        with pytest.raises(CheckpointError, match=r"; and \d+ more$"):
            checkpoint_of(tmp_path)

    def test_missing_weights_are_named(self, tmp_path: Path) -> None:
        write_config(tmp_path, TINY)
        with pytest.raises(CheckpointError, match="no safetensors file"):
            checkpoint_of(tmp_path)

    def test_undeclared_quantization_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="'quark' is not supported"):
            write_config(tmp_path, {**TINY, "quantization_config": {"quant_method": "quark"}})


class TestRandomWeights:
    def load(self, path: Path, seed: int) -> np.ndarray:
        model = load_model(
            path, ModelConfig.read(path), TABLE, 16, lambda num_done, num_bytes: None, LoadOptions(random_seed=seed)
        ).model
        weight: np.ndarray = model.layers[1].mlp.down.weight.weights.numpy()
        assert (model.layers[0].input_norm.weight.numpy() == 1).all()
        return weight

    def test_random_weights_need_only_a_config(self, tmp_path: Path) -> None:
        write_config(tmp_path, TINY)
        first, again, other = self.load(tmp_path, 1), self.load(tmp_path, 1), self.load(tmp_path, 2)
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()
        assert np.abs(first).max() < 0.2


def test_progress_grows_to_its_total(tmp_path: Path) -> None:
    """Progress grows to its total, which is that of the weights."""
    write_checkpoint(tmp_path, {**TINY, "tie_word_embeddings": True})
    seen: list[tuple[int, int]] = []
    config = ModelConfig.read(tmp_path)
    loaded = load_model(tmp_path, config, TABLE, 16, lambda num_done, total: seen.append((num_done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == loaded.num_bytes


def test_too_wide_heads_are_refused(tmp_path: Path) -> None:
    model = write_config(tmp_path, {**TINY, "head_dim": 2 * NATIVE.max_head_dim})
    with pytest.raises(
        CheckpointError, match=rf"heads have {2 * NATIVE.max_head_dim} elements, the limit of the native ops is"
    ):
        load_model(tmp_path, model, NATIVE, 16, lambda done, total: None, LoadOptions(random_seed=1))
