"""Cost of each precision for the embedded model: log-probability error and perplexity against float32.

    python -m tests.workers.weights.formats.precision

Prints the tables of precision.md beside this file. Weights are rounded to nearest, by the engine (--quantization) or the
tests' plain quantizers, so tools that look for better roundings (AWQ, GPTQ) lose less.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.checkpoint.locate import resolve_model
from tests.ggufs import as_type, original_metadata, write_gguf
from tests.workers.weights.formats.accuracy import WEIGHTS_ALONE, Errors, conversations_of, logprobs_of
from tests.workers.weights.formats.quantizers import (
    DEMO,
    Format,
    awq,
    blocks_of_4_bits,
    float4,
    float_quantized,
    fp8_blocks,
    gptq,
    int_quantized,
    llm_int8,
    pack_quantized,
    write_quantized_demo,
)
from workers.devices.blas import configure_blas

NUM_CONVERSATIONS = 200
OPTIONS: dict[str, dict[str, Any]] = {
    "--dtype float32": {},
    "--dtype bfloat16": {"dtype": "bfloat16"},
    "--quantization wint8": {"dtype": "bfloat16", "quantization": "wint8"},
    "--quantization wint4": {"dtype": "bfloat16", "quantization": "wint4"},
    "--kv-cache-dtype bfloat16": {"kv_cache_dtype": "bfloat16"},
    "--kv-cache-dtype int8": {"kv_cache_dtype": "int8"},
    "--quantization wint8 --kv-cache-dtype int8": {"dtype": "bfloat16", "quantization": "wint8", "kv_cache_dtype": "int8"},
    "--quantization wint4 --kv-cache-dtype int8": {"dtype": "bfloat16", "quantization": "wint4", "kv_cache_dtype": "int8"},
}
FORMATS: dict[str, Callable[[], Format]] = {
    "int8, a scale each output": lambda: int_quantized(-1),
    "packed int8, groups of 32": lambda: pack_quantized(8, 32),
    "packed int4, groups of 32": lambda: pack_quantized(4, 32),
    "packed int4, groups of 128": lambda: pack_quantized(4, 128),
    "GPTQ layout, 4 bits, groups of 64": lambda: gptq(4, 64),
    "GPTQ layout, 8 bits, zero points, groups of 32": lambda: gptq(8, 32, is_symmetric=False),
    "AWQ layout, 4 bits, zero points, groups of 32": lambda: awq(32),
    "AWQ layout, 4 bits, zero points, groups of 128": lambda: awq(128),
    "GPTQ layout, 3 bits, groups of 64": lambda: gptq(3, 64),
    "bitsandbytes NF4, blocks of 64": lambda: blocks_of_4_bits("nf4", is_nested=False),
    "bitsandbytes int8, a scale each output": llm_int8,
    "NVFP4, groups of 16": lambda: float4("nvfp4"),
    "FP8, blocks of 128 x 128": fp8_blocks,
    "FP8, a scale each output": lambda: float_quantized("channel"),
}
TYPES = ("F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")


def write_format(name: str, path: Path) -> Path:
    write_quantized_demo(path, FORMATS[name]())
    return path


def write_type(type_name: str, path: Path) -> Path:
    file = path.with_suffix(".gguf")
    write_gguf(file, DEMO, as_type(type_name), **original_metadata(DEMO))
    return resolve_model(str(file))


def main() -> None:
    configure_blas(1)
    logging.disable(logging.INFO)  # the gguf package tells of each file that it writes
    conversations = conversations_of(NUM_CONVERSATIONS)
    exact = logprobs_of(DEMO, conversations, **WEIGHTS_ALONE)
    print(f"{len(exact)} tokens; float32 has a perplexity of {math.exp(-exact.mean()):.3f}.\n")

    def cells(path: Path, **options: Any) -> str:
        errors = Errors.of(logprobs_of(path, conversations, **options), exact)
        return f"{errors.mean:.5f} | {errors.largest:.4f} | {errors.perplexity:+.3%}"

    print("| options | mean error | largest error | perplexity, relative |\n|---|---|---|---|")
    for name, options in OPTIONS.items():
        print(f"| `{name}` | {cells(DEMO, **options)} |", flush=True)
    print("\n| stored | as served: mean | largest | perplexity | weights alone: mean | largest | perplexity |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate((*FORMATS, *TYPES)):
            write = write_format if name in FORMATS else write_type
            path = write(name, Path(folder) / str(number))
            shown = name if name in FORMATS else f"GGUF {name}"
            print(f"| {shown} | {cells(path, dtype='bfloat16')} | {cells(path, **WEIGHTS_ALONE)} |", flush=True)


if __name__ == "__main__":
    main()
