"""LoRA adapters: number, size, and which are loaded at start. Part of `resolve.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.checkpoint.adapters.layout import AdapterLayout, why_not_adaptable
from engine.checkpoint.model_config import ModelConfig
from engine.config import MAX_LORAS, LoraModule
from engine.errors import OptionError
from engine.options.table import OptionValues
from shm.memory import available_memory_bytes
from shm.sizes import size_text

DEFAULT_LORAS = 4


def resolve_lora(options: OptionValues, model: ModelConfig, device: str, ops: str, names: Sequence[str]) -> dict[str, Any]:
    """Return fields of the configuration. `names`: served names of the model itself."""
    values = options.values
    modules: tuple[LoraModule, ...] = tuple(values["lora_modules"])
    if not values["enable_lora"]:
        if modules:
            raise OptionError("--lora-modules needs --enable-lora; add it")
        return {}
    trouble = why_not_adaptable(model)
    if trouble:
        raise OptionError(f"--enable-lora: {model.architecture} models do not support adapters, {trouble}; remove it")
    if device != "cpu" and ops != "cuda":
        where = f"the device is {device} and the ops are {ops}"
        raise OptionError(f"--enable-lora: adapters need the CPU or CUDA ops, but {where}; remove it, or use --device cpu")
    taken = list(names)
    for module in modules:
        if module.name in taken:
            raise OptionError(
                f"--lora-modules: the name {module.name!r} is given twice; names of adapters and of the model must be unique"
            )
        taken.append(module.name)
    num_slots = values["max_loras"] or min(MAX_LORAS, max(DEFAULT_LORAS, len(modules)))
    if len(modules) > num_slots:
        raise OptionError(
            f"--max-loras {num_slots} is less than the {len(modules)} adapters in --lora-modules; raise it, or name fewer"
        )
    max_rank = values["max_lora_rank"]
    layout = AdapterLayout.of(model, num_slots, max_rank)
    available = available_memory_bytes()
    num_bytes = layout.num_bytes - layout.expert_bytes
    if num_bytes > available:
        raise OptionError(
            f"--enable-lora: {num_slots} adapters of rank {max_rank} need {size_text(num_bytes)}, but only "
            f"{size_text(available)} are available; lower --max-loras or --max-lora-rank"
        )
    return {
        "max_loras": num_slots,
        "max_lora_rank": max_rank,
        "lora_modules": modules,
        "adapter_bytes": layout.num_bytes,
        "adapter_expert_bytes": layout.expert_bytes,
    }
