"""KV blocks that a card has room for beside everything else of a rank. Pure, except for the headers of the weight files.

Used by `resolve.py` where neither a number of blocks nor the cache's size is given, and Paddle tells the card's memory. This is
an estimate for the reference ops (`ops/paddle/reference.py`, everything float32), on the safe side; the worker checks it by a
step of the most rows when it has loaded the weights.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoint.comm_spec import max_logit_rows, max_rows
from engine.checkpoint.gguf.file import GgufFile
from engine.checkpoint.model_config import ModelConfig
from engine.errors import OptionError
from shm.sizes import size_text

_BYTES = 4  # of every value
_VALUES_IN = {"I32": 8, "U8": 2}  # packed numbers of 4 bits, at most
_MAX_SCORES = 1 << 23  # of one attention pass, and so many copies of them
_COPIES_OF_SCORES = 4
_MAX_GATHERED = 1 << 24  # of experts' weights that lie beside the rows that chose them, or of one
_ROWS_OF_HIDDEN = 8  # as wide as a hidden state, that are there at once for each row of a step
_ROWS_OF_INNER = 3
_MASK_BYTES = 16  # for each row and key of a step: comparisons and what comes of them
_KEY_SPLIT = 64
_MIB = 1 << 20
_ROUNDED_BYTES = {"none": _BYTES, "wint8": 1, "wint4": 0.5 + _BYTES / 32}  # of a value: a scale is for 32 of them at least


class CardNeeds(msgspec.Struct, frozen=True):
    """Bytes of a card that are not the KV cache's."""

    weights: int
    inputs: int
    step: int  # of the most rows
    graphs: int  # of the largest size: the others find room in its memory

    @property
    def total(self) -> int:
        return self.weights + self.inputs + self.step + self.graphs

    @property
    def text(self) -> str:
        return ", ".join(f"{name} {size_text(getattr(self, name))}" for name in self.__struct_fields__)


def card_needs(model: ModelConfig, num_weights: int, values: dict[str, Any], max_model_len: int, largest: int) -> CardNeeds:
    """`values`: those of the options; `largest`: rows of the largest captured step, 0 where none is."""
    num_drafts: int = values["speculative_config"].max_drafts
    seats: int = values["max_num_seqs"]
    rows = max_rows(values["max_num_batched_tokens"], seats)
    per_slot = max_model_len + 2 * (1 + num_drafts) + math.ceil(max_model_len / values["block_size"])
    inputs = _BYTES * (seats + 1) * per_slot + 64 * _BYTES * rows
    keys = -(-max_model_len // _KEY_SPLIT) * _KEY_SPLIT
    logits = 2 * _BYTES * model.vocab_size * max_logit_rows(rows, seats, num_drafts)

    def step_of(num_rows: int) -> int:
        width = _ROWS_OF_HIDDEN * model.hidden_size + _ROWS_OF_INNER * _inner(model)
        in_attention = min(num_rows * keys * model.num_attention_heads, _MAX_SCORES) * _COPIES_OF_SCORES * _BYTES
        return num_rows * (_BYTES * width + _MASK_BYTES * keys) + in_attention + _gathered_bytes(model) + logits

    weights = _weights_bytes(model, num_weights, values["quantization"]) if num_weights else 0
    return CardNeeds(weights, inputs, step_of(rows), step_of(largest) if largest else 0)


def _weights_bytes(model: ModelConfig, num_weights: int, quantization: str) -> int:
    """Embeddings are floats; the head is a matrix of its own, also where a checkpoint has one for both."""
    embedding, of_value = model.vocab_size * model.hidden_size, _ROUNDED_BYTES[quantization]
    others = max(num_weights - embedding * (1 if model.tie_word_embeddings else 2), 0)
    return math.ceil(_BYTES * embedding + max(of_value, 1) * embedding + of_value * others)


def card_blocks(card_bytes: int, utilization: float, needs: CardNeeds, block_bytes: int) -> int:
    """Return the blocks that fit, without the dummy block. OptionError where there is no room for one."""
    num_blocks = int((card_bytes * utilization - needs.total) // block_bytes) - 1
    if num_blocks < 1:
        raise OptionError(
            f"--gpu-memory-utilization {utilization:g} of {size_text(card_bytes)} GPU memory leaves no room for a "
            f"KV cache: {needs.text}, and {size_text(2 * block_bytes)} for two blocks; raise it, lower "
            "--max-num-batched-tokens, --max-num-seqs or --max-model-len, or use a larger GPU"
        )
    return num_blocks


def num_weights(path: Path) -> int:
    """Values of the weights in the checkpoint at `path`, as its files' headers say; 0: it has none."""
    gguf = GgufFile.of_checkpoint(path)
    if gguf is not None:
        return sum(math.prod(tensor.shape) for tensor in gguf.tensors.values())
    return sum(map(_num_values, path.glob("*.safetensors")))


def _num_values(path: Path) -> int:
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    except (OSError, ValueError, struct.error):
        return 0  # whoever loads them says what is wrong
    tensors = [value for name, value in header.items() if name != "__metadata__"]
    return sum(math.prod(tensor["shape"]) * _VALUES_IN.get(tensor["dtype"], 1) for tensor in tensors)


def _inner(model: ModelConfig) -> int:
    """The widest row between two products: of experts, for all that are chosen for it."""
    experts = model.experts
    chosen = 0 if experts is None else experts.num_chosen * max(experts.intermediate_size, model.hidden_size)
    return max(model.intermediate_size, chosen)


def _gathered_bytes(model: ModelConfig) -> int:
    experts = model.experts
    if experts is None:
        return 0
    largest = 2 * experts.intermediate_size * model.hidden_size
    return _BYTES * max(min(_MAX_GATHERED, experts.num_experts * largest), largest)
