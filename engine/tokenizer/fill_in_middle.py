"""Fill-in-the-middle prompts: the text before and after a gap, in the format that the model was trained on.

Used by `prompt_encoder.py`. A model supports it if its vocabulary has the three tokens of one of the families.
"""

from __future__ import annotations

from engine.errors import RequestError
from engine.tokenizer.vocabulary import Vocabulary

# tokens before the prefix, before the suffix, and before the model's answer
_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


def gap_tokens(vocabulary: Vocabulary) -> tuple[int, int, int]:
    """Return the three tokens of this model. Raises RequestError if it has none."""
    for family in _FAMILIES:
        found = [vocabulary.pieces.index(piece) for piece in family if piece in vocabulary.pieces]
        if len(found) == len(family):
            return found[0], found[1], found[2]
    raise RequestError(
        "suffix: this model does not support fill-in-the-middle; remove it", code="invalid_value", param="suffix"
    )


def with_gap(vocabulary: Vocabulary, prefix: list[int], suffix: list[int], add_special_tokens: bool) -> list[int]:
    """Return the prompt for a gap between two texts, given as tokens."""
    before, behind, middle = gap_tokens(vocabulary)
    begin_token = vocabulary.special_tokens.get("bos_token")
    around = vocabulary.encode("", True)[:1] if add_special_tokens else []
    first = [token_id for token_id in around if vocabulary.pieces[token_id] == begin_token]
    return [*first, before, *prefix, behind, *suffix, middle]
