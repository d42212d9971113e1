"""Files of an adapter, checked against the model, as the numbers that the arena stores.

Used by the first rank when it loads an adapter, in a thread beside its steps. Anything wrong with an adapter is a
CheckpointError, raised before anything is written.

`adapter_model.safetensors` has for each adapted linear

    base_model.model.<its name>.lora_A.weight    [rank, inputs]
    base_model.model.<its name>.lora_B.weight    [outputs, rank]

optionally with the adapter's name before `.weight`. Linears have the names of the model's checkpoint; those of vision-language
models may contain `language_model`. Experts have these too, or are stacked (`expert_stacks.py`).
"""

from __future__ import annotations

import mmap
import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from engine.checkpoint.adapters.config import CONFIG_NAME, AdapterConfig
from engine.checkpoint.adapters.layout import AdaptedModule, AdapterLayout, whole_lines
from engine.checkpoint.files import MappedFile, open_file
from engine.checkpoint.joined_projections import JoinedProjection
from engine.errors import CheckpointError
from shm.sizes import size_text
from workers.extensions.adapters.expert_stacks import ExpertStack, is_stack, is_swapped, matrices_of, stacks_of
from workers.weights.formats.floats import is_finite
from workers.weights.formats.joined_projections import parts_of
from workers.weights.formats.rows import Rows
from workers.weights.reader import plain
from workers.weights.safetensors import FLOATS, SafetensorsFile, StoredTensor

TENSORS_NAME = "adapter_model.safetensors"
_MAX_LISTED = 8
_MAX_HEADER_BYTES = 4 << 20  # parsed in one piece, while no step begins
_HEADER_BYTES_OF_MODULE = 512  # models of many experts have more
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.[A-Za-z0-9_-]+)?\.weight")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERT = re.compile(r".*\.mlp\.experts\.(?=\d+\.)")
_FIRST = re.compile(r"\.mlp\.experts\.0\.down_proj$")
_PARAMETERS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_CAUSES = (  # why other tensors are refused
    (re.compile(r"lora_magnitude_vector"), "is a magnitude of DoRA, which is not supported"),
    (re.compile(r"lora_embedding_[AB]"), "adapts an embedding; only linear layers can be adapted"),
    (
        re.compile(r"modules_to_save|\.original_module\."),
        "replaces a module of the base model; merge it, or train without modules_to_save",
    ),
    (re.compile(r"lora_[AB].*\.bias$"), "is a bias of an adapter, which is not supported"),
    (re.compile(r"\.bias$"), "is a bias, which is not supported"),
)


class AdaptedLinear(msgspec.Struct, frozen=True):
    """A, and B multiplied by the scale: float32 [rank, inputs] and [outputs, rank]."""

    module: AdaptedModule
    a: np.ndarray
    b: np.ndarray

    @property
    def rank(self) -> int:
        return len(self.a)


class _Pair(NamedTuple):
    """Tensors A and B of a linear, under its name in the adapter's file. `rows`: of B that are the linear's; None: all."""

    name: str
    tensors: Mapping[str, StoredTensor]
    rows: Rows | None = None


