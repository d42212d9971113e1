"""Patches of the vision model's encoder, and squares of them. Called by `questions.py`, which lays out shapes by it, and by
training.
"""

from engine.media.sizes import shared_size, usual_size

PATCH = 16
MERGE = 2
"""Patches in height and width of a square, of which the text model is given one row."""
MIN_PIXELS, MAX_PIXELS = 4096, 36864
"""Of a picture as the encoder sees it; of all frames of a clip together `MAX_CLIP_PIXELS`."""
MAX_CLIP_PIXELS = 40960


def patch_grid(height: int, width: int, num_frames: int) -> tuple[int, int]:
    """Patches in height and width of a picture (`num_frames` 0) or of a clip's frames, as a server has them."""
    if num_frames:
        sides = shared_size(height, width, PATCH * MERGE, MIN_PIXELS, MAX_CLIP_PIXELS, num_frames)
    else:
        sides = usual_size(height, width, PATCH * MERGE, MIN_PIXELS, MAX_PIXELS, 1)
    return sides[0] // PATCH, sides[1] // PATCH


def square_grid(height: int, width: int) -> tuple[int, int]:
    """Squares in height and width of a picture."""
    rows, columns = patch_grid(height, width, 0)
    return rows // MERGE, columns // MERGE
