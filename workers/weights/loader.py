"""From a checkpoint directory to a model with its weights, or an error that names everything that is wrong with it.

Called by the runner at start and at each reload. Weights are packed for the op table once and kept in the weight cache
(`cache.py`), from which later loads map them: those read no more of the checkpoint than its headers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError, ContentsError
from ops.modules import (
    Embedding,
    Experts,
    HeadLinear,
    HeadNorm,
    LayerNorm,
    Linear,
    LinearPart,
    Module,
    Norm,
    PatchLinear,
    PositionTable,
    Router,
    TypedPositions,
)
from ops.table import OpTable
from ops.weight_format import FLOAT32, Memory, QuantizedWeight, Source, SourceByRows, Store, Values, WeightFormat, float32
from workers.models import Model, declare_model
from workers.rank_group.share import TensorShare
from workers.weights.cache import WeightCache
from workers.weights.checksums import Checksums
from workers.weights.declaration import Weights
from workers.weights.formats.floats import joined
from workers.weights.formats.integers import side_by_side
from workers.weights.formats.tensor import Kept
from workers.weights.packed_file import DamagedFileError, Layout, PackedFile
from workers.weights.precision import Precision, choose_formats
from workers.weights.random import RandomWeights
from workers.weights.reader import Checkpoint, digest_of
from workers.weights.rotary import rotary_tables

_LOG = logging.getLogger(__name__)
_INTEGERS = ("int8", "int4")
_MATRICES = (Linear, HeadLinear, Embedding)

Progress = Callable[[int, int], None]  # bytes done, bytes in all
CacheOutcome = Literal["hit", "miss", "damaged", "off"]

_BITS = {"int8": 8, "int4": 4}


class Stored(Protocol):
    """Where values come from: a checkpoint or chance. Names are those of Hugging Face."""

    def read_plain(self, name: str) -> np.ndarray: ...
    def has_rows(self, name: str) -> bool: ...
    def read_rows(self, name: str, begin: int, end: int) -> np.ndarray: ...
    def kept(self, name: str) -> Kept: ...
    def read_integers(self, name: str, format: WeightFormat) -> QuantizedWeight: ...
    def release(self) -> None: ...
    def check_unchanged(self) -> None: ...


class LoadedModel(msgspec.Struct, frozen=True):
    """`num_bytes`: of its weights as they are kept; `contents`: what tells their values from any others."""

    model: Model
    mixtures: list[Experts]  # of its sparse layers, in their order; of several sets the first
    num_bytes: int
    cache: CacheOutcome
    contents: str
    linears: list[Linear]  # but those of encoders and experts
    packed: PackedFile | None  # that the weights are mapped from


def load_model(
    path: Path,
    config: ModelConfig,
    ops: OpTable,
    num_positions: int,
    on_progress: Progress,
    *,
    precision: Precision = Precision(),  # noqa: B008 - a frozen value
    random_seed: int | None = None,
    cache: WeightCache | None = None,
    contents: str = "",
    share: TensorShare = TensorShare(),  # noqa: B008 - a frozen value
    has_encoder: bool = True,
    has_drafts: bool = False,
    node: int = 0,
) -> LoadedModel:
    """The model of the run, whose shape is `config`, with the weights of the checkpoint at `path`, which must have that shape.
    With `random_seed`, nothing but the config is used and the weights are random; where the cache has the `contents` that are
    asked for, nothing of `path` is read either. Raises CheckpointError; ContentsError where the checkpoint was written over, so
    that these contents are neither there nor in the cache. Without `has_encoder` a model that sees is loaded as one of text;
    `has_drafts`: with its layers that guess further tokens. `node`: of the memory that this rank's weights lie in; each but the
    first has a file of its own in the cache."""
    largest = max(config.head_dim, config.latents.latent_dim if config.latents else 0)
    if ops.max_head_dim is not None and largest > ops.max_head_dim:
        raise CheckpointError(
            f"{path}: {'latents' if config.latents else 'heads'} have {largest} elements, the {ops.name} ops take "
            f"{ops.max_head_dim} at most; use --ops reference"
        )
    model, weights = declare_model(config, share, has_encoder=has_encoder, has_drafts=has_drafts)
    outcome: CacheOutcome = "off"
    found = ""
    directory = cache if ops.layout is not None else None
    layout = ops.layout and digest_of(ops.layout())
    description = {"model": _shape(config, weights), "layout": layout} | msgspec.structs.asdict(precision)
    source = {"path": str(path), "architecture": config.architecture}

    if node:
        description["node"] = node

    def of(contents: str) -> dict[str, Any]:
        return {"contents": contents} | description

    if random_seed is not None:
        found = f"random {random_seed}"
        is_narrow = precision != Precision() and ops.layout is not None
        loading = _Loading(source, weights, RandomWeights(weights, random_seed, is_narrow), ops, precision, on_progress)
        if directory is not None and directory.is_shared:
            loading.pack_with(directory, of(found))
        else:
            loading.pack_into_memory()
    else:
        loading = _Loading(source, weights, None, ops, precision, on_progress)
        if contents and directory and loading.map_from(directory, of(contents)) == "hit":
            outcome, found = "hit", contents
        else:
            loading.stored = checkpoint = Checkpoint(path, config, weights)
            found = checkpoint.contents(Checksums(cache.directory if cache else None), on_progress)
            if contents not in ("", found):
                raise ContentsError(
                    f"{path} was written over: it holds other weights than those in use, whose packed file is gone as well; "
                    "reload it to take what it holds now"
                )
            try:
                outcome = loading.pack_with(directory, of(found))
            except Exception:
                checkpoint.check_unchanged()  # zeros in place of what was cut off are no cause
                raise
    for rope, rotary in weights.rotaries:
        tables = rotary_tables(rope, rotary.head_dim, 0 if rotary.is_by_row else num_positions)
        named = zip(("cosines", "sines", "partners"), tables, strict=True)
        ops.pack(rotary, {name: partial(np.asarray, values) for name, values in named}, Memory())
    mixtures = [mixture for mixture in weights.mixtures if not mixture.is_local]
    return LoadedModel(model, mixtures, loading.num_bytes, outcome, found, weights.linears, loading.packed)


class _Loading:
    """One load: every module of `weights` with values of `stored`, or with those that the cache kept of it. `source`: the path
    and architecture that `tokamak models` shows. A description tells what is kept from all else that could be."""

    def __init__(
        self,
        source: dict[str, str],
        weights: Weights,
        stored: Stored | None,
        ops: OpTable,
        precision: Precision,
        on_progress: Progress,
    ) -> None:
        self.stored = stored
        self._source = source
        self._weights = weights
        self._ops = ops
        self._precision = precision
        self._on_progress = on_progress
        self._modules: list[Module] = [*weights.norms, *weights.head_norms, *weights.linears, *weights.embeddings]
        self._modules += [*weights.typed_positions, *weights.routers, *weights.mixtures, *weights.head_linears]
        self._modules += [*weights.patch_linears, *weights.position_tables, *weights.layer_norms, *weights.encoder_linears]
        # those of one format each
        self._matrices: list[Sequence[Linear | HeadLinear | Embedding]] = [*weights.formatted()]
        self._matrices += [*([each] for each in weights.embeddings), *([each] for each in weights.head_linears)]
        self._num_done = 0
        self.num_bytes = 0
        self.packed: PackedFile | None = None

    @property
    def _stored(self) -> Stored:
        """Where there is something to read."""
        assert self.stored is not None, "weights that are mapped are not read"
        return self.stored

    def pack_into_memory(self) -> None:
        self._choose_formats()
        self._pack(Memory(), self._sizes(Layout()))

    def pack_with(self, cache: WeightCache | None, description: dict[str, Any]) -> CacheOutcome:
        """Map the cache's file of that description; where there is none, make it."""
        if cache is None:
            self.pack_into_memory()
            return "off"
        outcome = self.map_from(cache, description)
        if outcome == "hit":
            return outcome
        self._choose_formats()
        file = self._write(cache, description)
        if file is None and cache.is_shared and self.map_from(cache, description) == "hit":
            return outcome  # another rank wrote it
        self._pack(file or Memory(), self._sizes(Layout()))
        self.packed = file
        if file is not None and not cache.is_shared:
            file.map_all()  # only now that nothing maps it for writing: it should not count twice
        return outcome

    def map_from(self, cache: WeightCache, description: dict[str, Any]) -> CacheOutcome:
        """Map the cache's file of that description, if it can be. Its name says what it should be, it says what it is."""
        name = self._name_of(description)
        try:
            file = cache.open(name)
            if file is None:
                return "miss"
            if digest_of(file.description.get("of")) != digest_of(description):
                raise DamagedFileError("it holds other weights than its name says")
            self._set_formats(file.description["formats"])
            self._pack(file, self._sizes(Layout()))
            self.packed = file
            return "hit"
        except DamagedFileError as error:
            _LOG.warning("packed weights %s in %s cannot be used: %s", name, cache.directory, error)
            return "damaged"

    def _write(self, cache: WeightCache, description: dict[str, Any]) -> PackedFile | None:
        """The file, made; None where nothing can be kept, also when that shows in the middle (a quota, a network)."""
        name, layout = self._name_of(description), Layout()
        sizes = self._sizes(layout)
        try:
            written = {"of": description, "formats": self._formats(), "source": self._source}
            with cache.writer(name, layout, written, self._say_alive) as writer:
                if writer is None:
                    return None
                self._pack(writer, sizes, is_kept=False)
        except OSError as error:
            _LOG.warning("packed weights %s are not kept in %s: %s", name, cache.directory, error)
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
            return  # the table makes everything float32
        summary = choose_formats(self._weights, self._precision, self._stored.kept)
        if self._ops.layout is None:  # and everything but these integers
            for module in (each for matrices in self._matrices for each in matrices):
                module.format = module.format if module.format.kind in kinds else FLOAT32
        if summary:
            _LOG.info("quantized weights: %s", summary)

    def _formats(self) -> list[tuple[Any, ...]]:
        """Of every matrix; another load of the same file need not look for them."""
        return [msgspec.structs.astuple(matrices[0].format) for matrices in self._matrices]

    def _set_formats(self, formats: list[tuple[Any, ...]]) -> None:
        for matrices, format in zip(self._matrices, formats, strict=True):
            for module in matrices:
                module.format = WeightFormat(*format)

    # ------------------------------------------------------------------------------------------------------ packing

    def _sizes(self, layout: Layout) -> list[int]:
        """Bytes of each module as it will be kept; `layout` has them afterwards."""
        if self._ops.layout is None:
            sizes = [_num_bytes(module) for module in self._modules]
            self.num_bytes = sum(sizes)
            return sizes
        ends = []
        for module in self._modules:
            self._ops.pack(module, self._sources(module), layout)
            ends.append(layout.num_bytes)
        self.num_bytes = layout.num_bytes
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    def _pack(self, store: Store, sizes: list[int], is_kept: bool = True) -> None:
        """`is_kept`: whether the modules get the arrays that `store` gives for them."""
        for module, size in zip(self._modules, sizes, strict=True):
            self._ops.pack(module if is_kept else copy(module), self._sources(module), store)
            if self.stored is not None:
                self.stored.release()
            self._num_done = min(self._num_done + size, self.num_bytes)  # what was packed into a file is then mapped
            self._on_progress(self._num_done, self.num_bytes)
        if self.stored is not None:
            self.stored.check_unchanged()

    def _sources(self, module: Module) -> Mapping[str, Source]:
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
                return {part: partial(self._values, module, [f"{name}.weight"]) for part, name in names.items()}
            case Router():
                return self._sources_of_router(module)
            case Experts():
                return {
                    f"{part}.{index}": partial(self._values_of_expert, linear)
                    for part, linears in module.parts.items()
                    for index, linear in enumerate(linears)
                }
            case LayerNorm():
                return {part: partial(self._values, module, [f"{module.name}.{part}"]) for part in ("weight", "bias")}
            case TypedPositions():
                return {"weight": partial(self._values_of_positions, module)}
            case Embedding():
                return {"weight": self._source_by_rows(module, [f"{module.name}.weight"], (module.num_rows,))}
            case HeadLinear() | Norm() | PositionTable():
                return {"weight": partial(self._values, module, [f"{module.name}.weight"])}
            case _:
                raise AssertionError(f"{module} has no weights in a checkpoint")

    def _values_of_positions(self, module: TypedPositions) -> np.ndarray:
        return module.added(*(float32(self._stored.read_plain(f"{name}.weight")) for name in (module.name, module.types_name)))

    def _values_of_patches(self, module: PatchLinear) -> tuple[np.ndarray, np.ndarray]:
        weight = float32(self._stored.read_plain(f"{module.names[0]}.weight"))
        bias = float32(self._stored.read_plain(f"{module.names[0]}.bias")) if module.has_stored_bias else None
        return module.folded(weight, bias)

    def _values_of_part(self, module: LinearPart) -> Values:
        weight = self._stored.read_plain(f"{module.names[0]}.weight")
        return joined([weight[:, module.first_input : module.first_input + module.num_inputs]], module.format)

    def _sources_of_router(self, module: Router) -> Mapping[str, Source]:
        weight = partial(self._values, module, [module.weight_name or f"{module.linear.name}.weight"])
        correction = partial(self._values, module, [module.correction_name])
        sources: dict[str, Source] = {"weight": weight, "correction": correction}
        if module.set is not None:
            number = module.set
            sources = {"weight": lambda: float32(weight()).T, "correction": lambda: float32(correction())[number]}
        return sources if module.correction_name else {"weight": sources["weight"]}

    def _values_of_expert(self, linear: Linear) -> Values:
        """What was read of those before is not needed any more."""
        self._stored.release()
        return self._values(linear, [f"{name}.weight" for name in linear.names])

    def _source_by_rows(self, module: Linear | Embedding, names: list[str], counts: Sequence[int]) -> Source:
        """Of tensors with so many rows each, where the checkpoint has them by rows."""
        if self.stored is None or not all(map(self.stored.has_rows, names)):
            return partial(self._values, module, names)
        *starts, num_rows = accumulate(counts, initial=0)

        def read(begin: int, end: int) -> Values:
            shares = [(max(begin - start, 0), min(end - start, count)) for start, count in zip(starts, counts, strict=True)]
            rows = [self._stored.read_rows(name, *own) for name, own in zip(names, shares, strict=True) if own[0] < own[1]]
            return joined(rows, module.format)

        return SourceByRows(read, num_rows, starts)

    def _values(self, module: Module, names: list[str]) -> Values:
        """The tensors of a checkpoint, one after another along the outputs."""
        format = module.format if isinstance(module, _MATRICES) else WeightFormat("float32")
        if format.kind in _INTEGERS and all(isinstance(self._stored.kept(name), WeightFormat) for name in names):
            return side_by_side([self._stored.read_integers(name, format) for name in names], format)
        return joined([self._stored.read_plain(name) for name in names], format)


