"""CUDA's ops are checked on a card before they serve: on the emulated card they are correct, and wrong ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.checkpoint.model_config import ModelConfig
from engine.errors import OptionError
from ops.cuda.library import RowError
from ops.table import DeviceSampler, OpTable
from tests.devices.driver import emulated_driver
from tests.ops.cuda.card import emulated_library
from tests.paths import GOLDEN
from tests.workers.checkpoints import write_checkpoint
from tests.workers.deepseek import CONFIG as DEEPSEEK
from workers.devices.cuda.device import CudaDevice
from workers.selftest.op_choice import check_rows
from workers.selftest.row_check import small_model
from workers.weights.precision import Precision


@pytest.fixture(autouse=True)
def nothing_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a cache of its own, where no other test has left that its ops are right."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def device(dtype: str = "float32") -> CudaDevice:
    return CudaDevice(emulated_driver(), 0, dtype, emulated_library().parent)


def check(card: CudaDevice, name: str, precision: Precision, kv_dtype: str) -> None:
    check_rows(card, ModelConfig.read(GOLDEN / name), precision, kv_dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quantization", "kv_dtype"),
    [
        ("qwen3_moe", "none", "float32"),
        ("deepseek_v3", "wint8", "int8"),
        ("ernie4_5_vl_moe", "wint4", "bfloat16"),
        ("qwen2_5_vl", "none", "bfloat16"),
    ],
)
def test_correct_rows_are_used(name: str, quantization: str, kv_dtype: str) -> None:
    check(device(), name, Precision("float32", quantization), kv_dtype)


def off(table: OpTable, by: float) -> OpTable:
    return replace(table, linear=lambda x, module: table.scale_and_add(table.linear(x, module), 1 + by, None))


def variant(table: OpTable, by: float) -> OpTable:
    return replace(table, linear=lambda x, module: table.scale_and_add(table.linear(x, module), 1 + by * x.shape[0], None))


def failing(table: OpTable, by: float) -> OpTable:
    def attention(*arguments: Any) -> Any:
        raise RowError("Attention: an illegal memory access was encountered")

    return replace(table, attention=attention)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "by", "says"),
    [
        (off, 0.01, r"100 of 100 rows of a prompt are off by up to [\d.e-]+, limit [\d.e-]+"),
        (off, float("nan"), r"100 of 100 rows of a prompt are off by up to nan, limit"),
        (variant, 1e-6, r"\d+ of 100 rows of a prompt have different bits in chunks of a batch"),
        (failing, 0.0, "CUDA ops fail: Attention: an illegal memory access was encountered"),
    ],
)
def test_wrong_rows_are_refused(change: Callable[[OpTable, float], OpTable], by: float, says: str) -> None:
    card = device()
    card.ops = change(card.ops, by)
    with pytest.raises(OptionError, match=rf"^--ops cuda: on gpu:0 {says}.*; use --ops fused, with Paddle$"):
        check(card, "llama", Precision(), "float32")


def test_wrong_sampling_is_refused() -> None:
    """Unless the model's shapes were checked before."""
    card = device()
    drawing = card.ops.drawing
    assert drawing is not None
    card.ops = replace(card.ops, drawing=DeviceSampler(lambda inputs, logits: drawing.run(inputs, logits)[1:], is_greedy=False))
    with pytest.raises(OptionError, match=r"^--ops cuda: on gpu:0 24 of 24 tokens differ from the sampler's; use --ops fused"):
        check(card, "llama", Precision(), "float32")
    check(device(), "llama", Precision(), "float32")
    check(card, "llama", Precision(), "float32")


def test_small_model_has_every_kind_of_layer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**DEEPSEEK, "num_hidden_layers": 4, "first_k_dense_replace": 2, "n_routed_experts": 66})
    whole = ModelConfig.read(tmp_path)
    found = small_model(whole)
    assert (whole.num_layers, found.num_layers) == (4, 2)
    assert found.experts is not None
    assert whole.experts is not None
    assert found.experts.sparse_layers == (1,)
    assert found.experts.num_chosen <= found.experts.num_experts < whole.experts.num_experts == 66
    assert found.experts.num_experts % found.experts.num_groups == 0
    assert found.experts.correction_shape in ((), (found.experts.num_experts,))
    assert (found.hidden_size, found.latents, found.head_dim) == (whole.hidden_size, whole.latents, whole.head_dim)
