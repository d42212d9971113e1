"""Cost of each precision for SmolLM2-135M-Instruct: error of log-probabilities and perplexity against float32.

    python -m tests.real_models.quantization

Prints the table of a published model in tests/workers/weights/formats/precision.md. The model is a GGUF file in Q4_1, unpacked
to float32. It reads topics of Python's documentation (`pydoc_data`), in pieces of 512 tokens; calibration reads this project's
manual.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gguf
import numpy as np

from engine.checkpoint.gguf.convert import gguf_checkpoint
from engine.checkpoint.gguf.parts import GgufModel
from engine.checkpoint.locate import resolve_model
from engine.checkpoint.model_config import ModelConfig
from engine.messages import SamplingParams
from shm.blake2 import blake2b
from tests.engine.tokenizer.vocabularies import vocabulary_of
from tests.ggufs import Encode, as_type, original_metadata, write_gguf
from tests.paths import REPOSITORY
from tests.real_models import files
from tests.workers.checkpoints import write_safetensors
from tests.workers.serving import ServedSequence, Serving, make_runner
from tools.calibrate.command import main as calibrate
from workers.devices.blas import configure_blas
from workers.models import declare_model
from workers.weights.formats.gguf import gguf_tensors

PIECE, NUM_PIECES = 512, 32
MANUAL = REPOSITORY / ".github" / "manual"


def unpacked(source: Path, directory: Path) -> Path:
    """Write a GGUF file as a float32 checkpoint."""
    checkpoint = gguf_checkpoint(source)
    for file in checkpoint.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copyfile(file, directory / file.name)
    file = GgufModel.of_checkpoint(checkpoint)
    assert file is not None
    tensors = gguf_tensors(file, ModelConfig.read(checkpoint))
    values = {name: np.asarray(tensor.read(), np.float32) for name, tensor in tensors.items()}
    write_safetensors(directory / "model.safetensors", values, metadata={"format": "pt"})
    return directory


def pieces(path: Path) -> Iterator[list[int]]:
    vocabulary = vocabulary_of(path)
    for name in sorted(topics):
        token_ids = vocabulary.encode(topics[name], False)[: 3 * PIECE]
        for begin in range(0, len(token_ids), PIECE):
            if len(token_ids) - begin >= PIECE // 4:
                yield token_ids[begin : begin + PIECE]


def logprobs_of(path: Path, texts: list[list[int]], **options: Any) -> np.ndarray:
    """Return the log-probability of every token but the first of each piece."""
    serving = Serving(make_runner(path, max_model_len=PIECE + 16, num_kv_blocks=200, threads=2, **options))
    found = []
    for token_ids in texts:
        serving.next_block = 1
        sequence = ServedSequence(token_ids, SamplingParams(temperature=0.0, num_prompt_logprobs=0), num_outputs=1)
        serving.place(sequence, 0)
        serving.run([sequence])
        found += [sequence.prompt_logprobs[place] for place in sorted(sequence.prompt_logprobs)]
    return np.array(found)


def with_wide_embedding(type_name: str, of_embedding: str) -> Encode:
    """Return matrices in a type, and the embedding, which is the head too, in another."""

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        return as_type(of_embedding if name.startswith("token_embd") else type_name)(name, values)

    return encode


def bits_of(path: Path, quantization: str, group_size: int) -> float:
    """Return the bits of a weight in the layers, with scales, on average."""
    config = ModelConfig.read(path)
    last, num_bits, num_weights = config.num_layers - 1, 0.0, 0
    for name, shape in declare_model(config)[1].shapes().items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None or len(shape) == 1:
            continue
        size = math.prod(shape)
        is_wide = quantization == "wint8" or int(layer[1]) in (0, last)
        of_scales = (16 / group_size if group_size else 0) if is_wide else 8 / (group_size or 64)
        num_bits += size * ((8 if is_wide else 4) + of_scales)
        num_weights += size
    return num_bits / num_weights


def main() -> None:
    configure_blas(2)
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        (model := Path(folder, "model")).mkdir()
        unpacked(files.smollm2(), model)
        text, statistics = Path(folder, "manual.txt"), Path(folder, "statistics.safetensors")
        text.write_text("\n".join(file.read_text() for file in sorted(MANUAL.glob("*.md"))))
        assert calibrate([str(model), str(text), str(statistics), "--dtype", "bfloat16", "--max-tokens", "16384"]) == 0
        digest = blake2b(statistics.read_bytes(), digest_size=16).hexdigest()
        calibrated = {"quantization_calibration": str(statistics), "calibration_digest": digest}
        texts = [piece for piece, _ in zip(pieces(model), range(NUM_PIECES), strict=False)]
        exact = logprobs_of(model, texts)
        print(f"{len(exact)} tokens; float32 has a perplexity of {math.exp(-exact.mean()):.2f}.\n")
        print("| options or file | bits per weight | mean error of log-probabilities | perplexity |\n|---|---|---|---|")

        def row(name: str, bits: float, path: Path = model, **options: Any) -> None:
            found = logprobs_of(path, texts, dtype="bfloat16", **options)
            print(f"| {name} | {bits:.1f} | {np.abs(found - exact).mean():.4f} | {math.exp(-found.mean()):.2f} |", flush=True)

        row("`--dtype bfloat16`", 16)
        for quantization, sizes in (("wint8", (0, 32)), ("wint4", (0, 32))):
            for size in sizes:
                for also, name in (({}, ""), (calibrated, ", calibrated")):
                    groups = f" --quantization-group-size {size}" if size else ""
                    options = {"quantization": quantization, "quantization_group_size": size, **also}
                    row(f"`--quantization {quantization}{groups}`{name}", bits_of(model, quantization, size), **options)
        for name, bits in (("Q8_0", 8.5), ("Q4_0", 4.5)):
            file = Path(folder, f"{name}.gguf")
            write_gguf(file, model, with_wide_embedding(name, "Q8_0"), **original_metadata(model))
            row(f"GGUF {name}", bits, resolve_model(str(file)))


if __name__ == "__main__":
    main()
