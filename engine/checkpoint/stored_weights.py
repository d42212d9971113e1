"""How much a checkpoint's files hold, by their headers: from it the launcher estimates the memory of loaded weights.

Pure, except for the headers of the files. A file that cannot be read counts as nothing; the loader reports the error.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from engine.checkpoint.files import open_file
from engine.checkpoint.gguf.parts import GgufModel
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weight_files import weight_files
from engine.errors import CheckpointError

_FLOATS = ("F64", "F32", "F16", "BF16", "U16")  # U16: bfloat16 in Paddle's files
_VALUES_IN = {"I32": 8, "U8": 2}  # packed 4-bit values, at most
_FLOAT_BYTES = {"float32": 4.0, "bfloat16": 2.0}
_LONGEST_HEADER = 100 << 20  # bytes
_SMALL_BYTES = 4  # of a value of norms and biases
_ROUNDED_BYTES = {"wint4": 0.625, "wint8": 1.01}  # wint8 has one scale per output
_BYTES_OF_4_BIT_BLOCKS = 1.0625  # of bitsandbytes, per value as kernels hold it: 8 bits, a float32 scale for each 64
GGUF_BYTES = {  # per value as kernels hold it: 4 or 8 bits, with a scale (and offset) of 16 or 32 bits for each group
    **{"Q4_0": 0.5625, "MXFP4": 0.5625, "TQ1_0": 0.515625, "TQ2_0": 0.515625, "Q4_1": 0.625, "Q3_K": 0.75, "Q2_K": 1.0},
    **dict.fromkeys(("Q4_K", "IQ1_S", "IQ3_S"), 0.75),
    **dict.fromkeys(("Q8_0", "Q5_0", "IQ4_NL"), 1.0625),
    **dict.fromkeys(("IQ4_XS", "IQ2_XXS", "IQ3_XXS", "Q5_1"), 1.125),
    **dict.fromkeys(("Q5_K", "Q6_K", "IQ1_M", "IQ2_XS", "IQ2_S"), 1.25),
}


_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Entry(msgspec.Struct, frozen=True):
    """Entry of a tensor in the header of a .safetensors file."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class StoredWeights(msgspec.Struct, frozen=True):
    """Sums over all tensors of the files."""

    num_values: int = 0
    num_in_matrices: int = 0  # floats with at least two dimensions
    num_others: int = 0  # floats of norms and biases
    integer_bytes: int = 0  # as the kernels hold them

    @staticmethod
    def read(path: Path) -> StoredWeights:
        """Read the headers of the checkpoint directory `path`, once for all calls with the same files."""
        try:
            status = [(file.name, file.stat() if file.exists() else file.lstat()) for file in sorted(path.iterdir())]
        except OSError:
            status = []
        return _read(path, tuple((name, each.st_size, each.st_mtime_ns, each.st_ino) for name, each in status))

    @staticmethod
    def of_config(model: ModelConfig) -> StoredWeights:
        """Return an estimate for a checkpoint without files (random weights)."""
        width, shapes = model.hidden_size, [model.layer_shape(index) for index in range(model.num_layers)]
        attention = sum(width * each.head_dim * 2 * (model.num_attention_heads + each.num_kv_heads) for each in shapes)
        dense = 3 * width * model.intermediate_size
        embeddings = model.vocab_size * width * (1 if model.tie_word_embeddings else 2)
        per_layer = model.num_layers * model.layer_inputs_dim * (model.vocab_size + 3 * width)
        total = attention + sum(3 * width * each.intermediate_size for each in shapes) + embeddings + per_layer
        if model.experts is not None:
            experts = model.experts
            sparse = 3 * width * (experts.num_experts * experts.intermediate_size + experts.shared_intermediate_size)
            beside = dense if model.layer_shapes else 0  # an MLP beside the experts
            total += len(experts.sparse_layers) * (sparse - dense + beside)
        return StoredWeights(total, total)

    def num_bytes(self, model: ModelConfig, dtype: str, quantization: str) -> int:
        """Return the bytes of the loaded weights. Embeddings are floats of `dtype`, unless they are the head's as well."""
        rounded = _ROUNDED_BYTES.get(quantization, _FLOAT_BYTES[dtype])
        embedding = min(model.vocab_size * model.hidden_size, self.num_in_matrices)
        head_bytes = _FLOAT_BYTES[dtype] if quantization == "none" else _ROUNDED_BYTES["wint8"]
        of_embedding = head_bytes if model.tie_word_embeddings else _FLOAT_BYTES[dtype]
        others = rounded * (self.num_in_matrices - embedding) + of_embedding * embedding
        return math.ceil(others + _SMALL_BYTES * self.num_others) + self.integer_bytes


