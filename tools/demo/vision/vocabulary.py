"""The tokenizer of the vision demonstration model: words of its questions and answers as one token, everything else byte by
byte.

Built like the other one (`tools.demo.vocabulary`): text read from a picture is spelled letter by letter.
"""

from tokenizers import Regex, Tokenizer, pre_tokenizers

from tools.demo.vision import questions
from tools.demo.vision.drawing import COLOURS, SHAPES
from tools.demo.vocabulary import PIECE_PATTERN, SPECIAL_TOKENS, tokenizer_of

VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE = "<|image_pad|>"
VIDEO = "<|video_pad|>"


def make_tokenizer() -> Tokenizer:
    """Return a new tokenizer, always the same for the same code."""
    asked = (*questions.READING, *questions.COMPARING_COUNTS, *questions.COMPARING_SHAPES, *questions.WATCHING)
    counted = (wording.format(what=f"{colour} shapes") for wording in questions.COUNTING for colour in COLOURS)
    named = (f"a {name} {name}s {name}" for name in (*SHAPES, *COLOURS))
    answered = (
        ", b, c, d, e and a: the first",
        "no shapes: 0",
        "and: the second",
        "and: the same",
        ": another shape and colour",
        "red, blue",
        "<0.2 seconds>",
    )
    splitter = pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated")
    texts = (*asked, *counted, *named, *COLOURS, *answered, "system user assistant")
    kept = {piece for text in texts for piece, _ in splitter.pre_tokenize_str(text) if len(piece) > 1}
    kept |= {"user", "assistant"}
    return tokenizer_of(sorted(kept), (*SPECIAL_TOKENS, VISION_START, VISION_END, IMAGE, VIDEO))
