"""Sources of the numbers of each kind of module: tensors of a checkpoint, by name. Used by `packing.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Protocol

import numpy as np

from ops.modules import (
    Convolution,
    DeltaRule,
    Embedding,
    EmbeddingPart,
    Experts,
    Factor,
    Factors,
    GatedNorm,
    HeadLinear,
    HeadNorm,
    LayerNorm,
    Limits,
    Linear,
    LinearPart,
    Module,
    Norm,
    PatchLinear,
    PositionTable,
    Router,
    Sinks,
    Standardization,
    StateSpaces,
    TypedPositions,
)
from ops.weight_format import QuantizedWeight, Source, SourceByRows, Values, WeightFormat, float32
from workers.weights.formats.floats import joined
from workers.weights.formats.integers import side_by_side
from workers.weights.formats.tensor import Kept

_INTEGERS = ("int8", "int4", "float4")
_MATRICES = (Linear, HeadLinear, Embedding)


class Stored(Protocol):
    """Source of values: a checkpoint or a random generator. Names are those of Hugging Face."""

    has_offset_norms: bool  # the weights of norms already have their offset

    def read_plain(self, name: str) -> np.ndarray: ...
    def read_columns(self, name: str, columns: slice) -> np.ndarray: ...
    def has_rows(self, name: str, is_whole: bool = True) -> bool: ...
    def read_rows(self, name: str, begin: int, end: int) -> np.ndarray: ...
    def kept(self, name: str) -> Kept: ...
    def read_integers(self, name: str, format: WeightFormat) -> QuantizedWeight: ...
    def release(self) -> None: ...
    def check_unchanged(self) -> None: ...


class ModuleSources:
    """Reads modules from `stored`; None: they are mapped and nothing is read."""

    def __init__(self, stored: Stored | None) -> None:
        self._given = stored

    @property
    def _stored(self) -> Stored:
        assert self._given is not None, "mapped weights have no source"
        return self._given

    def of(self, module: Module) -> Mapping[str, Source]:
        match module:
            case PatchLinear():
                return {
                    "weight": lambda: self._values_of_patches(module)[0],
                    "bias": lambda: self._values_of_patches(module)[1],
                }
            case LinearPart():
                return {"weight": partial(self._values_of_part, module)}
            case Linear():
                weight = self._source_by_rows(module, [f"{name}.weight" for name in module.names], module.num_outputs)
                biases = module.bias_names
                return {"weight": weight} | ({"bias": partial(self._values, module, biases)} if biases else {})
            case HeadNorm():
                names = {"queries": module.query_name, "keys": module.key_name}
                return {part: partial(self._values_of_norm, module, name) for part, name in names.items()}
            case Router():
                return self._sources_of_router(module)
            case Experts():
                return self._sources_of_experts(module)
            case LayerNorm():
                bias = partial(self._values, module, [f"{module.name}.bias"])
                return {
                    "weight": partial(self._values, module, [f"{module.name}.weight"]),
                    "bias": bias if module.has_bias else lambda: np.zeros(module.width, np.float32),
                }
            case TypedPositions():
                return {"weight": partial(self._values_of_positions, module)}
            case EmbeddingPart():
                columns = slice(module.first_column, module.first_column + module.width)
                return {"weight": self._source_by_rows(module, [f"{module.stored_name}.weight"], (module.num_rows,), columns)}
            case Embedding():
                return {"weight": self._source_by_rows(module, [f"{module.name}.weight"], (module.num_rows,))}
            case Norm():
                return {"weight": partial(self._values_of_norm, module, module.name)}
            case Factors():
                return {"rules": module.rules}
            case Limits() | Standardization():
                return {"rules": partial(self._rules, module)}
            case Convolution():
                parts = ("weight", "bias") if module.has_bias else ("weight",)
                stored = module.stored_names
                return {part: partial(self._values, module, [f"{name}.{part}" for name in stored]) for part in parts}
            case DeltaRule() | StateSpaces():
                named = zip(("A_log", "dt_bias", "D"), module.names, strict=False)
                return {part: partial(self._values, module, [name]) for part, name in named}
            case HeadLinear() | PositionTable() | Sinks() | Factor() | GatedNorm():
                return {"weight": partial(self._values, module, [f"{module.name}.weight"])}
            case _:
                raise AssertionError(f"{module} has no weights in a checkpoint")

    def _values_of_norm(self, module: Norm | HeadNorm, name: str) -> Values:
        if not (module.has_weight and name):
            return np.ones(module.width, np.float32)
        values = self._values(module, [f"{name}.weight"])
        is_added = module.offset != 0 and not self._stored.has_offset_norms
        return float32(values) + np.float32(module.offset) if is_added else values

    def _rules(self, module: Limits | Standardization) -> np.ndarray:
        read = self._stored.read_plain
        if isinstance(module, Standardization):
            return module.rules(*(float32(read(name)) for name in module.stored_names))
        return module.rules([(float(float32(read(low))), float(float32(read(high)))) for low, high in module.stored_names])

    def _values_of_positions(self, module: TypedPositions) -> np.ndarray:
        return module.added(*(float32(self._stored.read_plain(f"{name}.weight")) for name in (module.name, module.types_name)))

    def _values_of_patches(self, module: PatchLinear) -> tuple[np.ndarray, np.ndarray]:
        weight = float32(self._stored.read_plain(f"{module.names[0]}.weight"))
        bias = float32(self._stored.read_plain(f"{module.names[0]}.bias")) if module.has_stored_bias else None
        return module.folded(weight, bias)

    def _values_of_part(self, module: LinearPart) -> Values:
        weight = self._stored.read_plain(f"{module.names[0]}.weight")
        outputs = slice(module.first_output, module.first_output + module.width)
        return joined([weight[outputs, module.first_input : module.first_input + module.num_inputs]], module.format)

    def _sources_of_router(self, module: Router) -> Mapping[str, Source]:
        weight = partial(self._values, module, [module.weight_name or f"{module.linear.name}.weight"])
        correction = partial(self._values, module, [module.correction_name])
        sources: dict[str, Source] = {"weight": weight, "correction": correction}
        if module.linear.has_bias:
            sources["bias"] = partial(self._values, module, module.linear.bias_names)
        if module.set is not None:
            number = module.set
            sources = {"weight": lambda: float32(weight()).T, "correction": lambda: float32(correction())[number]}
        if not module.correction_name:
            del sources["correction"]
        if module.scales_name:
            sources["scales"] = partial(self._values, module, [module.scales_name])
        return sources

    def _sources_of_experts(self, module: Experts) -> Mapping[str, Source]:
        sources: dict[str, Source] = {}
        for part, linears in module.parts.items():
            for index, linear in enumerate(linears):
                sources[f"{part}.{index}"] = partial(self._values_of_expert, linear)
                if module.has_bias:
                    sources[f"{part}.{index}.bias"] = partial(self._values, module, linear.bias_names)
        return sources

    def _values_of_expert(self, linear: Linear) -> Values:
        """Read an expert; release the pages read for earlier ones."""
        self._stored.release()
        return self._values(linear, [f"{name}.weight" for name in linear.names])

    def _source_by_rows(
        self, module: Linear | Embedding, names: list[str], counts: Sequence[int], columns: slice | None = None
    ) -> Source:
        """Return a source that reads rows [begin, end) of tensors with `counts` rows each, if the checkpoint supports reading
        rows. `columns`: of a single tensor, the only ones to read."""
        has_rows = self._given is not None and all(self._given.has_rows(name, columns is None) for name in names)
        if not has_rows or self._keeps_integers(module, names):
            if columns is None:
                return partial(self._values, module, names)
            return lambda: joined([self._stored.read_columns(names[0], columns)], module.format)
        *starts, num_rows = accumulate(counts, initial=0)

        def read(begin: int, end: int) -> Values:
            shares = [(max(begin - start, 0), min(end - start, count)) for start, count in zip(starts, counts, strict=True)]
            rows = [self._stored.read_rows(name, *own) for name, own in zip(names, shares, strict=True) if own[0] < own[1]]
            return joined(rows if columns is None else [own[:, columns] for own in rows], module.format)

        return SourceByRows(read, num_rows, starts)

    def _values(self, module: Module, names: list[str]) -> Values:
        """Return tensors of a checkpoint, joined along the outputs."""
        format = module.format if isinstance(module, _MATRICES) else WeightFormat("float32")
        if self._keeps_integers(module, names):
            return side_by_side([self._stored.read_integers(name, format) for name in names], format)
        return joined([self._stored.read_plain(name) for name in names], format)

    def _keeps_integers(self, module: Module, names: list[str]) -> bool:
        """Return whether the module gets the integers that the checkpoint has."""
        is_integer = isinstance(module, _MATRICES) and module.format.kind in _INTEGERS
        return is_integer and all(isinstance(self._stored.kept(name), WeightFormat) for name in names)
