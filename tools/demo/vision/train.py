"""Make the vision demonstration model: data, tokenizer, training, checkpoint. Needs torch; `evaluate.py` examines it.

    python -m tools.demo.vision.train --state run.state

Run by hand, on a CPU, when the data change. It writes `tools/demo/vision/model/`. Results depend only on the seed and the
number of steps, not on time.

In addition to answers, heads that are not in the checkpoint predict what covers each patch, which object has its centre in each
square of patches, and its number in a row of letters. So the encoder learns long before the text model uses it.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from tools.demo import VISION_MODEL
from tools.demo.batches import IGNORED
from tools.demo.muon import Muon
from tools.demo.network import Shape
from tools.demo.schedule import Schedule
from tools.demo.state import Stateful, keep, restored
from tools.demo.vision.batches import Batch, training_batch
from tools.demo.vision.checkpoint import save, start_from
from tools.demo.vision.drawing import NUM_THINGS
from tools.demo.vision.network import Qwen3VL, SeeingShape
from tools.demo.vision.questions import MAX_CHARACTERS
from tools.demo.vision.vocabulary import make_tokenizer

PATCHES = {"string": 850, "count": 500, "pair": 500, "clip": 150}
"""Samples of each kind in a step that has it."""
WARM_PATCHES = {"string": 1100, "count": 1100, "pair": 700, "clip": 120}
"""For a training that starts from a checkpoint that reads and counts."""
STEPS_BETWEEN_CLIPS = 4
"""In such a training: steps between those with pairs and clips."""
LATER_PATCHES = {"string": 450, "count": 800, "pair": 700, "clip": 120}
STEPS_OF_ALL_KINDS = 200
"""Steps after which a step has strings and one other kind."""
OTHER_KINDS = ("count", "pair", "count", "clip")
STEPS_OF_LETTERS = 1200
"""Steps after which a step has all kinds again."""
STEPS_BETWEEN_STATES = 100
SHARE_OF_MARKS = 0.5
"""Weights of the losses other than that of answers."""


@dataclass(frozen=True, slots=True)
class Run(Schedule):
    """Settings of a training."""

    steps_per_character: int
    """Strings start with one character and get one more after so many steps."""
    learning_rate: float
    seed: int
    fonts: tuple[Path, ...]
    knows_letters: bool

    def max_characters(self, step: int) -> int:
        return min(MAX_CHARACTERS, (5 if self.knows_letters else 1) + step // self.steps_per_character)

    def patches_of(self, step: int) -> dict[str, int]:
        """Return the kinds of a step, and the patches of each."""
        if self.knows_letters:
            return (
                WARM_PATCHES if step % STEPS_BETWEEN_CLIPS == 0 else {kind: WARM_PATCHES[kind] for kind in ("string", "count")}
            )
        return patches_of(step)


def patches_of(step: int) -> dict[str, int]:
    """Return the patches of each kind in a step of a training from scratch."""
    if step > STEPS_OF_LETTERS:
        return LATER_PATCHES
    kinds = PATCHES if step <= STEPS_OF_ALL_KINDS else ("string", OTHER_KINDS[step % len(OTHER_KINDS)])
    return {kind: PATCHES[kind] for kind in kinds}


class Trained(nn.Module):
    """The network, and heads for training only."""

    def __init__(self, shape: SeeingShape) -> None:
        super().__init__()
        self.network = Qwen3VL(shape)
        self.things = nn.Linear(shape.vision.out_hidden_size, NUM_THINGS)
        self.parts = nn.Linear(shape.vision.hidden_size, NUM_THINGS)
        self.numbers = nn.Linear(shape.vision.out_hidden_size, 1 + MAX_CHARACTERS)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, float]:
        """Return the mean cross entropy of answer tokens and of marks, and the share of right tokens."""
        features, patches = self.network.visual(batch.patches, batch.height, batch.width)
        targets = batch.targets.flatten()
        wanted = torch.nonzero(targets != IGNORED).squeeze(1)
        rows = [feature.reshape(len(batch.token_ids), len(batch.seen), -1) for feature in features]
        logits = self.network.language_model(batch.token_ids, batch.seen, rows, batch.positions, wanted)
        right = (logits.argmax(dim=1) == targets[wanted]).float().mean().item()
        marks = torch.zeros(())
        if batch.things.any():
            squares = features[0].flatten(0, 1)
            marks = functional.cross_entropy(self.things(squares).float(), batch.things.flatten())
            marks = marks + functional.cross_entropy(self.numbers(squares).float(), batch.numbers.flatten())
            marks = marks + functional.cross_entropy(self.parts(patches.flatten(0, 1)).float(), batch.parts.flatten())
        return functional.cross_entropy(logits.float(), targets[wanted]), marks, right


def train(trained: Trained, tokenizer: Tokenizer, run: Run, state_file: Path | None) -> None:
    """Train, printing speed, loss and right tokens by kind. With a `state_file`, continue from it and write it now and then."""
    inner = ("patch_embed", "blocks", "layers", "merger")
    named = list(trained.named_parameters())
    matrices = [matrix for name, matrix in named if matrix.ndim == 2 and any(part in name for part in inner)]
    others = [parameter for _, parameter in named if all(parameter is not matrix for matrix in matrices)]
    drawing, turning = (ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) for _ in range(2))
    muon = Muon(matrices, turning)
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
    stateful: dict[str, Stateful] = {"trained": trained, "muon": muon, "adamw": adamw}
    first_step = restored(state_file, stateful)
    begin = time.monotonic()
    shown = {kind: np.zeros(3) for kind in PATCHES}
    order = [(step, kind) for step in range(first_step, run.num_steps + 1) for kind in run.patches_of(step)]

    def drawn(place: int) -> Batch:
        step, kind = order[min(place, len(order) - 1)]
        return training_batch(tokenizer, kind, run.seed, step, run.patches_of(step)[kind], run.max_characters(step), run.fonts)

    place = 0
    coming = drawing.submit(drawn, place)
    for step in range(first_step, run.num_steps + 1):
        for optimizer, full_rate in ((muon, run.learning_rate), (adamw, run.learning_rate / 5)):
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = full_rate * run.learning_rate_share(step)
        for kind in run.patches_of(step):
            batch, place = coming.result(), place + 1
            coming = drawing.submit(drawn, place)
            with torch.autocast("cpu", torch.bfloat16):
                answers, marks, right = trained.losses(batch)
            (answers + SHARE_OF_MARKS * marks).backward()
            weight = 1 / min(step - first_step + 1, 50)
            shown[kind] += weight * (np.array((answers.item(), marks.item(), right)) - shown[kind])
        muon.step()
        adamw.step()
        if step % 50 == 0:
            speed = (step - first_step + 1) / (time.monotonic() - begin)
            told = "  ".join(f"{kind} {a:.3f} {m:.3f} {100 * r:.1f}%" for kind, (a, m, r) in shown.items())
            print(f"step {step} of {run.num_steps}  {speed:.2f} steps/s  {told}", flush=True)
        if state_file and step % STEPS_BETWEEN_STATES == 0:
            keep(state_file, stateful, step)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4400)
    parser.add_argument("--decay-steps", type=int, default=2100, help="the last steps, over which the learning rate falls")
    parser.add_argument("--steps-per-character", type=int, default=60, help="before strings get longer")
    parser.add_argument("--learning-rate", type=float, default=0.02, help="of Muon; AdamW takes a fifth")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of the data")
    parser.add_argument("--start-from", type=Path, help="checkpoint that is trained on")
    parser.add_argument("--fonts", type=Path, help="folder of font files to write with, besides letters of dots")
    parser.add_argument("--state", type=Path, help="file from which a run that was cut off goes on; written as it goes")
    parser.add_argument("--model", type=Path, default=VISION_MODEL)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    torch.set_flush_denormal(True)
    tokenizer = make_tokenizer()
    shape = SeeingShape(
        Shape(vocab_size=tokenizer.get_vocab_size(), hidden_size=96, num_hidden_layers=3, intermediate_size=256)
    )
    trained = Trained(shape)
    if options.start_from:
        start_from(trained.network, tokenizer, options.start_from)
    num_parameters = sum(parameter.numel() for parameter in trained.network.parameters())
    print(f"{num_parameters} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    fonts = tuple(sorted(options.fonts.iterdir())) if options.fonts else ()
    run = Run(
        options.steps,
        options.decay_steps,
        options.steps_per_character,
        options.learning_rate,
        options.seed,
        fonts,
        options.start_from is not None,
    )
    train(trained, tokenizer, run, options.state)
    save(trained.network, tokenizer, options.model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
