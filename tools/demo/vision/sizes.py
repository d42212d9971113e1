"""Patches of the vision model's encoder, and squares of patches. Used by `questions.py` to lay out shapes, and in training."""

from engine.media.sizes import shared_size, usual_size

PATCH = 16
MERGE = 2
"""Patches in height and width of a square, which is one token of the text model."""
MIN_PIXELS, MAX_PIXELS = 4096, 36864
"""Maximum pixels of a picture for the encoder; `MAX_CLIP_PIXELS` for all frames of a clip together."""
MAX_CLIP_PIXELS = 40960


def patch_grid(height: int, width: int, num_frames: int) -> tuple[int, int]:
    """Return patches in height and width of a picture (`num_frames` 0) or of a clip's frames, as in a server."""
    if num_frames:
        sides = shared_size(height, width, PATCH * MERGE, MIN_PIXELS, MAX_CLIP_PIXELS, num_frames)
    else:
        sides = usual_size(height, width, PATCH * MERGE, MIN_PIXELS, MAX_PIXELS, 1)
    return sides[0] // PATCH, sides[1] // PATCH


def square_grid(height: int, width: int) -> tuple[int, int]:
    """Return squares in height and width of a picture."""
    rows, columns = patch_grid(height, width, 0)
    return rows // MERGE, columns // MERGE
