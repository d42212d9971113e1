"""Files of an adapter, checked against the model, as the numbers that the arena stores.

Used by the first rank when it loads an adapter, in a thread beside its steps. Anything wrong with an adapter is a
CheckpointError, raised before anything is written.

`adapter_model.safetensors` has for each adapted linear

    base_model.model.<its name>.lora_A.weight    [rank, inputs]
    base_model.model.<its name>.lora_B.weight    [outputs, rank]

optionally with the adapter's name before `.weight`. Linears have the names of the model's checkpoint; those of vision-language
models may contain `language_model`.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from engine.checkpoint.adapters.config import CONFIG_NAME, AdapterConfig
from engine.checkpoint.adapters.layout import AdaptedModule, AdapterLayout
from engine.checkpoint.files import MappedFile, open_file
from engine.errors import CheckpointError
from workers.weights.formats.floats import is_finite
from workers.weights.safetensors import FLOATS, SafetensorsFile, StoredTensor

TENSORS_NAME = "adapter_model.safetensors"
_MAX_LISTED = 8
_MAX_HEADER_BYTES = 4 << 20  # parsed in one piece, while no step begins
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.[A-Za-z0-9_-]+)?\.weight")
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


class AdapterFiles:
    """The adapter in `directory`, checked except for its numbers. Raises CheckpointError."""

    def __init__(self, directory: Path, layout: AdapterLayout) -> None:
        self._directory, self._layout = directory, layout
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory; expected one with {CONFIG_NAME} and {TENSORS_NAME}")
        self._config = AdapterConfig.read(directory)
        self._path = directory / TENSORS_NAME
        self._file = SafetensorsFile(self._path, self._copied())
        self._names = _names_of(layout)
        self._pairs = self._matched()

    def linears(self) -> Iterator[AdaptedLinear]:
        """Yield linears in the order of the layout. Raises CheckpointError if a number is not finite."""
        for module in self._layout.modules:
            if module.name in self._pairs:
                name, pair = self._pairs[module.name]
                with np.errstate(all="ignore"):
                    a, b = (np.ascontiguousarray(pair[part].read()) for part in "AB")
                    scaled = b * np.float32(self._config.scale_of(name))
                for part, values in (("A", a), ("B", scaled)):
                    if not is_finite(values):
                        raise CheckpointError(f"{self._path}: {pair[part].name} has a value that is not finite as float32")
                yield AdaptedLinear(module, a, scaled)

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
            others = sorted(path.name for path in self._directory.glob("adapter_model.*") if path != self._path)[:1]
            remedy = f"only {others[0]} exists; save the adapter as safetensors" if others else "check the path"
            raise CheckpointError(f"{self._path} cannot be read ({error.strerror}); {remedy}") from None
        if int.from_bytes(data[:8], "little") > _MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self._path} is damaged or not an adapter: its header is longer than {_MAX_HEADER_BYTES} bytes"
            )
        return MappedFile(self._path, data, status)

    def _check_size(self, size: int) -> None:
        most = 8 * self._layout.slot_floats + _MAX_HEADER_BYTES  # float64 at most
        if size > most:
            raise CheckpointError(
                f"{self._path} has {size} bytes, the limit for rank {self._layout.max_rank} is {most}; check that it belongs "
                "to this model, or raise --max-lora-rank"
            )

    def _matched(self) -> dict[str, tuple[str, dict[str, StoredTensor]]]:
        """Return for each module the adapter's name and its two tensors, checked."""
        pairs: dict[str, tuple[str, dict[str, StoredTensor]]] = {}
        strange: list[str] = []
        doubles: list[str] = []
        for key, tensor in self._file.tensors.items():
            match = _KEY.fullmatch(key)
            module = self._names.get(match["module"]) if match else None
            if match is None or module is None:
                strange.append(key)
                continue
            pair = pairs.setdefault(module.name, (match["module"], {}))[1]
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
        for module in self._layout.modules:
            if module.name in pairs:
                self._check(module, *pairs[module.name])
        self._check_complete(pairs)
        return pairs

    def _cause_of(self, key: str) -> str:
        for pattern, cause in _CAUSES:
            if pattern.search(key):
                return cause
        if "kv_b_proj" in key:
            return "is multiplied into queries and results of latent attention, and cannot be adapted; train without kv_b_proj"
        if "expert" in key:
            return (
                "belongs to experts, which cannot be adapted; merge the adapter into the model (merge_and_unload of PEFT) and "
                "serve that, or train it for attention and shared MLPs"
            )
        if "lm_head" in key or "embed_tokens" in key:
            return "belongs to the embedding or the head, which cannot be adapted"
        return "matches no linear layer of the model that can be adapted (q, k, v, o, gate, up, down)"

    def _check(self, module: AdaptedModule, name: str, pair: Mapping[str, StoredTensor]) -> None:
        for part in "AB":
            if part not in pair:
                raise CheckpointError(f"{self._path}: {name} has no lora_{part}")
            if pair[part].dtype not in FLOATS or pair[part].dtype == "U16":
                raise CheckpointError(f"{self._path}: {pair[part].name} has dtype {pair[part].dtype}, expected floats")
        if not self._config.may_have(name):
            raise CheckpointError(f"{self._path}: {name} is not in the target_modules of {CONFIG_NAME}")
        rank = self._config.rank_of(name)
        if rank > self._layout.max_rank:
            raise CheckpointError(
                f"{self._path}: {name} has rank {rank}, the limit is {self._layout.max_rank}; start with --max-lora-rank {rank}"
            )
        for part, shape in (("A", (rank, module.num_inputs)), ("B", (module.num_outputs, rank))):
            if pair[part].shape != shape:
                raise CheckpointError(
                    f"{self._path}: {pair[part].name} has shape {list(pair[part].shape)}, expected {list(shape)}: the model "
                    f"has {module.num_inputs} inputs and {module.num_outputs} outputs there, and the rank in {CONFIG_NAME} is "
                    f"{rank}"
                )

    def _check_complete(self, pairs: Mapping[str, tuple[str, object]]) -> None:
        """Check that everything adapted according to the config exists, under the names that the files use."""
        own, (spelled, _) = next(iter(pairs.items()))
        beginning = spelled[: spelled.index("layers.")]
        ours = own[: own.index("layers.")]
        for module in self._layout.modules:
            name = beginning + module.name.removeprefix(ours)
            if module.name not in pairs and self._config.must_have(name):
                raise CheckpointError(f"{self._path}: {name} is adapted according to {CONFIG_NAME}, but has no tensors")


def _names_of(layout: AdapterLayout) -> dict[str, AdaptedModule]:
    """Return the modules by every name that adapters may use."""
    found = {}
    for module in layout.modules:
        rest = module.name.removeprefix("model.")
        for beginning in ("model.", "", "model.language_model.", "language_model.model.", "language_model."):
            found[f"{beginning}{rest}"] = module
            for other in (rest, rest.replace(".shared_experts.", ".shared_expert.")):  # Qwen 2, Llama 4
                found[f"{beginning}{other}"] = found[f"{beginning}{other.replace('.mlp.', '.feed_forward.')}"] = module
    return found
