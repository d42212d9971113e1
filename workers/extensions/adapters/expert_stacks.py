"""Adapters of stacked experts, in the format of PEFT's `target_parameters`: one A and one B for the matrices of all experts.

Used by `reader.py`. For a parameter [experts, x, y] of rank r

    lora_A.weight    [experts * r, y]    the r rows of each expert follow each other; before PEFT 0.19 [experts * r, x]
    lora_B.weight    [x, r * experts]    the experts of each of the r follow each other; before PEFT 0.19 [y, r * experts]

The names are those of the module with the parameters. PEFT wraps it once for each parameter, in the order in which the module
has them, so those of the last one are `...experts.lora_A.weight`, those before `...experts.base_layer.lora_A.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np

from engine.checkpoint.adapters.config import AdapterConfig
from engine.checkpoint.adapters.layout import StackShape
from engine.errors import CheckpointError
from workers.weights.safetensors import StoredTensor

PARAMETERS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")  # in the order of the module
_WRAPPED = re.compile(r"(?P<module>.*\.experts)(?P<depth>(?:\.base_layer)*)")
_ALONE = re.compile(r"(?P<module>.*\.experts)\.(?P<parameter>gate_up_proj|down_proj)")  # Granite: modules of their own


class ExpertStack(msgspec.Struct, frozen=True):
    """A and B of one parameter. `name`: of the parameter, as the adapter spells it; `plain_name`: as the models do."""

    name: str
    plain_name: str
    parameter: str
    pair: dict[str, StoredTensor]

    @property
    def prefix(self) -> str:
        return self.plain_name.removesuffix(self.parameter)


def is_swapped(stacks: Iterable[ExpertStack], shape: StackShape, config: AdapterConfig) -> bool:
    """Return whether A is [..., outputs]. All stacks of an adapter agree; if all matrices are square, the version decides."""
    for stack in stacks:
        num_inputs, num_outputs = shape.sizes(stack.parameter)
        if num_inputs != num_outputs and len(stack.pair["A"].shape) == 2:
            return stack.pair["A"].shape[1] == num_outputs
    is_last = config.has_swapped_stacks and not shape.is_marked
    return is_last == shape.is_turned


def is_stack(plain_name: str) -> bool:
    """Return whether a module of this name has the A and B of a stack."""
    return bool(_WRAPPED.fullmatch(plain_name) or _ALONE.fullmatch(plain_name))


def stacks_of(pairs: Mapping[str, tuple[str, dict[str, StoredTensor]]], config: AdapterConfig) -> Iterator[ExpertStack]:
    """Yield the stacks among `pairs`: by plain name of a module, its name in the adapter and its tensors. Raises
    CheckpointError if it is unclear which parameter one belongs to."""
    wrapped: dict[str, list[tuple[str, dict[str, StoredTensor]]]] = {}
    for plain_name, (spelled, pair) in pairs.items():
        if match := _ALONE.fullmatch(plain_name):
            yield ExpertStack(f"{spelled}.weight", plain_name, match["parameter"], pair)
        elif match := _WRAPPED.fullmatch(plain_name):
            wrapped.setdefault(match["module"], []).append((spelled, pair))
    for module, found in wrapped.items():
        found.sort(key=lambda each: -each[0].count(".base_layer"))
        spelled = found[-1][0]
        names = [name for name in PARAMETERS if config.has_parameter(f"{spelled}.{name}")]
        if biases := [name for name in names if name.endswith("_bias")]:
            raise CheckpointError(
                f"{config.path}: target_parameters: {spelled}.{biases[0]} is a bias, which is not supported; train without it"
            )
        if len(names) != len(found) or [each[0] for each in found] != [
            f"{spelled}{'.base_layer' * depth}" for depth in reversed(range(len(found)))
        ]:
            raise CheckpointError(
                f"{config.path}: target_parameters name {len(names)} parameters of {spelled} ({', '.join(names)}), but the "
                f"adapter has tensors of {len(found)}; expected those of PEFT's save_pretrained"
            )
        for name, (_, pair) in zip(names, found, strict=True):
            yield ExpertStack(f"{spelled}.{name}", f"{module}.{name}", name, pair)


def matrices_of(
    stack: ExpertStack, shape: StackShape, is_swapped: bool, a: np.ndarray, b: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return A [rank, inputs] and B [outputs, rank] of each expert's linears, by their plain names. `a`, `b`: as stored."""
    rank = len(a) // shape.num_experts
    firsts = a.reshape(shape.num_experts, rank, -1)
    seconds = b.reshape(-1, rank, shape.num_experts).transpose(2, 1, 0)
    of_inputs, of_outputs = (seconds, firsts) if is_swapped else (firsts, seconds)
    found = {}
    for expert in range(shape.num_experts):
        own_a, own_b = of_inputs[expert], of_outputs[expert].T
        name = f"{stack.prefix}{expert}"
        if stack.parameter == "down_proj":
            found[f"{name}.down_proj"] = own_a, own_b
            continue
        gate, up = (own_b[0::2], own_b[1::2]) if shape.is_interleaved else (own_b[: shape.inner], own_b[shape.inner :])
        found[f"{name}.gate_proj"], found[f"{name}.up_proj"] = (own_a, gate), (own_a, up)
    return found
