"""Models with sliding windows: whatever is in freed blocks changes no bit of an answer, on every backend."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.model_config import ModelConfig
from engine.config import SpeculativeConfig
from engine.messages import SamplingParams, StepResult
from tests.workers.mtp import drafting, write_with_layers
from tests.workers.on_card import on_card
from tests.workers.serving import GOLDEN, ServedSequence, Serving, make_runner
from tests.workers.test_draft_identity import PLANS, PRECISIONS, batch_of_all
from tests.workers.test_runners import QWEN, GraphDevice
from workers.assembly import DeviceParts, RunnerParts, build_runner
from workers.engine.device_inputs import DeviceInputs
from workers.engine.plan import make_plan
from workers.runners import cpu_runner

MODEL = GOLDEN / "gemma3_text"
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, adaptive=False)
WINDOWS = {"40": (40, 40, 40, 40, 40, 0), "1-5-17": (1, 5, 0, 17, 5, 1), "only-9": (9,) * 6}
SIZES: dict[str, Any] = {"load_format": "dummy", "max_model_len": 256, "num_kv_blocks": 80, "max_num_seqs": 8}


class OnDevice:
    """Runner of a device with the reference's ops."""

    def __init__(self, parts: RunnerParts) -> None:
        self.core = build_runner(parts, DeviceParts(GraphDevice("cpu"), DeviceInputs, make_plan))


class FreeingServing(Serving):
    """Serving that gives every block away once no later row reads it: it is filled with NaN."""

    def __init__(self, memory: bytearray, spec: KVCacheSpec, num_blocks: int, runner: Any, **options: Any) -> None:
        super().__init__(runner, **options)
        num_pages, layers = spec.num_pages(num_blocks) + 1, spec.layers_per_page
        pages = np.frombuffer(memory, np.uint8, num_pages * layers * (spec.key_bytes + spec.value_bytes)).reshape(layers, -1)
        parts = np.split(pages, [num_pages * spec.key_bytes], axis=1)
        self._pages = [part.reshape(layers, num_pages, -1) for part in parts]
        self._groups = [group for group in spec.groups for _ in range(group.num_tables)]
        self.num_freed = 0

    def step(self, sequences: list[ServedSequence]) -> StepResult:
        for sequence in sequences:
            for table, group in enumerate(self._groups):
                first = max(0, sequence.num_computed - self.runner.config.speculative_config.num_overlap)
                end = group.first_block(first, self.block_size)
                freed = self.pages(sequence.block_ids[:end], table)
                for part in self._pages:
                    part[:, freed] = 0xFF
                self.num_freed += len(freed)
        return super().step(sequences)


def answers(
    windows: str, *, frees: bool = True, chunk: int = 512, fate: str = "", is_small: bool = False, **options: Any
) -> list[object]:
    """Return the outcome of all sequences, or of a short one in a small model. `fate`: "preempted": one continues in another
    slot."""
    config = replace(ModelConfig.read(MODEL), sliding_windows=WINDOWS[windows])
    if is_small:
        sizes = {"num_layers": 3, "vocab_size": 64, "other_rope_layers": (0, 1)}
        config = replace(config, sliding_windows=WINDOWS[windows][:3], **sizes)
    settings = SIZES | options
    block_size = settings.pop("block_size", 16)
    spec = KVCacheSpec.of(config, block_size, settings.get("kv_cache_dtype", "float32"))
    memory = bytearray(spec.arena_bytes(settings["num_kv_blocks"]))
    runner = make_runner(MODEL, model=config, arena=memoryview(memory), block_size=block_size, **settings)
    if frees:
        serving: Serving = FreeingServing(memory, spec, settings["num_kv_blocks"], runner, chunk=chunk, block_size=block_size)
    else:
        serving = Serving(runner, chunk=chunk, block_size=block_size)
    batch = [ServedSequence([5, 9, 3, 5, 7, 9], SamplingParams(temperature=0.0), 5)] if is_small else batch_of_all()
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    if fate == "preempted":
        for _ in range(9):
            serving.step(batch)
        computed, blocks = batch[2].num_computed, batch[2].block_ids
        serving.place(batch[2], 6)
        batch[2].num_computed, batch[2].block_ids = computed, blocks
    serving.run(batch)
    if isinstance(serving, FreeingServing):
        assert serving.num_freed > 0
    return [sequence.answer() for sequence in batch]


@cache
def undisturbed(windows: str, precision: str) -> list[object]:
    return answers(windows, frees=False, **PRECISIONS[precision])


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("float32", {"chunk": 7, "block_size": 4, "num_kv_blocks": 320}),
        ("float32", {"fate": "preempted", "block_size": 8, "num_kv_blocks": 160, **PLANS["captured"]}),
        ("bfloat16", {"chunk": 3, "block_size": 1, "num_kv_blocks": 1000, "speculative_config": NGRAM}),
        ("int8", {"block_size": 4, "num_kv_blocks": 320, "speculative_config": NGRAM, **PLANS["captured"]}),
        ("int4", {"chunk": 5, "block_size": 2, "num_kv_blocks": 500, "fate": "preempted", **PLANS["eager"]}),
    ],
    ids=["chunks", "captured", "bfloat16-drafts", "int8-drafts", "int4"],
)
def test_freed_blocks_change_no_bit(windows: str, precision: str, options: dict[str, Any]) -> None:
    assert answers(windows, **PRECISIONS[precision], **options) == undisturbed(windows, precision)


@pytest.mark.parametrize("kind", [cpu_runner, OnDevice], ids=["host", "device"])
def test_layers_that_draft_see_all_keys(tmp_path: Path, kind: Any) -> None:
    """They look for their entries in the blocks of layers without a window, whatever grows beside them."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    write_with_layers(tmp_path, QWEN | {"use_sliding_window": True, "sliding_window": 9, "layer_types": types})
    config = ModelConfig.read(tmp_path)
    assert config.sliding_windows == (9, 0, 9)
    found = []
    for drafts in (SpeculativeConfig(), drafting(3)):
        spec = KVCacheSpec.of(config, 4, "float32", drafts.has_mtp)
        memory = bytearray(spec.arena_bytes(160))
        options: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 160, "block_size": 4, "speculative_config": drafts}
        options |= {} if kind is cpu_runner else {"ops": "reference"}
        runner = make_runner(tmp_path, arena=memoryview(memory), kind=kind, **options)
        serving = FreeingServing(memory, spec, 160, runner, chunk=6, block_size=4)
        batch = [ServedSequence([7, 3, 9, 7, 3, slot] * 4, SamplingParams(temperature=0.0), 20) for slot in range(3)]
        for slot, sequence in enumerate(batch):
            serving.place(sequence, slot)
        serving.run(batch)
        found.append([sequence.answer() for sequence in batch])
        assert serving.num_freed > 0
    assert found[0] == found[1]


@pytest.mark.slow
def test_freed_blocks_change_no_bit_of_the_reference() -> None:
    """On the host, and where a device computes the slots of all block tables."""
    small = {"ops": "reference", "block_size": 2, "is_small": True}
    expected = answers("1-5-17", frees=False, **small)
    assert answers("1-5-17", chunk=4, kind=cpu_runner, **small) == expected
    assert answers("1-5-17", chunk=4, kind=OnDevice, **small) == expected


@pytest.mark.slow
def test_freed_blocks_change_no_bit_of_cuda_rows() -> None:
    small = {**on_card(), "block_size": 4, "num_kv_blocks": 80, "is_small": True}
    assert answers("1-5-17", chunk=3, **small) == answers("1-5-17", frees=False, **small)