class AdapterFiles:
    """The adapter in `directory`, checked except for its numbers. Raises CheckpointError. `available_bytes`: memory for a copy
    of its file."""

    def __init__(self, directory: Path, layout: AdapterLayout, available_bytes: int = sys.maxsize) -> None:
        self.directory, self._layout = directory, layout
        self._available_bytes = available_bytes
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory; expected one with {CONFIG_NAME} and {TENSORS_NAME}")
        self._config = AdapterConfig.read(directory)
        self._path = directory / TENSORS_NAME
        self._file = SafetensorsFile(self._path, self._copied())
        self._modules = {module.name: module for module in layout.modules}
        self._joined = {f"{each.module}.{each.name}": each for each in layout.joined}
        self._stacks: dict[str, ExpertStack] = {}  # by the plain name of the parameter
        self._is_swapped = False
        self._pairs = self._matched()

    def linears(self) -> Iterator[AdaptedLinear]:
        """Yield linears in the order of the layout. Raises CheckpointError if a number is not finite."""
        layer, of_stacks = "", dict[str, tuple[np.ndarray, np.ndarray]]()
        for module in self._layout.modules:
            if module.name in self._pairs:
                name, pair, rows = self._pairs[module.name]
                a, b = self._read(name, pair)
                yield AdaptedLinear(module, a, b if rows is None else np.ascontiguousarray(b[rows]))
            elif self._stacks and (match := _EXPERT.match(module.name)):
                if match[0] != layer:
                    layer, of_stacks = match[0], self._read_stacks(match[0])
                if module.name in of_stacks:
                    yield AdaptedLinear(module, *map(np.ascontiguousarray, of_stacks[module.name]))

    def num_expert_bytes(self) -> int:
        """Return the memory that experts take in the arena."""
        num_floats = 0
        for module in self._layout.modules:
            match = _EXPERT.match(module.name)
            stack = self._stacks.get(f"{match[0]}{_PARAMETERS[module.name.rpartition('.')[2]]}") if match else None
            name = stack.name if stack else self._pairs[module.name].name if match and module.name in self._pairs else ""
            if name:
                rank = self._config.rank_of(name)
                num_floats += module.num_inputs * whole_lines(rank) + whole_lines(module.num_outputs) * rank
        return 4 * num_floats

    def _read(self, name: str, pair: Mapping[str, StoredTensor]) -> tuple[np.ndarray, np.ndarray]:
        """Return A, and B with its scale. Raises CheckpointError if a number is not finite."""
        with np.errstate(all="ignore"):
            a, b = (np.ascontiguousarray(pair[part].read()) for part in "AB")
            scaled = b * np.float32(self._config.scale_of(name))
        for part, values in (("A", a), ("B", scaled)):
            if not is_finite(values):
                raise CheckpointError(f"{self._path}: {pair[part].name} has a value that is not finite as float32")
        return a, scaled

    def _read_stacks(self, prefix: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return A and B of each linear of the experts named `prefix`."""
        found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for parameter in dict.fromkeys(_PARAMETERS.values()):
            stack = self._stacks.get(f"{prefix}{parameter}")
            if stack is not None and self._layout.stack is not None:
                found |= matrices_of(stack, self._layout.stack, self._is_swapped, *self._read(stack.name, stack.pair))
        return found

    def _copied(self) -> MappedFile:
        """Copy the file into private memory, so that no other process changes or truncates it while it is read."""
        try:
            with open(open_file(self._path), "rb", buffering=0) as stream:
                status = os.fstat(stream.fileno())
                self._check_size(status.st_size)
                data = mmap.mmap(-1, max(status.st_size, 1))
                view, num_read = memoryview(data), 0
                while num_read < status.st_size and (count := stream.readinto(view[num_read:])):
                    num_read += count
                view.release()
                now = os.fstat(stream.fileno())
                if num_read < status.st_size or (now.st_size, now.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
                    raise CheckpointError(f"{self._path} changed while it was read; load it again when it is complete")
        except OSError as error:
            others = sorted(path.name for path in self.directory.glob("adapter_model.*") if path != self._path)[:1]
            remedy = f"only {others[0]} exists; save the adapter as safetensors" if others else "check the path"
            raise CheckpointError(f"{self._path} cannot be read ({error.strerror}); {remedy}") from None
        if int.from_bytes(data[:8], "little") > self._most_header_bytes:
            raise CheckpointError(
                f"{self._path} is damaged or not an adapter: its header is longer than {self._most_header_bytes} bytes"
            )
        return MappedFile(self._path, data, status)

    @property
    def _most_header_bytes(self) -> int:
        return max(_MAX_HEADER_BYTES, _HEADER_BYTES_OF_MODULE * len(self._layout.modules))

    def _check_size(self, size: int) -> None:
        most = 8 * self._layout.slot_floats + self._most_header_bytes  # float64 at most
        if size > most:
            raise CheckpointError(
                f"{self._path} has {size} bytes, the limit for rank {self._layout.max_rank} is {most}; check that it belongs "
                "to this model, or raise --max-lora-rank"
            )
        if size > self._available_bytes:
            raise CheckpointError(
                f"{self._path} has {size_text(size)}, which are read into memory, but {size_text(self._available_bytes)} are "
                "available; unload another adapter of experts, use one of a lower rank, or merge it into the model "
                "(merge_and_unload of PEFT)"
            )

    def _matched(self) -> dict[str, _Pair]:
        """Return the tensors of each module, checked."""
        pairs: dict[str, tuple[str, dict[str, StoredTensor]]] = {}
        strange: list[str] = []
        doubles: list[str] = []
        for key, tensor in self._file.tensors.items():
            match = _KEY.fullmatch(key)
            name = _plain(match["module"]) if match else ""
            is_known = name in self._modules or self._joined_at(name) is not None
            if match is None or not (is_known or (self._layout.stack and is_stack(name))):
                strange.append(key)
                continue
            pair = pairs.setdefault(name, (match["module"], {}))[1]
            if match["part"] in pair:
                doubles.append(f"{key} is stored twice, as {pair[match['part']].name}")
            pair[match["part"]] = tensor
        if strange or doubles:
            listed = [f"{key} {self._cause_of(key)}" for key in strange[:_MAX_LISTED]] + doubles
            num_more = len(strange) + len(doubles) - _MAX_LISTED
            more = f"; and {num_more} more" if num_more > 0 else ""
            raise CheckpointError(f"{self._path}: {'; '.join(listed[:_MAX_LISTED])}{more}")
        if not pairs:
            raise CheckpointError(f"{self._path} has no tensors of an adapter")
        for name, (_, pair) in pairs.items():
            self._check_pair(name, pair)
        stacks, linears = dict[str, tuple[str, dict[str, StoredTensor]]](), dict[str, _Pair]()
        for name, (spelled, pair) in pairs.items():
            joined = self._joined_at(name)
            if joined is not None:
                parts = [(f"{name.removesuffix(joined.name)}{part}", rows) for part, rows in parts_of(joined)]
                self._check(spelled, pair, self._modules[parts[0][0]].num_inputs, joined.num_rows)
                linears |= {part: _Pair(spelled, pair, rows) for part, rows in parts}
            elif name in self._modules:
                self._check(spelled, pair, self._modules[name].num_inputs, self._modules[name].num_outputs)
                linears[name] = _Pair(spelled, pair)
            else:
                stacks[name] = spelled, pair
        self._find_stacks(stacks)
        self._check_complete(linears)
        self._check_parameters(linears)
        return linears

    def _joined_at(self, name: str) -> JoinedProjection | None:
        """Return what the linear `name` of an adapter's file is split into; None: nothing."""
        prefix, module, last = ["", "", *name.rsplit(".", 2)][-3:]
        joined = self._joined.get(f"{module}.{last}")
        return joined if joined and f"{prefix}.{module}.{joined.part_names[0]}" in self._modules else None

    def _check_parameters(self, linears: Mapping[str, _Pair]) -> None:
        """Check that the adapter has tensors of all parameters that it names."""
        found = [stack.name for stack in self._stacks.values()] + [f"{pair.name}.weight" for pair in linears.values()]
        for parameter in sorted(self._config.parameters):
            if not any(f".{name}".endswith(f".{parameter}") for name in found):
                raise CheckpointError(
                    f"{self._config.path}: target_parameters: {parameter} is no linear or experts with tensors in "
                    f"{TENSORS_NAME}; other parameters cannot be adapted: merge the adapter into the model "
                    "(merge_and_unload of PEFT)"
                )

    def _find_stacks(self, pairs: Mapping[str, tuple[str, dict[str, StoredTensor]]]) -> None:
        shape = self._layout.stack
        if shape is None or not pairs:
            return
        self._stacks = {stack.plain_name: stack for stack in stacks_of(pairs, self._config)}
        self._is_swapped = is_swapped(self._stacks.values(), shape, self._config)
        for stack in self._stacks.values():
            if f"{stack.prefix}0.down_proj" not in self._modules:
                raise CheckpointError(f"{self._path}: {stack.name} is adapted, but the model has no experts in that layer")
            if not self._config.has_parameter(stack.name):
                raise CheckpointError(f"{self._path}: {stack.name} is not in the target_parameters of {CONFIG_NAME}")
            num_inputs, num_outputs = shape.sizes(stack.parameter)
            sizes = (num_outputs, num_inputs) if self._is_swapped else (num_inputs, num_outputs)
            self._check_rank(stack.name, stack.pair, *sizes, shape.num_experts)

    def _cause_of(self, key: str) -> str:
        for pattern, cause in _CAUSES:
            if pattern.search(key):
                return cause
        if "kv_b_proj" in key:
            return "is multiplied into queries and results of latent attention, and cannot be adapted; train without kv_b_proj"
        if "expert" in key:
            return (
                "matches no linear of the model's experts; merge the adapter into the model (merge_and_unload of PEFT) and "
                "serve that, or train it for attention and shared MLPs"
            )
        if "lm_head" in key or "embed_tokens" in key:
            return "belongs to the embedding or the head, which cannot be adapted"
        return "matches no linear layer of the model that can be adapted (q, k, v, o, gate, up, down)"

    def _stored_name(self, name: str) -> str:
        """Return the name that a linear of the model has in files, or what it is a part of."""
        for joined in self._layout.joined:
            for part in joined.part_names:
                if name.endswith(f".{joined.module}.{part}"):
                    return name.removesuffix(part) + joined.name
        return name

    def _check_pair(self, name: str, pair: Mapping[str, StoredTensor]) -> None:
        for part in "AB":
            if part not in pair:
                raise CheckpointError(f"{self._path}: {name} has no lora_{part}")
            if pair[part].dtype not in FLOATS or pair[part].dtype == "U16":
                raise CheckpointError(f"{self._path}: {pair[part].name} has dtype {pair[part].dtype}, expected floats")

    def _check(self, name: str, pair: Mapping[str, StoredTensor], num_inputs: int, num_outputs: int) -> None:
        if not self._config.may_have(name):
            raise CheckpointError(f"{self._path}: {name} is not in the target_modules of {CONFIG_NAME}")
        self._check_rank(name, pair, num_inputs, num_outputs)

    def _check_rank(
        self, name: str, pair: Mapping[str, StoredTensor], num_inputs: int, num_outputs: int, num_experts: int = 1
    ) -> None:
        rank = self._config.rank_of(name)
        if rank > self._layout.max_rank:
            raise CheckpointError(
                f"{self._path}: {name} has rank {rank}, the limit is {self._layout.max_rank}; start with --max-lora-rank {rank}"
            )
        experts = f" for each of {num_experts} experts" if num_experts > 1 else ""
        for part, shape in (("A", (num_experts * rank, num_inputs)), ("B", (num_outputs, num_experts * rank))):
            if pair[part].shape != shape:
                raise CheckpointError(
                    f"{self._path}: {pair[part].name} has shape {list(pair[part].shape)}, expected {list(shape)}: the model "
                    f"has {num_inputs} inputs and {num_outputs} outputs there{experts}, and the rank in {CONFIG_NAME} is {rank}"
                )

    def _check_complete(self, pairs: Mapping[str, _Pair]) -> None:
        """Check that everything adapted according to the config exists, under the names that the files use."""
        spellings = {_NUMBER.sub("0", name): pair.name for name, pair in pairs.items()}
        spellings |= {_NUMBER.sub("0", stack.plain_name): stack.name for stack in self._stacks.values()}
        some = next(iter(spellings.values()))
        beginning, kinds = some[: some.index("layers.")], {_kind_of(name) for name in pairs}
        for module in self._layout.modules:
            kind = _kind_of(module.name)
            if module.name in pairs or (kind and kind not in kinds):
                continue
            stored = self._stored_name(module.name).removeprefix("model.")
            spelled = spellings.get(_NUMBER.sub("0", module.name), beginning + stored)
            name = _with_numbers(spelled, module.name)
            if self._config.must_have(name) or self._config.has_parameter(f"{name}.weight"):
                raise CheckpointError(f"{self._path}: {name} is adapted according to {CONFIG_NAME}, but has no tensors")
        layers = {module.name.rpartition("0.down_proj")[0] for module in self._layout.modules if _FIRST.search(module.name)}
        for stack in list(self._stacks.values()):
            for prefix in layers:
                name = _with_numbers(stack.name, prefix)
                if f"{prefix}{stack.parameter}" not in self._stacks and self._config.has_parameter(name):
                    raise CheckpointError(f"{self._path}: {name} is adapted according to {CONFIG_NAME}, but has no tensors")


def _kind_of(name: str) -> str:
    """Return the kind of a module that some models have as linears and some versions of transformers as parameters: an adapter
    without any may still name them as targets. Empty: always a linear."""
    return "router" if name.endswith(".mlp.gate") else "expert" if ".mlp.experts." in name else ""


def _plain(name: str) -> str:
    """Return the model's name of a module; numbers within do not matter."""
    return _with_numbers(_plain_of_first(_NUMBER.sub("0", name)), name)


def _with_numbers(name: str, other: str) -> str:
    """Return `name` with the numbers of layer and expert of `other`."""
    numbers = iter(_NUMBER.findall(other))
    return _NUMBER.sub(lambda match: next(numbers, match[0]), name)


@lru_cache(maxsize=1024)
def _plain_of_first(name: str) -> str:
    found = plain(f"{name}.weight").removesuffix(".weight")
    return f"model.{found}" if found.startswith("layers.") else found
