"""What each format of weights costs the embedded model: log-probability error and perplexity against float32.

    python -m tests.workers.formats.precision

Prints the table of precision.md beside this file. The text is what the model was made for, conversations of the kind it was
trained on; the tokens of its answers count. Weights are rounded to nearest by the tests' plain quantizers, so tools that look
for better roundings (AWQ, GPTQ) lose less.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.checkpoint import resolve_model
from engine.messages import SamplingParams
from engine.vocabulary import Vocabulary
from tests.ggufs import as_type, original_metadata, write_gguf
from tests.workers.formats.quantizers import (
    DEMO,
    awq,
    float_quantized,
    fp8_blocks,
    gptq,
    int_quantized,
    pack_quantized,
    write_quantized_demo,
)
from tests.workers.serving import Sample, Serving, make_runner
from tools.demo.data import training_conversations
from workers.blas import configure_blas

_NUM_CONVERSATIONS = 200
_FORMATS = {
    "int8, a scale each output": lambda: int_quantized(-1),
    "packed int8, groups of 32": lambda: pack_quantized(8, 32),
    "packed int4, groups of 32": lambda: pack_quantized(4, 32),
    "packed int4, groups of 128": lambda: pack_quantized(4, 128),
    "GPTQ layout, 4 bits, groups of 64": lambda: gptq(4, 64),
    "AWQ layout, 4 bits, zero points, groups of 32": lambda: awq(32),
    "AWQ layout, 4 bits, zero points, groups of 128": lambda: awq(128),
    "FP8, blocks of 128 x 128": fp8_blocks,
    "FP8, a scale each output": lambda: float_quantized("channel"),
}
_TYPES = ("F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")


def logprobs_of(path: Path, conversations: list[tuple[list[int], list[int]]]) -> np.ndarray:
    """Of every token that counts."""
    serving = Serving(make_runner(path))
    found = []
    for token_ids, places in conversations:
        serving.next_block = 1
        sample = Sample(token_ids, SamplingParams(temperature=0.0, num_prompt_logprobs=0), num_outputs=1)
        serving.place(sample, 0)
        serving.run([sample])
        found += [sample.prompt_logprobs[place] for place in places]
    return np.array(found)


def conversations_of(count: int) -> list[tuple[list[int], list[int]]]:
    """Token ids, and the places of those that the model has to say."""
    vocabulary = Vocabulary.load(DEMO)
    found = []
    for conversation in training_conversations(seed=987654321, num_conversations=count):
        token_ids: list[int] = []
        places: list[int] = []
        for message in conversation:
            token_ids += vocabulary.encode(f"<|im_start|>{message['role']}\n", False)
            content = vocabulary.encode(f"{message['content']}<|im_end|>", False)
            if message["role"] == "assistant":
                places += range(len(token_ids), len(token_ids) + len(content))
            token_ids += [*content, *vocabulary.encode("\n", False)]
        found.append((token_ids, places))
    return found


def main() -> None:
    configure_blas(1)
    logging.disable(logging.INFO)  # the package tells of each file that it writes
    conversations = conversations_of(_NUM_CONVERSATIONS)
    exact = logprobs_of(DEMO, conversations)
    print(f"{len(exact)} tokens; float32 has a perplexity of {math.exp(-exact.mean()):.3f}.\n")
    print("| weights | mean error | largest error | perplexity, relative |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        makers: dict[str, Callable[[Path], Path]] = {name: _quantized(name) for name in _FORMATS}
        makers |= {f"GGUF {name}": _gguf(name) for name in _TYPES}
        for number, (name, make) in enumerate(makers.items()):
            found = logprobs_of(make(Path(folder) / str(number)), conversations)
            errors = np.abs(found - exact)
            change = math.exp(exact.mean() - found.mean()) - 1
            print(f"| {name} | {errors.mean():.5f} | {errors.max():.4f} | {change:+.3%} |")


def _quantized(name: str) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        write_quantized_demo(path, _FORMATS[name]())
        return path

    return make


def _gguf(type_name: str) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        file = path.with_suffix(".gguf")
        write_gguf(file, DEMO, as_type(type_name), **original_metadata(DEMO))
        return resolve_model(str(file))

    return make


if __name__ == "__main__":
    main()
