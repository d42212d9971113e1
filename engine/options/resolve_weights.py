"""Options about weights: data type, quantization, and the directory of packed weights.

Called by `engine/options/resolve.py`. `workers/weights/precision.py` applies them to each module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint.files import read_file, user_cache
from engine.checkpoint.gguf.parts import GgufModel
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError, OptionError
from engine.options.resolve_memory import QUANTIZATIONS
from engine.options.table import OptionValues
from shm.blake2 import blake2b

_BFLOAT16_FLAG = "avx512_bf16"  # Linux's name of the flag
_BFLOAT16_KERNELS = ("avx512bf16", "amx")  # variants with products of bfloat16
_GROUP_SIZES = (32, 64, 128)
_PLAIN_TYPES = ("F32", "F16", "BF16")


def resolve_dtype(asked: str, ops: str, processor_flags: frozenset[str], kernels: str = "auto") -> str:
    """Return the type for `asked`. Engines with `kernels` pinned to one variant use the same type, whatever their processors
    support."""
    if ops == "cuda":
        return "bfloat16" if asked == "auto" else asked
    if ops != "native":
        if asked == "bfloat16":
            raise OptionError(
                f"--dtype bfloat16 needs native ops (--ops cuda on GPUs), but the ops are {ops}; use --dtype float32"
            )
        return "float32"
    if asked == "auto":
        has_products = _BFLOAT16_FLAG in processor_flags if kernels == "auto" else kernels in _BFLOAT16_KERNELS
        return "bfloat16" if has_products else "float32"
    return asked


def quantizations(asked: str, ops: str, model: ModelConfig, path: Path) -> tuple[str, ...]:
    """Return the quantization, or with "auto" those to be tried in order. Weights that are stored as integers are never
    quantized again."""
    has_kernels = ops in ("native", "cuda")
    if asked == "none" or (asked == "auto" and not has_kernels):
        return ("none",)
    if not has_kernels:
        raise OptionError(
            f"--quantization {asked} needs native ops (--ops cuda on GPUs), but the ops are {ops}; use --quantization none"
        )
    try:
        stored = model.quantization.method if model.quantization else _stored_types(path)
    except CheckpointError as error:
        raise OptionError(f"--model {path}: {error}") from error
    if asked == "auto":
        return ("none",) if stored else QUANTIZATIONS
    if stored:
        raise OptionError(
            f"--quantization {asked}: the weights in {path} are already quantized ({stored}) and are used as they "
            "are; remove the option, or use the original checkpoint"
        )
    return (asked,)


def resolve_group_size(options: OptionValues, quantization: str) -> int:
    """Return the inputs that share a scale; 0: the default of the quantization."""
    asked: int = options.values["quantization_group_size"]
    if asked not in (0, *_GROUP_SIZES):
        raise OptionError(f"--quantization-group-size {asked}: expected one of {', '.join(map(str, _GROUP_SIZES))}, or 0")
    if asked and quantization == "none":
        options.notes.append(f"--quantization-group-size {asked} has no effect: weights are not quantized (--quantization)")
        return 0
    return asked


def resolve_calibration(options: OptionValues, quantization: str) -> dict[str, Any]:
    """Return the file of statistics and the digest of its contents, so that all ranks and their later lives round alike."""
    path: str = options.values["quantization_calibration"]
    if not path:
        return {}
    if quantization == "none":
        options.notes.append(f"--quantization-calibration {path} has no effect: weights are not quantized (--quantization)")
        return {}
    try:
        contents = read_file(Path(path))
    except OSError as error:
        raise OptionError(f"--quantization-calibration {path} cannot be read: {error.strerror or error}") from error
    return {"quantization_calibration": path, "calibration_digest": blake2b(contents, digest_size=16).hexdigest()}


def resolve_cache_directory(options: OptionValues, ops: str) -> str:
    """Return the directory; empty if no packed weights are kept: disabled, random weights, or ops without a packed layout."""
    values = options.values
    if not values["weight_cache"] or ops not in ("native", "cuda") or values["load_format"] == "dummy":
        if values["weight_cache_dir"] is not None:
            kept = "only kernel timings" if (ops, values["cpu_kernels"]) == ("native", "auto") else "nothing"
            options.notes.append(
                f"--weight-cache-dir stores {kept}: packed weights are stored only for checkpoints with native or CUDA "
                "ops and without --no-weight-cache"
            )
        return ""
    return str(cache_directory(options))


def cache_directory(options: OptionValues) -> Path:
    """Return the cache directory, for files that can be rebuilt."""
    given = options.values["weight_cache_dir"]
    return Path(given) if given else user_cache() / "weights"


def _stored_types(path: Path) -> str:
    """Return the quantized types of a GGUF file's matrices; empty if it has none, or there is no such file."""
    file = GgufModel.of_checkpoint(path)
    if file is None:
        return ""
    types = {tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) == 2}
    return ", ".join(sorted(types - {*_PLAIN_TYPES}))


def processor_flags() -> frozenset[str]:
    """Return the flags of this machine's first processor; empty if the kernel does not report them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split()) for line in lines if line.startswith("flags")), frozenset())
