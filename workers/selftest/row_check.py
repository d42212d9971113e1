"""Whether CUDA ops are correct on a card: tried with the model's shapes before its weights are loaded.

Called by `op_choice.py` with `--ops cuda`. A small model of random weights has one layer of each kind in the model (dense or
with experts, with and without a window), with the same widths, heads and types. Its hidden states are compared with those of
the processor's native ops, and with themselves in chunks beside other prompts. Tokens are compared with those of the native
sampler.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from engine.checkpoint.families.experts import ExpertsConfig
from engine.checkpoint.model_config import ModelConfig
from engine.messages import SamplingParams, SlotStart
from ops.modules import KvCache
from ops.table import OpTable
from workers.devices.device import Device, HostDevice
from workers.engine.batch_slots import BatchSlots
from workers.engine.device_inputs import DeviceInputs
from workers.engine.inputs import InputSizes
from workers.models.loading import load_model
from workers.sampling import sampler
from workers.sampling.slot_sampling import SlotSampling
from workers.selftest.self_test import SelfTest
from workers.weights.loader import LoadOptions
from workers.weights.precision import Precision

_VOCAB = 512
_EXPERTS = 16  # per layer, at least as many as a row chooses
_OFF = {"float32": 2e-4, "bfloat16": 0.1, "int8": 5e-2, "wint8": 5e-2, "wint4": 0.25}  # relative to the largest number
_ROWS_OFF = 0.1  # allowed share with experts: scores may be nearly equal
_DRAWN: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.6, "min_p": 0.02},
)


def fault_of_rows(device: Device, config: ModelConfig, precision: Precision, kv_dtype: str) -> str:
    """Return the fault of the numbers of the device's ops, or an empty string."""
    small = small_model(config)
    host = HostDevice(1, [], {})
    expected, _ = _hidden_of(host, host.ops, small, Precision(), "float32")
    found, in_parts = _hidden_of(device, device.ops, small, precision, kv_dtype)
    off = np.abs(found - expected).max(axis=1)  # keeps NaN
    offs = _OFF["float32"], _OFF[kv_dtype], _OFF[precision.dtype], _OFF.get(precision.quantization, 0.0)
    most = max(offs) * np.abs(expected).max()
    num_off = int((~(off <= most)).sum())
    if num_off > (_ROWS_OFF * len(off) if small.experts else 0):
        return f"{num_off} of {len(off)} rows of a prompt are off by up to {off.max():.2g}, limit {most:.2g}"
    if not np.array_equal(found, in_parts):
        return (
            f"{(found != in_parts).any(axis=1).sum()} of {len(off)} rows of a prompt have different bits in chunks of a batch"
        )
    return ""


def fault_of_drawing(device: Device, vocab_size: int) -> str:
    """Return the fault of the device's sampled tokens, or an empty string."""
    rows = device.ops
    assert rows.drawing is not None
    vocab, params = min(vocab_size, 8192), [SamplingParams(seed=7 + number, **each) for number, each in enumerate(_DRAWN * 4)]
    inputs = DeviceInputs(device, InputSizes(len(params), 256, 64, 16, rows.row_tile))
    slots = BatchSlots(inputs.host_block_tables, 64, vocab)
    sampling = SlotSampling(slots)
    for slot, each in enumerate(params):
        slots.start(SlotStart(slot, "", np.ones(3 + slot % 7, np.int32).tobytes(), 3, each, b""))
        inputs.start(slots, slot)
    ids, ones = np.arange(len(params), dtype=np.int32), np.ones(len(params), np.int32)
    lengths = slots.num_tokens[ids].copy()
    logits = np.random.default_rng(5).standard_normal((inputs.padded(len(ids)), vocab), np.float32) * 3
    inputs.set_rows(ids, lengths - 1, ones, ones, slots.token_ids, slots)
    rows.begin(inputs, KvCache(16))
    inputs.set_logit_rows(ids)
    expected = sampler.sample(logits[: len(ids)], sampling, ids, lengths).token_ids
    found = rows.drawing.run(inputs, device.tensor(logits)).numpy()[0, : len(ids)]
    return (
        "" if np.array_equal(found, expected) else f"{(found != expected).sum()} of {len(ids)} tokens differ from the sampler's"
    )


def small_model(config: ModelConfig) -> ModelConfig:
    """Return a model with the first layer of each kind, a small vocabulary and few experts; of a vision-language model only the
    trunk."""
    mixtures = {"experts": config.experts, "vision_experts": config.vision_experts}
    sets = [frozenset(each.sparse_layers) if each else frozenset() for each in mixtures.values()]
    sets.append(frozenset(config.other_rope_layers))
    kinds = {
        (*(layer in layers for layers in sets), config.sliding_windows[layer]): layer
        for layer in reversed(range(config.num_layers))
    }
    layers = sorted(kinds.values())
    for name, mixture in mixtures.items():
        if mixture is not None:
            own = tuple(number for number, layer in enumerate(layers) if layer in mixture.sparse_layers)
            config = replace(config, **{name: _few(mixture, own)})
    windows = tuple(config.sliding_windows[layer] for layer in layers)
    other_rope_layers = tuple(number for number, layer in enumerate(layers) if layer in sets[-1])
    sizes = {"num_layers": len(layers), "sliding_windows": windows, "vocab_size": min(config.vocab_size, _VOCAB)}
    return replace(config, num_draft_layers=0, quantization=None, other_rope_layers=other_rope_layers, **sizes)


def _few(experts: ExpertsConfig, sparse_layers: tuple[int, ...]) -> ExpertsConfig:
    in_group = experts.num_experts // experts.num_groups
    wanted = -(-max(_EXPERTS, experts.num_chosen) // experts.num_groups)
    count = min(in_group, wanted) * experts.num_groups
    while count < experts.num_experts and count * experts.num_chosen_groups // experts.num_groups < experts.num_chosen:
        count += experts.num_groups
    shape = tuple(count if size == experts.num_experts else size for size in experts.correction_shape)
    return replace(experts, sparse_layers=sparse_layers, num_experts=count, correction_shape=shape)


def _hidden_of(
    device: Device, table: OpTable, config: ModelConfig, precision: Precision, kv_dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    trial = SelfTest(device, table, config, kv_dtype)
    loaded = load_model(
        Path("random"),
        config,
        table,
        trial.length,
        lambda num_done, num_bytes: None,
        LoadOptions(precision=precision, random_seed=0),
        has_encoder=False,
    )
    return trial.hidden_of(loaded.model)
