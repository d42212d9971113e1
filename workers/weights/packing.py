"""Weights in the kernels' layout: packed into memory, or into a file of the weight cache that later loads map.

Used by `loader.py`, one per load.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal

import msgspec

from ops.modules import (
    ColumnRules,
    Convolution,
    DeltaRule,
    Embedding,
    Experts,
    Factor,
    GatedNorm,
    HeadLinear,
    HeadNorm,
    LayerNorm,
    Linear,
    Module,
    Norm,
    PositionTable,
    Router,
    Sinks,
    StateSpaces,
)
from ops.table import OpTable
from ops.weight_format import FLOAT32, Memory, Source, Store, WeightFormat
from workers.weights.cache import WeightCache
from workers.weights.declaration import Weights
from workers.weights.packed_file import DamagedFileError, Layout, PackedFile
from workers.weights.precision import Precision, choose_formats
from workers.weights.reader import digest_of
from workers.weights.sources import ModuleSources, Stored
from workers.weights.stored import StoredWeights

_LOG = logging.getLogger(__name__)
_BITS = {"int8": 8, "int4": 4, "float4": 4}

Progress = Callable[[int, int], None]  # bytes done, bytes in all
CacheOutcome = Literal["held", "hit", "miss", "damaged", "off"]  # held: the device still has them


class WeightPacking:
    """One load: fills every module of `weights` with values of `stored`, or from the cache.

    `source`: the path and architecture that `tokamak models` shows. `calibrate`: sets importances of linears before weights
    are rounded. A description identifies a packed file.
    """

    def __init__(
        self,
        source: dict[str, str],
        weights: Weights,
        stored: Stored | None,
        ops: OpTable,
        precision: Precision,
        on_progress: Progress,
        calibrate: Callable[[], None] = lambda: None,
    ) -> None:
        self.stored = stored
        self._calibrate = calibrate
        self._source = source
        self._weights = weights
        self._ops = ops
        self._precision = precision
        self._on_progress = on_progress
        self._modules: list[Module] = [*weights.norms, *weights.head_norms, *weights.linears, *weights.embeddings]
        self._modules += [*weights.typed_positions, *weights.sinks, *weights.factors, *weights.routers, *weights.mixtures]
        self._modules += weights.head_linears
        self._modules += weights.column_rules
        self._modules += [*weights.exact_linears, *weights.convolutions, *weights.delta_rules, *weights.gated_norms]
        self._modules += weights.state_spaces
        self._modules += [*weights.patch_linears, *weights.position_tables, *weights.layer_norms, *weights.encoder_linears]
        # linears grouped by common format
        self._matrices: list[Sequence[Linear | HeadLinear | Embedding]] = [*weights.formatted()]
        self._matrices += [*([each] for each in weights.embeddings), *([each] for each in weights.head_linears)]
        self._stored = None if ops.stored is None else StoredWeights(ops.stored)
        self._num_done = 0
        self.num_bytes = 0
        self.packed: PackedFile | None = None

    def pack_into_memory(self) -> None:
        self._choose_formats()
        self._pack(Memory(), self._sizes(Layout()))

    def pack_with(self, cache: WeightCache | None, description: dict[str, Any]) -> CacheOutcome:
        """Map the cache's file of this description, or write it first."""
        if cache is None:
            self.pack_into_memory()
            return "off"
        outcome = self.map_from(cache, description)
        if outcome in ("held", "hit"):
            return outcome
        self._choose_formats()
        file = self._write(cache, description)
        if file is None and cache.is_shared and self.map_from(cache, description) == "hit":
            return outcome  # another rank wrote it
        self._pack(file or Memory(), self._sizes(Layout()))
        self.packed = file if self._stored is None else None
        if self.packed is not None and not cache.is_shared:
            self.packed.map_all()  # only now, without a writable mapping, so that pages count once
        return outcome

    def map_from(self, cache: WeightCache, description: dict[str, Any]) -> CacheOutcome:
        """Map the cache's file of this description if it exists and is complete: its name gives the expected contents, its
        header the actual ones. A device may still have the weights of an earlier life of this rank."""
        name = self._name_of(description)
        if self._stored is not None and (manifest := self._stored.find(digest_of(description), self._modules)) is not None:
            self._set_formats(manifest["formats"])
            self._sizes(Layout())
            return "held"
        try:
            file = cache.open(name)
            if file is None:
                return "miss"
            if digest_of(file.description.get("of")) != digest_of(description):
                raise DamagedFileError("its contents do not match its name")
            self._set_formats(file.description["formats"])
            self._pack(file, self._sizes(Layout()))
            self.packed = file if self._stored is None else None  # a device has its own copy
            return "hit"
        except DamagedFileError as error:
            _LOG.warning("packed weights %s in %s cannot be used: %s", name, cache.directory, error)
            return "damaged"

    def _write(self, cache: WeightCache, description: dict[str, Any]) -> PackedFile | None:
        """Write the file; None if it cannot be stored, even if that shows only midway (a quota, a network)."""
        name, layout = self._name_of(description), Layout()
        sizes = self._sizes(layout)
        try:
            written = {"of": description, "formats": self._formats(), "source": self._source}
            with cache.writer(name, layout, written, self._say_alive) as writer:
                if writer is None:
                    return None
                self._pack(writer, sizes, is_kept=False)
        except OSError as error:
            _LOG.warning("packed weights %s cannot be stored in %s: %s", name, cache.directory, error)
            return None
        return cache.written(name)

    def _name_of(self, description: dict[str, Any]) -> str:
        return f"{Path(self._source['path']).name}-{digest_of(description)}"

    def _say_alive(self) -> None:
        self._on_progress(self._num_done, self.num_bytes)

    # ------------------------------------------------------------------------------------------------------ formats

    def _choose_formats(self) -> None:
        kinds = self._ops.integer_kinds
        if not kinds:
            return  # the table converts everything to float32
        assert self.stored is not None, "formats depend on the stored ones"
        self._calibrate()
        summary = choose_formats(self._weights, self._precision, self.stored.kept)
        if self._ops.layout is None:  # and everything except these integers
            for module in (each for matrices in self._matrices for each in matrices):
                module.format = module.format if module.format.kind in kinds else FLOAT32
        if summary:
            _LOG.info("quantized weights: %s", summary)

    def _formats(self) -> list[tuple[Any, ...]]:
        """Return every matrix's format, so that another load of the same file need not choose them."""
        return [msgspec.structs.astuple(matrices[0].format) for matrices in self._matrices]

    def _set_formats(self, formats: list[tuple[Any, ...]]) -> None:
        for matrices, format in zip(self._matrices, formats, strict=True):
            for module in matrices:
                module.format = WeightFormat(*format)

    # ------------------------------------------------------------------------------------------------------ packing

    def _sizes(self, layout: Layout) -> list[int]:
        """Return the packed bytes of each module, and plan them in `layout`."""
        if self._ops.layout is None:
            float_bits = 32 if self._ops.stored is None else self._ops.stored.float_bits
            sizes = [_num_bytes(module, float_bits) for module in self._modules]
            self.num_bytes = layout.num_bytes = sum(sizes)
            return sizes
        ends = []
        for module in self._modules:
            self._ops.pack(module, self._sources(module), layout)
            ends.append(layout.num_bytes)
        self.num_bytes = layout.num_bytes
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    def _sources(self, module: Module) -> Mapping[str, Source]:
        return ModuleSources(self.stored).of(module)

    def _pack(self, store: Store, sizes: list[int], is_kept: bool = True) -> None:
        """Pack all modules into `store`. `is_kept`: the modules get the arrays of `store`."""
        through = None if self._stored is None else self._stored.through(store)
        for module, size in zip(self._modules, sizes, strict=True):
            if through is None:
                self._ops.pack(module if is_kept else copy(module), self._sources(module), store)
            else:
                through.pass_on(module, self._sources(module))
            if self.stored is not None:
                self.stored.release()
            self._num_done = min(self._num_done + size, self.num_bytes)  # a written file is then mapped
            self._on_progress(self._num_done, self.num_bytes)
        if through is not None:
            through.finish()
        if self.stored is not None:
            self.stored.check_unchanged()


