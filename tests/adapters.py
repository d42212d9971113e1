"""Adapters in the format of PEFT with random numbers, and the weights that they merge into."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.adapters.layout import AdapterLayout
from engine.checkpoint.model_config import ModelConfig
from engine.messages import SamplingParams
from tests.workers.checkpoints import write_safetensors
from tests.workers.serving import ServedSequence, Serving
from workers.engine.runner import ModelRunner
from workers.weights.reader import plain
from workers.weights.safetensors import SafetensorsFile

GREEDY = SamplingParams(temperature=0.0, num_logprobs=5, num_prompt_logprobs=3)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path,
    model: Path,
    *,
    rank: int = 8,
    targets: Iterable[str] = TARGETS,
    seed: int = 0,
    size: float = 0.1,
    changes: Mapping[str, np.ndarray | None] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of the checkpoint `model`. `size`: approximate magnitude of its products; `changes`: tensors that
    replace the generated ones, None: left out; other fields are of adapter_config.json."""
    generator = np.random.default_rng(seed)
    ranks, targets = config.get("rank_pattern", {}), tuple(targets)
    tensors: dict[str, np.ndarray] = {}
    for name, num_inputs, num_outputs in linears_of(AdapterLayout.of(ModelConfig.read(model), 1, 512)):
        last = name.rpartition(".")[2]
        if last not in targets:
            continue
        own = ranks.get(last, rank)
        for part, shape in (("A", (own, num_inputs)), ("B", (num_outputs, own))):
            values = generator.standard_normal(shape, np.float32) * np.float32((size / own) ** 0.5)
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = values
    for name, change in (changes or {}).items():
        tensors.pop(name, None)
        if change is not None:
            tensors[name] = change
    directory.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none", **config}
    (directory / "adapter_config.json").write_text(json.dumps(values))
    write_safetensors(directory / "adapter_model.safetensors", tensors)
    return directory


def linears_of(layout: AdapterLayout) -> Iterator[tuple[str, int, int]]:
    """Yield name, inputs and outputs of the linears as checkpoints have them: parts of a joined one only once."""
    joined = {f"{each.module}.{part}": each for each in layout.joined for part in each.part_names}
    for module in layout.modules:
        *prefix, place, last = module.name.split(".")
        own = joined.get(f"{place}.{last}")
        if own is None:
            yield module.name, module.num_inputs, module.num_outputs
        elif last == own.part_names[0]:
            yield ".".join([*prefix, place, own.name]), module.num_inputs, own.num_rows


def merge(directory: Path, model: Path, adapter: Path, scale: float = 2.0) -> Path:
    """Write the checkpoint `model` with an adapter merged into its weights, in float32, to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (directory / path.name).write_bytes(path.read_bytes())
    stored = SafetensorsFile(model / "model.safetensors").tensors
    parts = SafetensorsFile(adapter / "adapter_model.safetensors").tensors
    merged = {}

    def added(module: str) -> np.ndarray | float:
        key = f"base_model.model.{module}"
        if f"{key}.lora_A.weight" not in parts:
            return 0.0
        a, b = (parts[f"{key}.lora_{part}.weight"].read().astype(np.float64) for part in "AB")
        return scale * (b @ a)

    for name, tensor in stored.items():
        values, module = tensor.read().astype(np.float64), plain(name).removesuffix(".weight")
        if module.endswith((".experts.gate_up_proj", ".experts.down_proj")):  # gpt-oss: [experts, in, out]
            prefix = module.rpartition(".")[0]
            for expert, own in enumerate(values.swapaxes(1, 2)):
                for row, part in enumerate(("gate_proj", "up_proj") if "gate_up" in module else ("down_proj",)):
                    own[row :: 2 if "gate_up" in module else 1] += added(f"{prefix}.{expert}.{part}")
        else:
            values += added(module)
        merged[name] = values.astype(np.float32)
    write_safetensors(directory / "model.safetensors", merged)
    return directory


def answer(
    runner: ModelRunner, prompt: list[int], adapter_slot: int, chunk: int = 512, num_outputs: int = 8
) -> tuple[object, ...]:
    """Return the answer of a sequence with the adapter in a slot, -1: none."""
    serving = Serving(runner, chunk=chunk)
    sequence = ServedSequence(prompt, GREEDY, num_outputs, adapter_slot=adapter_slot)
    serving.place(sequence, 3)
    serving.run([sequence])
    return sequence.answer()
