"""Sequences with LoRA adapters on an emulated card: the answers of the native ops, and the same bits alone and together."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.adapters.layout import AdapterLayout
from engine.checkpoint.model_config import ModelConfig
from tests.adapters import GREEDY, answer, write_adapter
from tests.devices.driver import emulated_driver
from tests.paths import GOLDEN
from tests.workers.on_card import on_card
from tests.workers.serving import ServedSequence, Serving, make_runner

PROMPTS = [[(11 * number + 5 * index) % 300 + 3 for index in range(length)] for number, length in enumerate((19, 3, 8))]
SIZES: dict[str, Any] = {"max_model_len": 64, "num_kv_blocks": 32, "max_num_seqs": 4}
CAPTURED = {"plan": "captured", "cudagraph_capture_sizes": (4, 2), "max_cudagraph_capture_size": 4}


def registered_bytes() -> int:
    return int(ctypes.CDLL(emulated_driver()).libcuda_registered_bytes())


@pytest.mark.parametrize(("name", "options"), [("qwen3", {}), ("qwen3_moe", CAPTURED)], ids=["dense", "captured, experts"])
def test_adapters_on_a_card_agree_with_native_ops(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = GOLDEN / name
    adapters = [write_adapter(tmp_path / str(seed), model, seed=seed, rank=5 + 3 * seed, size=0.02) for seed in range(2)]
    host = make_runner(model, adapters=adapters, **SIZES)
    card = make_runner(model, adapters=adapters, **on_card() | SIZES | options)
    pairs = [(prompt, slot) for slot, prompt in enumerate(PROMPTS, -1)]
    alone = [answer(card, *pair, num_outputs=4) for pair in pairs]
    for pair, found in zip(pairs, alone, strict=True):
        expected = answer(host, *pair, num_outputs=4)
        assert found[0] == expected[0]
        np.testing.assert_allclose(found[1], expected[1], atol=1e-3)
    assert answer(card, PROMPTS[2], 0, num_outputs=4) != alone[2] != answer(card, PROMPTS[2], -1, num_outputs=4)
    serving = Serving(card, chunk=7)
    together = [ServedSequence(prompt, GREEDY, 4, adapter_slot=slot) for prompt, slot in pairs]
    for place, sequence in enumerate(together):
        serving.place(sequence, place)
    serving.run(together)
    assert [sequence.answer() for sequence in together] == alone


def test_adapters_are_in_memory_of_the_card(tmp_path: Path) -> None:
    """But for experts, whose memory on the host is locked if the adapter changes them. Sleep frees the card's; later answers
    are the same."""
    model = GOLDEN / "qwen3_moe"
    layout = AdapterLayout.of(ModelConfig.read(model), 3, 16)
    adapters = [write_adapter(tmp_path / str(seed), model, seed=seed, targets=("q_proj", "o_proj")) for seed in range(2)]
    before = registered_bytes()
    runner = make_runner(model, adapters=adapters, load=False, **on_card(), **SIZES)
    empty = runner.device.memory_bytes()
    runner.load(str(model), 1, lambda num_done, num_bytes: None)
    plain = answer(runner, PROMPTS[1], -1, num_outputs=2)
    locked = registered_bytes()
    found = answer(runner, PROMPTS[1], 1, num_outputs=2)
    assert found != plain
    assert registered_bytes() == locked < before + layout.table_bytes + 4 * layout.dense_floats
    assert runner.device.memory_bytes() > empty + 3 * 4 * layout.dense_floats
    runner.clear()
    assert runner.device.memory_bytes() <= empty + 4 * layout.dense_floats
    runner.load(str(model), 2, lambda num_done, num_bytes: None)
    assert answer(runner, PROMPTS[1], 1, num_outputs=2) == found
