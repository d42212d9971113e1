"""Batches of training samples: pictures as patches, conversations as tokens, and targets. Called by `train.py`.

A batch depends only on the seed, its step and its kind, so that training can continue from any step. Its samples are of one
scene (`questions.py`): their pictures have the same size and places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo.batches import IGNORED
from tools.demo.vision.drawing import Pixels
from tools.demo.vision.network import FRAMES_PER_ROW, by_squares
from tools.demo.vision.questions import KINDS, Sample, Scene, scene
from tools.demo.vision.sizes import MERGE, PATCH, patch_grid
from tools.demo.vision.vocabulary import IMAGE, VIDEO, VISION_END, VISION_START
from tools.demo.vocabulary import TURN_END, TURN_START

PIXEL_MEAN, PIXEL_DEVIATION = 0.8, 0.3
"""About those of the drawings: backgrounds become small values, and letters stand out."""
FRAMES_PER_SECOND = 2
SHARE_TEXT_FIRST = 0.2


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of samples of one scene."""

    patches: Tensor
    """[pictures, patches, values], a sample's pictures one after another; for a clip, pairs of frames."""
    height: int
    width: int
    token_ids: Tensor
    targets: Tensor
    """[samples, tokens]: the target of each token, or `IGNORED`."""
    positions: Tensor
    """[3, tokens]: time, height, width."""
    seen: Tensor
    """The places of picture tokens, the same in every sample."""
    things: Tensor
    """[pictures, squares]: the object with its centre there (`drawing.Mark`)."""
    numbers: Tensor
    """[pictures, squares]: its number in reading order."""
    parts: Tensor
    """[pictures, patches]: the object that covers the centre."""


def as_patches(frames: Sequence[Pixels], height: int, width: int) -> Tensor:
    """Return two frames, or a picture twice, resized and cut into [patches, 3 * frames * side * side]."""
    resized = [
        np.asarray(Image.fromarray(frame).resize((width * PATCH, height * PATCH), Image.Resampling.BICUBIC)) for frame in frames
    ]
    values = (torch.from_numpy(np.stack(resized)).float() / 255 - PIXEL_MEAN) / PIXEL_DEVIATION
    cut = values.view(FRAMES_PER_ROW, height, PATCH, width, PATCH, 3).permute(1, 3, 5, 0, 2, 4)
    return by_squares(cut.reshape(height, width, -1))


def rows_of(sample: Sample) -> list[tuple[Pixels, ...]]:
    """Return the frames for one call of the encoder: a picture twice, or two frames; the last of an odd number is repeated."""
    pixels = [picture.pixels for picture in sample.pictures]
    if sample.kind != "clip":
        return [(picture, picture) for picture in pixels]
    pixels += pixels[-1:] * (len(pixels) % FRAMES_PER_ROW)
    return list(zip(pixels[::2], pixels[1::2], strict=True))


def shown(sample: Sample, num_squares: int) -> str:
    """Return the placeholders of a sample as in a prompt, with a clip's frames after their times."""
    if sample.kind != "clip":
        return f"{VISION_START}{IMAGE * num_squares}{VISION_END}" * len(sample.pictures)
    times = [index / FRAMES_PER_SECOND for index in range(len(sample.pictures))]
    times += times[-1:] * (len(times) % FRAMES_PER_ROW)
    means = [sum(pair) / FRAMES_PER_ROW for pair in zip(times[::2], times[1::2], strict=True)]
    return "".join(f"<{seconds:.1f} seconds>{VISION_START}{VIDEO * num_squares}{VISION_END}" for seconds in means)


def _tokens(tokenizer: Tokenizer, sample: Sample, num_squares: int, is_text_first: bool) -> tuple[list[int], list[int]]:
    """Return the token ids of a finished conversation exactly as the chat template shows it, and the target of each token."""
    token_ids: list[int] = []
    targets: list[int] = []
    for number, turn in enumerate(sample.turns):
        media = shown(sample, num_squares) if number == 0 else ""
        asked = turn.text + media if is_text_first else media + turn.text
        prompt = tokenizer.encode(f"{TURN_START}user\n{asked}{TURN_END}\n{TURN_START}assistant\n").ids
        answer = tokenizer.encode(f"{turn.answer}{TURN_END}").ids
        after = tokenizer.encode("\n").ids
        token_ids += [*prompt, *answer, *after]
        targets += [IGNORED] * (len(prompt) - 1) + [*answer, IGNORED, *[IGNORED] * len(after)]
    return token_ids, targets


