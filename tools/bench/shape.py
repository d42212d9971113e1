"""Checkpoints with a published model's shape and random weights, for benchmarks, in the format of Hugging Face.

Used by dense_shape.py, latent_shape.py, moe_shape.py and vision_shape.py, which have the configurations. The tokenizer is a
byte-level BPE of texts that come with Python. The head gives zero logits to tokens that are not text by themselves, so that
greedy answers never end early.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.checkpoint.joined_projections import joined_projections
from engine.checkpoint.model_config import ModelConfig
from ops.weight_format import bfloat16_bits
from workers.models import declare_model
from workers.weights.formats.joined_projections import parts_of
from workers.weights.random import RandomWeights
from workers.weights.safetensors import header_of

PAD, END = "<|endoftext|>", "<|im_end|>"
SPECIAL = (PAD, "<|im_start|>", END)  # ids 0 to 2; those of a shape follow
_MAX_TOKENS = 32_000


def make_tokenizer(special: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with as many tokens as the texts give, 32,000 at most."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = [str(path) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_MAX_TOKENS, special_tokens=[*SPECIAL, *special], initial_alphabet=alphabet)
    tokenizer.train(files, trainer)
    return tokenizer


def is_text(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Return for each token id whether it is text by itself."""
    found = np.zeros(vocab_size, bool)
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id])
        found[token_id] = bool(text) and "\ufffd" not in text
    return found


Change = Callable[[str, np.ndarray], np.ndarray]


def as_drawn(name: str, bits: np.ndarray) -> np.ndarray:
    """Return the drawn tensor `name` unchanged."""
    return bits


def tensors(
    config: ModelConfig, seed: int, can_be_answered: np.ndarray, change: Change = as_drawn
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and bfloat16 bits of each tensor, after `change`."""
    _, weights = declare_model(config)
    drawn = RandomWeights(weights, seed, is_narrow=True)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    for name in weights.shapes():
        values = drawn.read_plain(name)
        bits = values if values.dtype == np.uint16 else np.empty(values.shape, np.uint16)
        if bits is not values:
            bfloat16_bits(values, bits)
        if name == head:
            bits[~can_be_answered] = 0
        yield name, change(name, bits)


def stored_tensors(config: ModelConfig, tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors that checkpoints have: projections that they store as one are joined."""
    joined = {(each.module, part): each for each in joined_projections(config) for part in each.part_names}
    pending: dict[str, dict[str, np.ndarray]] = {}
    for name, bits in tensors:
        *place, module, part, kind = ["", *name.split(".")]
        whole = joined.get((module, part))
        if whole is None:
            yield name, bits
            continue
        stored = ".".join([*place[1:], module, whole.name, kind])
        parts = pending.setdefault(stored, {})
        parts[part] = bits
        if len(parts) == len(whole.part_names):
            found = np.empty((whole.num_rows, *bits.shape[1:]), bits.dtype)
            for each, rows in parts_of(whole):
                found[rows] = parts[each]
            yield stored, found
            del pending[stored]


def write(
    directory: Path,
    config: dict[str, Any],
    chat_template: str,
    seed: int,
    special: Sequence[str] = (),
    make_change: Callable[[np.ndarray], Change] = lambda can_be_answered: as_drawn,
    published: Mapping[str, str] = MappingProxyType({}),
    **files: dict[str, Any],
) -> None:
    """Write a checkpoint. `make_change` maps the tokens that are text by themselves to a change of the tensors. `published`:
    what parts of tensors' names are replaced by. `files`: additional files, by name without .json."""
    directory.mkdir(parents=True)
    tokenizer = make_tokenizer(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": END, "pad_token": PAD, "chat_template": chat_template}
    documents = {
        "config": config,
        "generation_config": {"eos_token_id": 2, "pad_token_id": 0},
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names},
    }
    for name, content in (documents | files).items():
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2))
    model_config = ModelConfig.read(directory)
    can_be_answered = is_text(tokenizer, model_config.vocab_size)
    shapes = declare_model(model_config)[1].shapes()
    empty = ((name, np.broadcast_to(np.uint16(0), shape)) for name, shape in shapes.items())
    entries = [(name, "BF16", bits.shape) for name, bits in stored_tensors(model_config, empty)]
    for own, other in published.items():
        entries = [(name.replace(own, other), kind, shape) for name, kind, shape in entries]
    drawn = tensors(model_config, seed, can_be_answered, make_change(can_be_answered))
    with (directory / "model.safetensors").open("xb") as file:
        file.write(header_of(entries, {"format": "pt"}))
        for _, bits in stored_tensors(model_config, drawn):
            file.write(bits.tobytes())