def _shape(config: ModelConfig, weights: Weights) -> str:
    """What the packed bytes depend on besides the contents of a checkpoint: which tensors are asked of it, and into which heads
    and modules they are cut: one tensor may be two of these, such as an embedding that is the head as well, or is none where
    vectors are asked for. Nothing that is computed with them: what has the same weights has the same file."""
    heads = (config.num_attention_heads, config.num_kv_heads)
    vision = config.vision if weights.patch_linears else None
    pixels = [msgspec.structs.astuple(vision.pixels)] if vision else []  # folded into weights
    linears = [list(linear.names) for linear in weights.linears]
    return digest_of([config.architecture, heads, config.tie_word_embeddings, weights.shapes(), linears, *pixels])


def _num_bytes(module: Module) -> int:
    """As tables without a packed layout keep it: float32 but for integers of linears."""
    match module:
        case Linear():
            return module.width * (module.num_inputs * _BITS.get(module.format.kind, 32) // 8 + 4 * module.has_bias)
        case HeadLinear():
            return 4 * module.num_heads * module.num_inputs * module.num_outputs
        case Embedding():
            return 4 * module.num_rows * module.width
        case HeadNorm() | LayerNorm():
            return 8 * module.width
        case Router():
            return _num_bytes(module.linear) + 4 * math.prod(module.correction_shape or (0,))
        case Experts():
            return sum(_num_bytes(linear) for linears in module.parts.values() for linear in linears)
        case Norm():
            return 4 * module.width
        case PositionTable():
            return 4 * module.side * module.side * module.width
        case _:
            raise AssertionError(f"{module} has no weights in a checkpoint")
