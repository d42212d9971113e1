"""Adapters of experts: stacks hold the numbers that PEFT means, as its releases wrote them, and others are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.adapters.layout import AdapterLayout
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from shm.segment import MemoryFile
from tests.adapters import write_adapter
from tests.paths import GOLDEN
from tests.workers.checkpoints import write_config, write_safetensors
from tests.workers.test_golden import SINKS
from tests.workers.test_variants import VARIANTS
from workers.extensions.adapters.arena import AdapterArena
from workers.extensions.adapters.loading import require_memory
from workers.extensions.adapters.reader import AdaptedLinear, AdapterFiles
from workers.weights.safetensors import SafetensorsFile

LINEARS = ("gate_proj", "up_proj", "down_proj")
PARAMETERS = ("gate_up_proj", "down_proj")
RANK = 3
MODEL = GOLDEN / "qwen3_moe"
CONFIG = json.loads((MODEL / "config.json").read_text())
# config of a model, and whether A is [..., outputs] as stored by PEFT 0.18 and by 0.19
MODELS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "qwen3_moe": (CONFIG, True, False),
    "square": ({**CONFIG, "moe_intermediate_size": 32}, True, False),  # gate and up together
    "all square": ({**CONFIG, "moe_intermediate_size": 64}, True, False),  # but for gate and up, which tell
    "llama4_text": (VARIANTS["llama4_text chunks, scaled queries, two experts"]["config"], False, True),
    "gpt_oss": ({**SINKS, "intermediate_size": 64}, False, False),
}


def layout_of(directory: Path, config: dict[str, Any]) -> AdapterLayout:
    return AdapterLayout.of(write_config(directory, config), 1, 8)


def write_stacks(
    directory: Path, layout: AdapterLayout, *, is_swapped: bool, parameters: tuple[str, ...] = PARAMETERS, **config: Any
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Write an adapter of the experts; return A and B of each linear, without the scale of 2."""
    generator, shape = np.random.default_rng(0), layout.stack
    assert shape is not None
    tensors, expected = {}, {}
    layers = sorted({module.name.split(".")[2] for module in layout.modules if ".experts.0." in module.name})
    for layer in layers:
        prefix = f"model.layers.{layer}.mlp.experts"
        for depth, parameter in enumerate(reversed(parameters)):
            num_inputs, num_outputs = shape.sizes(parameter)
            a = generator.standard_normal((shape.num_experts, RANK, num_inputs), np.float32)
            b = generator.standard_normal((shape.num_experts, num_outputs, RANK), np.float32)
            first, second = (b.swapaxes(1, 2), a.swapaxes(1, 2)) if is_swapped else (a, b)
            key = f"base_model.model.{prefix}{'.base_layer' * depth}"
            tensors[f"{key}.lora_A.weight"] = first.reshape(shape.num_experts * RANK, -1)
            tensors[f"{key}.lora_B.weight"] = second.transpose(1, 2, 0).reshape(second.shape[1], -1)
            for expert in range(shape.num_experts):
                name, own = f"{prefix}.{expert}", b[expert]
                if parameter == "down_proj":
                    expected[f"{name}.down_proj"] = a[expert], own
                else:
                    gate, up = (own[0::2], own[1::2]) if shape.is_interleaved else np.split(own, 2)
                    expected[f"{name}.gate_proj"], expected[f"{name}.up_proj"] = (a[expert], gate), (a[expert], up)
    directory.mkdir(exist_ok=True)
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": []}
    values |= {"target_parameters": [f"experts.{name}" for name in parameters], **config}
    (directory / "adapter_config.json").write_text(json.dumps(values))
    write_safetensors(directory / "adapter_model.safetensors", tensors)
    return expected


def check(found: list[AdaptedLinear], expected: dict[str, tuple[np.ndarray, np.ndarray]], is_swapped: bool) -> None:
    assert [linear.module.name for linear in found] == sorted(expected, key=lambda name: [*_numbers(name), _place(name)])
    for linear in found:
        a, b = expected[linear.module.name]
        np.testing.assert_array_equal(linear.a, 2 * a if is_swapped else a)
        np.testing.assert_array_equal(linear.b, b if is_swapped else 2 * b)


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdecimal()]


def _place(name: str) -> int:
    return LINEARS.index(name.rpartition(".")[2])


@pytest.mark.parametrize("version", [None, "0.18.1", "0.19.0", "0.21.2.dev0"])
@pytest.mark.parametrize("name", MODELS)
def test_stacks_have_the_numbers_of_their_experts(name: str, version: str | None, tmp_path: Path) -> None:
    config, before, since = MODELS[name]
    layout = layout_of(tmp_path, config)
    is_swapped = before if version in (None, "0.18.1") else since
    more = {} if version is None else {"peft_version": version}
    expected = write_stacks(tmp_path / "adapter", layout, is_swapped=is_swapped, **more)
    files = AdapterFiles(tmp_path / "adapter", layout)
    check(list(files.linears()), expected, is_swapped)
    if "square" in name:
        expected = write_stacks(tmp_path / "alone", layout, is_swapped=is_swapped, parameters=("down_proj",), **more)
        check(list(AdapterFiles(tmp_path / "alone", layout).linears()), expected, is_swapped)


