"""The weights of the native table: how each module's are laid out, and filled from a checkpoint's.

The loader calls `pack` (an op of the table) once for each module. What is kept goes through the store, so that a weight cache
holds it in the layout that the kernels read; a source is read only where the store has to be filled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from engine.errors import CheckpointError
from ops import _cpu
from ops.cpu.array import Array, array_of
from ops.modules import Embedding, HeadNorm, Linear, Module, Norm, Rotary
from ops.weights import Source, Store, float32

_FLOAT = np.dtype(np.float32)


def pack(module: Module, sources: Mapping[str, Source], store: Store) -> None:
    if isinstance(module, (HeadNorm, Rotary)):
        _check_head_dim(module.width if isinstance(module, HeadNorm) else module.head_dim)
    match module:
        case Linear():
            _pack_linear(module, sources, store)
        case Embedding():
            module.weight = _kept(module.name, sources["weight"], (module.num_rows, module.width), store)
        case Norm():
            module.weight = _kept(module.name, sources["weight"], (module.width,), store)
        case HeadNorm():
            shape = (module.width,)
            module.weight = (
                _kept(module.query_name, sources["queries"], shape, store),
                _kept(module.key_name, sources["keys"], shape, store),
            )
        case Rotary():
            module.cosines, module.sines = (array_of(_float32(sources[name])) for name in ("cosines", "sines"))
            module.partners = array_of(np.ascontiguousarray(sources["partners"](), np.int32))


def layout() -> str:
    """The variant, and what this file and the native module were when they were built: a file of packed weights that another
    build wrote is not read, whatever it changed."""
    native = Path(_cpu.__file__).stat()
    digest = hashlib.sha256(Path(__file__).read_bytes() + f"{native.st_size} {native.st_mtime_ns}".encode())
    return f"{_cpu.variant()} {digest.hexdigest()[:16]}"


def _check_head_dim(width: int) -> None:
    if width > _cpu.MAX_HEAD_DIM:
        raise CheckpointError(f"heads have {width} elements, the native ops take {_cpu.MAX_HEAD_DIM}: use --ops reference")


def _float32(source: Source) -> np.ndarray:
    return np.ascontiguousarray(float32(source()))


def _kept(name: str, source: Source, shape: tuple[int, ...], store: Store) -> Array:
    """The values as float32."""

    def fill(kept: np.ndarray) -> None:
        kept[...] = float32(source())

    return array_of(store.keep(name, shape, _FLOAT, fill))


def _pack_linear(module: Linear, sources: Mapping[str, Source], store: Store) -> None:
    """[out, in] -> [ceil(out / PANEL), in, PANEL], the outputs padded with zeros."""
    num_outputs, num_inputs = module.width, module.num_inputs
    num_panels = -(-num_outputs // _cpu.PANEL)

    def fill_weight(packed: np.ndarray) -> None:
        weight = float32(sources["weight"]())
        output_stride, input_stride = (stride // 4 for stride in weight.strides)
        _cpu.pack(packed.ctypes.data, weight.ctypes.data, output_stride, input_stride, num_inputs, num_outputs)

    def fill_bias(kept: np.ndarray) -> None:
        kept[:num_outputs] = float32(sources["bias"]())
        kept[num_outputs:] = 0

    module.weight = array_of(store.keep(f"{module.name}.weight", (num_panels * num_inputs * _cpu.PANEL,), _FLOAT, fill_weight))
    module.bias = None
    if module.has_bias:
        module.bias = array_of(store.keep(f"{module.name}.bias", (num_panels * _cpu.PANEL,), _FLOAT, fill_bias))