@functools.lru_cache(maxsize=1)
def _read(path: Path, files: tuple[tuple[str, int, int, int], ...]) -> StoredWeights:
    """Return the sums of the files in `path`, while they are these."""
    gguf = GgufModel.of_checkpoint(path)
    tensors = _gguf_tensors(gguf) if gguf is not None else _tensors(path)
    values = matrices = others = integers = 0
    for num_values, is_matrix, num_bytes in tensors:
        values += num_values
        if num_bytes:
            integers += num_bytes
        elif is_matrix:
            matrices += num_values
        else:
            others += num_values
    return StoredWeights(values, matrices, others, integers)


def _tensors(path: Path) -> Iterator[tuple[int, bool, int]]:
    """Yield of each tensor its values, whether it is a matrix, and its bytes if it is stored as integers, else 0."""
    try:
        files = weight_files(path)
    except CheckpointError:
        files = []
    for file in files:
        header = _header(file)
        for name, (dtype, shape, begin, end) in header.items():
            if dtype in ("U8", "F8_E4M3", "F8_E8M0") and name.endswith(("_scales", "_scale")):
                yield 0, False, (4 if dtype == "F8_E4M3" else 2) * (end - begin)  # of NVFP4; of MXFP4
                continue
            if f"{name}.absmax" in header:  # bitsandbytes: 4 bits, held in 8
                yield 2 * (end - begin), True, math.ceil(2 * _BYTES_OF_4_BIT_BLOCKS * (end - begin))
                continue
            if name.endswith(".W_q"):
                yield _hqq_weight(shape, header.get(f"{name.removesuffix('W_q')}scale"), end - begin)
                continue
            if dtype == "F8_E4M3":  # held as floats
                yield math.prod(shape), True, 0
                continue
            num_values = math.prod(shape) * _VALUES_IN.get(dtype, 1)
            yield num_values, len(shape) > 1, 0 if dtype in _FLOATS else end - begin


def _hqq_weight(
    shape: tuple[int, ...], scales: tuple[str, tuple[int, ...], int, int] | None, size: int
) -> tuple[int, bool, int]:
    """Return what `_tensors` yields of HQQ's values, by the number of groups, which are rows (axis 1) or columns."""
    groups = scales[1] if scales else ()
    if len(groups) == 2 and groups[1] == 1 and len(shape) == 2:
        num_values = groups[0] * shape[1]
        return num_values, True, num_values if size >= num_values else num_values // 2
    return 2 * size, True, 0


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Return type, shape and place of the tensors; none if the file cannot be read."""
    try:
        with open(open_file(file), "rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            entries = msgspec.json.decode(opened.read(min(length, _LONGEST_HEADER)), type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        found = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in entries.items()}
    except (OSError, struct.error, ValueError, RecursionError):
        return {}
    return {name: (entry.dtype, entry.shape, *entry.data_offsets) for name, entry in found.items()}


def _gguf_tensors(file: GgufModel) -> Iterator[tuple[int, bool, int]]:
    for tensor in file.tensors.values():
        num_values = math.prod(tensor.shape)
        held = 0 if tensor.type_name in _FLOATS else math.ceil(GGUF_BYTES[tensor.type_name] * num_values)
        yield num_values, len(tensor.shape) > 1, held