def refused(directory: Path, layout: AdapterLayout) -> str:
    with pytest.raises(CheckpointError) as caught:
        list(AdapterFiles(directory, layout).linears())
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        ({"target_parameters": ["experts.down_proj"]}, "name 1 parameters of model.layers.0.mlp.experts (down_proj), but"),
        ({"target_parameters": ["experts.gate_up_proj_bias", *PARAMETERS]}, "gate_up_proj_bias is a bias, which is not"),
        ({"target_parameters": [*PARAMETERS, "norm.weight"]}, "norm.weight is no linear or experts with tensors"),
        ({"target_parameters": []}, "name 0 parameters of model.layers.0.mlp.experts"),
        ({"r": 4}, "lora_A.weight has shape [24, 64], expected [32, 64]"),
        ({"rank_pattern": {"experts.gate_up_proj": 9}}, "has rank 9, the limit is 8; start with --max-lora-rank 9"),
    ],
)
def test_other_stacks_are_refused(config: dict[str, Any], cause: str, tmp_path: Path) -> None:
    layout = layout_of(tmp_path, CONFIG)
    write_stacks(tmp_path / "adapter", layout, is_swapped=False, **{"peft_version": "0.19.0", **config})
    text = refused(tmp_path / "adapter", layout)
    assert cause in text, text


def test_published_names_of_experts_are_read(tmp_path: Path) -> None:
    """Mixtral's and Llama 4's, and adapters that name experts without having any, as those of newer transformers."""
    layout = AdapterLayout.of(ModelConfig.read(MODEL), 1, 8)
    adapter = write_adapter(tmp_path / "1", MODEL, targets=LINEARS)
    expected = {each.module.name: each.b for each in AdapterFiles(adapter, layout).linears()}
    path, renamed = adapter / "adapter_model.safetensors", {}
    for name, tensor in SafetensorsFile(path).tensors.items():
        for own, published in zip((*LINEARS, "mlp"), ("w1", "w3", "w2", "block_sparse_moe"), strict=True):
            name = name.replace(f".{own}.", f".{published}.")
        renamed[name] = np.array(tensor.read())
    write_adapter(tmp_path / "1", MODEL, targets=(), target_modules=["w1", "w2", "w3"])
    write_safetensors(path, renamed)
    found = {each.module.name: each.b for each in AdapterFiles(adapter, layout).linears()}
    assert found.keys() == expected.keys()
    assert all((found[name] == expected[name]).all() for name in found)
    of_attention = write_adapter(tmp_path / "3", MODEL, targets=("q_proj",), target_modules="all-linear")
    assert "k_proj is adapted according to" in refused(of_attention, layout)
    write_adapter(tmp_path / "3", MODEL, targets=("q_proj",), target_modules=["q_proj", *LINEARS, "gate"])
    assert len(list(AdapterFiles(of_attention, layout).linears())) == 3


def test_missing_expert_is_named(tmp_path: Path) -> None:
    layout = AdapterLayout.of(ModelConfig.read(MODEL), 1, 8)
    gone = {f"base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_{part}.weight": None for part in "AB"}
    adapter = write_adapter(tmp_path, MODEL, targets=LINEARS, changes=gone)
    assert "model.layers.1.mlp.experts.3.up_proj is adapted according to" in refused(adapter, layout)


def test_experts_need_memory_when_they_are_loaded(tmp_path: Path) -> None:
    layout = AdapterLayout.of(ModelConfig.read(MODEL), 1, 8)
    experts = AdapterFiles(write_adapter(tmp_path / "1", MODEL, targets=LINEARS), layout)
    attention = AdapterFiles(write_adapter(tmp_path / "2", MODEL, targets=("q_proj",)), layout)
    assert attention.num_expert_bytes() == 0 < experts.num_expert_bytes() <= layout.expert_bytes
    require_memory(attention, 0)
    require_memory(experts, experts.num_expert_bytes())
    with pytest.raises(CheckpointError, match=r"its experts need .* of memory, .* available; unload another adapter"):
        require_memory(experts, experts.num_expert_bytes() - 1)


def test_memory_of_experts_is_freed(tmp_path: Path) -> None:
    """Before the slot gets another adapter, and after a failure; the other slot keeps its numbers."""
    layout = AdapterLayout.of(ModelConfig.read(MODEL), 2, 64)
    files = AdapterFiles(write_adapter(tmp_path, MODEL, rank=64, targets=LINEARS), layout)
    memory = MemoryFile.create("tokamak-test-adapters", layout.num_bytes, is_sparse=True)
    arena = AdapterArena(memory.buffer, layout)
    sizes = [os.fstat(memory.fd).st_blocks]
    for slot in (0, 1):
        arena.write(slot, files.linears())
        sizes.append(os.fstat(memory.fd).st_blocks)
    kept = arena.slots[1].copy()
    arena.release(0)
    assert sizes[0] < os.fstat(memory.fd).st_blocks < sizes[2] - (sizes[1] - sizes[0]) // 2
    assert arena.ranks[1].any() > arena.ranks[0].any()
    np.testing.assert_array_equal(arena.slots[1], kept)
    num_blocks = os.fstat(memory.fd).st_blocks
    name = f"base_model.model.{layout.modules[-1].name}.lora_A.weight"
    not_finite = np.full((64, layout.modules[-1].num_inputs), np.nan)
    damaged = write_adapter(tmp_path / "damaged", MODEL, rank=64, targets=LINEARS, changes={name: not_finite})
    with pytest.raises(CheckpointError, match="not finite"):
        arena.write(0, AdapterFiles(damaged, layout).linears())
    assert os.fstat(memory.fd).st_blocks == num_blocks, "all but its last expert were written"
    assert not arena.ranks[0].any()