def positions_of(token_ids: Sequence[int], media_ids: Sequence[int], height: int, width: int) -> Tensor:
    """Return [3, tokens]: text continues counting; a picture's squares have their row and column after the previous position,
    and later text continues from the largest of them."""
    found: list[tuple[int, int, int]] = []
    position = place = 0
    squares = [(row, column) for row in range(height // MERGE) for column in range(width // MERGE)]
    while place < len(token_ids):
        if token_ids[place] in media_ids:
            found += [(position, position + row, position + column) for row, column in squares]
            position += max(height, width) // MERGE
            place += len(squares)
        else:
            found.append((position, position, position))
            position += 1
            place += 1
    return torch.tensor(found).T


def _marks(sample: Sample, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return objects and numbers [pictures, squares], parts [pictures, patches]."""
    rows, columns = height // MERGE, width // MERGE
    found = torch.zeros(2, len(rows_of(sample)), rows, columns, dtype=torch.long)
    parts = torch.zeros(len(rows_of(sample)), height, width, dtype=torch.long)
    for index, picture in enumerate(sample.pictures if sample.kind != "clip" else ()):
        for mark in picture.marks:
            place = index, min(int(mark.row * rows), rows - 1), min(int(mark.column * columns), columns - 1)
            found[0][place], found[1][place] = mark.thing, mark.number
            top, left = round((mark.row - mark.height / 2) * height), round((mark.column - mark.width / 2) * width)
            bottom, right = round((mark.row + mark.height / 2) * height), round((mark.column + mark.width / 2) * width)
            parts[index, top:bottom, left:right] = mark.thing
    things, numbers = found.flatten(2)
    return things, numbers, torch.stack([by_squares(picture) for picture in parts])


def batch_of(tokenizer: Tokenizer, samples: Sequence[Sample], shared: Scene, is_text_first: bool = False) -> Batch:
    """Return the batch of samples of one scene."""
    height, width = patch_grid(shared.height, shared.width, shared.num_frames if shared.kind == "clip" else 0)
    num_squares = height * width // MERGE**2
    texts = [_tokens(tokenizer, sample, num_squares, is_text_first) for sample in samples]
    longest = max(range(len(texts)), key=lambda place: len(texts[place][0]))
    num_tokens = len(texts[longest][0])
    token_ids = torch.tensor([tokens + [0] * (num_tokens - len(tokens)) for tokens, _ in texts])
    targets = torch.tensor([wanted + [IGNORED] * (num_tokens - len(wanted)) for _, wanted in texts])
    media_ids = [tokenizer.get_vocab()[token] for token in (IMAGE, VIDEO)]
    things, numbers, parts = zip(*(_marks(sample, height, width) for sample in samples), strict=True)
    return Batch(
        torch.stack([as_patches(row, height, width) for sample in samples for row in rows_of(sample)]),
        height,
        width,
        token_ids,
        targets,
        positions_of(texts[longest][0], media_ids, height, width),
        torch.isin(token_ids[longest], torch.tensor(media_ids)).nonzero().squeeze(1),
        torch.cat(things),
        torch.cat(numbers),
        torch.cat(parts),
    )


def training_batch(
    tokenizer: Tokenizer, kind: str, seed: int, step: int, num_patches: int, max_characters: int, fonts: Sequence[Path]
) -> Batch:
    """Return the batch of `kind` in `step`, with about so many patches; strings have at most so many characters."""
    source = np.random.default_rng((seed, step, KINDS.index(kind)))
    shared = scene(kind, source)
    height, width = patch_grid(shared.height, shared.width, shared.num_frames if kind == "clip" else 0)
    num_rows = {"pair": 2, "clip": (shared.num_frames + 1) // FRAMES_PER_ROW}.get(kind, 1)
    samples = [
        shared.sample(source, is_examined=False, max_characters=max_characters, fonts=fonts)
        for _ in range(max(4, round(num_patches / (height * width * num_rows))))
    ]
    return batch_of(tokenizer, samples, shared, source.random() < SHARE_TEXT_FIRST)
