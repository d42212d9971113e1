"""Writes a checkpoint of Qwen3-30B-A3B's shape with fewer layers, a vocabulary of 32,000 and random weights, for benchmarks:

    python -m tools.bench.moe_shape DIRECTORY [--num-layers 4] [--seed 0]

Any server that reads Hugging Face's format serves it. Its tokenizer is a byte-level BPE of the texts that come with Python. The
head gives nothing to tokens that are no text by themselves, so that greedy answers never end early.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.checkpoint.model_config import ModelConfig
from workers.models import declare_model
from workers.weights.formats.floats import bfloat16_bits
from workers.weights.random import RandomWeights

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VOCABULARY = 32_000
_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": None,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": _VOCABULARY,
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """As many tokens as the texts give, 32,000 at most."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = [str(path) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY, special_tokens=list(_SPECIAL), initial_alphabet=alphabet)
    tokenizer.train(files, trainer)
    return tokenizer


def is_text(tokenizer: Tokenizer) -> np.ndarray:
    """Of each token id, whether it is text by itself."""
    found = np.zeros(_VOCABULARY, bool)
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id])
        found[token_id] = bool(text) and "\ufffd" not in text
    return found


def tensors(config: ModelConfig, seed: int, can_be_answered: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The bits of bfloat16 by name."""
    _, weights = declare_model(config)
    drawn = RandomWeights(weights, seed, is_narrow=True)
    for name in weights.shapes():
        values = drawn.read_plain(name)
        bits = values if values.dtype == np.uint16 else np.empty(values.shape, np.uint16)
        if bits is not values:
            bfloat16_bits(values, bits)
        if name == "lm_head.weight":
            bits[~can_be_answered] = 0
        yield name, bits


def write(directory: Path, num_layers: int, seed: int) -> None:
    directory.mkdir(parents=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": _SPECIAL[2], "pad_token": _SPECIAL[0], "chat_template": _CHAT_TEMPLATE}
    documents = {
        "config": _CONFIG | {"num_hidden_layers": num_layers, "max_window_layers": num_layers},
        "generation_config": {"eos_token_id": 2, "pad_token_id": 0},
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names},
    }
    for name, content in documents.items():
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2))
    config = ModelConfig.read(directory)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in declare_model(config)[1].shapes().items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, bits in tensors(config, seed, is_text(tokenizer)):
            file.write(bits.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.moe_shape", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--num-layers", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    options = parser.parse_args()
    write(options.directory, options.num_layers, options.seed)


if __name__ == "__main__":
    main()