def _num_bytes(module: Module, float_bits: int) -> int:
    """Return about the bytes of a module in tables without a packed layout: floats of so many bits, and integers of linears."""
    match module:
        case Linear():
            return module.width * (module.num_inputs * _BITS.get(module.format.kind, float_bits) // 8 + 4 * module.has_bias)
        case HeadLinear():
            return float_bits // 8 * module.num_heads * module.num_inputs * module.num_outputs
        case Embedding():
            return float_bits // 8 * module.num_rows * module.width
        case HeadNorm() | LayerNorm():
            return 8 * module.width
        case Router():
            return _num_bytes(module.linear, 32) + 4 * math.prod(module.correction_shape or (0,))
        case Experts():
            return sum(_num_bytes(linear, float_bits) for linears in module.parts.values() for linear in linears)
        case Norm():
            return 4 * module.width
        case Sinks():
            return 4 * module.num_heads
        case Factor():
            return 4
        case PositionTable():
            return 4 * math.prod(module.shape)
        case ColumnRules():
            return 16 * module.width
        case Convolution():
            return 4 * module.channels * (module.kernel + module.has_bias)
        case DeltaRule():
            return 4 * module.num_value_heads * (1 + module.num_decays)
        case StateSpaces():
            return 12 * module.num_heads
        case GatedNorm():
            return 4 * module.weight_width
        case _:
            raise AssertionError(f"{module} has no weights in a checkpoint")
