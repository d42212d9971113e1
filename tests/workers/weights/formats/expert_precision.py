"""Cost of each format of experts: log-probability error of a random mixture of experts with nothing else rounded.

    python -m tests.workers.weights.formats.expert_precision

Prints the last table of precision.md beside this file. The model has drawn weights and reads drawn tokens, so an error is that
of the format, not of a text that a model knows well; where rounding sends a token to another expert, the error is large.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.locate import resolve_model
from tests.ggufs import Encode, as_type, original_metadata, write_gguf
from tests.workers.checkpoints import drawn_tensors, write_config
from tests.workers.weights.formats.accuracy import WEIGHTS_ALONE, Conversation, Errors, logprobs_of
from tests.workers.weights.formats.precision import FORMATS, TYPES
from tests.workers.weights.formats.quantizers import Format, write_quantized, write_tensors
from tools.demo import MODEL as DEMO
from workers.devices.blas import configure_blas

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "eos_token_id": 2,
    "transformers_version": "5.0.0",
}
NUM_TEXTS, NUM_TOKENS = 16, 256
_NO_EXPERT = r"re:.*(self_attn|lm_head|mlp\.gate$).*"


def drawn(shapes: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return random matrices that preserve the magnitude of their inputs; norms of one."""
    source = np.random.default_rng(1)
    found = {}
    for name, tensor in shapes.items():
        values = source.standard_normal(tensor.shape, np.float32)
        found[name] = values / np.float32(tensor.shape[1] ** 0.5) if tensor.ndim == 2 else np.ones_like(values)
    return found


def of_experts_alone(format: Format) -> Format:
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    modules = [f"model.layers.{layer}.self_attn.{name}" for layer in range(CONFIG["num_hidden_layers"]) for name in attention]
    unconverted = {"modules_to_not_convert": [*modules, "lm_head", "mlp.gate"], "ignore": ["lm_head", _NO_EXPERT]}
    return Format(format.quantize, {**format.config, **unconverted}, plain=attention)


def experts_as(type_name: str) -> Encode:
    experts, others = as_type(type_name), as_type("F32")
    return lambda name, values: (experts if "_exps" in name else others)(name, values)


def main() -> None:
    configure_blas(1)
    logging.disable(logging.INFO)  # the gguf package tells of each file that it writes
    source = np.random.default_rng(0)
    texts: list[Conversation] = [
        (source.integers(3, CONFIG["vocab_size"], NUM_TOKENS).tolist(), list(range(1, NUM_TOKENS))) for _ in range(NUM_TEXTS)
    ]
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain"
        tensors = drawn(drawn_tensors(write_config(plain, CONFIG)))
        write_tensors(plain / "model.safetensors", tensors)
        exact = logprobs_of(plain, texts, **WEIGHTS_ALONE)

        def cells(path: Path, **options: Any) -> str:
            errors = Errors.of(logprobs_of(path, texts, **options), exact)
            return f"{errors.mean:.5f} | {errors.largest:.4f}"

        print(f"{len(exact)} tokens.\n")
        print("| stored | as served: mean | largest | weights alone: mean | largest |\n|---|---|---|---|---|")
        for options in ({"dtype": "float32"}, {"dtype": "bfloat16"}):
            print(f"| as it is, `--dtype {options['dtype']}` | {cells(plain, **options)} | | |", flush=True)
        for quantization in ("wint8", "wint4"):
            found = cells(plain, dtype="bfloat16", quantization=quantization)
            print(f"| as it is, `--quantization {quantization}` (all linears) | {found} | | |", flush=True)
        for number, name in enumerate(FORMATS):
            path = Path(folder) / str(number)
            shutil.copytree(plain, path, ignore=shutil.ignore_patterns("*.safetensors"))
            write_quantized(path, CONFIG, tensors, of_experts_alone(FORMATS[name]()))
            print(f"| {name} | {cells(path, dtype='bfloat16')} | {cells(path, **WEIGHTS_ALONE)} |", flush=True)
        for type_name in TYPES:
            file = Path(folder) / f"{type_name}.gguf"
            write_gguf(file, plain, experts_as(type_name), **original_metadata(DEMO))
            path = resolve_model(str(file))
            print(f"| GGUF {type_name} | {cells(path, dtype='bfloat16')} | {cells(path, **WEIGHTS_ALONE)} |", flush=True)


if __name__ == "__main__":
    main()
