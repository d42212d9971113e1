"""A model that copies from its prompt at the cost of a real one: a checkpoint of Qwen3-0.6B's shape, with an untied head.

    python -m tools.bench.copying_model DIRECTORY [--num-layers 28] [--seed 0]

The outputs of layers are scaled by a thousandth, so the last hidden state of a token is about its embedding; and row f(v) of
the head is the embedding of v. So the greedy answer after v is f(v), f(f(v)), ...: the walk, a cycle through all tokens that
are text by themselves, stored in DIRECTORY/walk.npy. Parts of that walk in a prompt can be copied. Used by copying.py, which
makes such prompts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from ops.weight_format import bfloat16_bits
from tools.bench.dense_shape import CHAT_TEMPLATE, CONFIG, NUM_LAYERS
from tools.bench.shape import Change, write

_OUTPUTS = ("o_proj.weight", "down_proj.weight")  # output of a layer, added to the residual
_SHARE = 1 / 1000
WALK = "walk.npy"


def walk_of(can_be_answered: np.ndarray, seed: int) -> np.ndarray:
    """Return the tokens in the order of the walk, int32 [tokens]: each is answered with the next, the last with the first."""
    walk: np.ndarray = np.random.default_rng(seed).permutation(np.flatnonzero(can_be_answered)).astype(np.int32)
    return walk


def copying(walk: np.ndarray) -> Change:
    """Return the change of the tensors. The embedding comes before the head."""
    embeddings: list[np.ndarray] = []

    def change(name: str, bits: np.ndarray) -> np.ndarray:
        if name == "model.embed_tokens.weight":
            embeddings.append(bits)
        elif name == "lm_head.weight":
            head = np.zeros_like(bits)
            head[np.roll(walk, -1)] = embeddings.pop()[walk]
            return head
        elif name.endswith(_OUTPUTS):
            bfloat16_bits((bits.astype(np.uint32) << 16).view(np.float32) * np.float32(_SHARE), bits)
        return bits

    return change


def write_copying_model(directory: Path, config: dict[str, Any], seed: int) -> None:
    walks: list[np.ndarray] = []

    def make_change(can_be_answered: np.ndarray) -> Change:
        walks.append(walk_of(can_be_answered, seed))
        return copying(walks[0])

    write(directory, config, CHAT_TEMPLATE, seed, make_change=make_change)
    np.save(directory / WALK, walks[0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.copying_model", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--num-layers", type=int, default=NUM_LAYERS, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    options = parser.parse_args()
    changed = {"tie_word_embeddings": False, "num_hidden_layers": options.num_layers, "max_window_layers": options.num_layers}
    write_copying_model(options.directory, CONFIG | changed, options.seed)


if __name__ == "__main__":
    main()
