"""The tokenizer of the demonstration model: words of fixed phrases as one token, everything else byte by byte.

Called by `train.py`. It is a byte-level BPE without merges and with `ignore_merges`: a piece of text in the vocabulary is one
token, any other piece is its bytes. So " scheduler" is one token and keeps Tokamak's answers short, while "planet" is six
letters and "357" three digits, as needed for reversing and adding. Any UTF-8 text survives encoding and decoding.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tools.demo import data
from tools.demo.conversations import training_conversations
from tools.demo.template import rendered

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
THINK = "<think>"
MARKERS = ("<tool_call>", "</tool_call>", THINK, "</think>")
"""One token each, but part of an answer's text, as in Qwen3."""
PIECE_PATTERN = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s"
"""One digit, one word, one run of punctuation (the latter two with the space before it), or one white space character."""

_NUM_SAMPLE_CONVERSATIONS = 36_000
_MIN_USES = 8
_SIGNS_OF_TABLES = ("\u00d7", "÷")
_LETTER = re.compile("[A-Za-z]")


def _whole_tokens() -> list[str]:
    """Return the pieces that become one token each: words of the phrases, their punctuation, and a space with one letter."""
    splitter = pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated")
    uses: Counter[str] = Counter()
    for conversation in islice(training_conversations(seed=0), _NUM_SAMPLE_CONVERSATIONS):
        for text in re.split("|".join(map(re.escape, (*SPECIAL_TOKENS, *MARKERS))), rendered(conversation)):
            uses.update(piece for piece, _ in splitter.pre_tokenize_str(text))
    kept = {f" {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"}
    kept |= {"system", "user", "assistant"}
    for piece, num_uses in uses.items():
        is_phrase = piece.strip().lower() in data.PHRASE_WORDS or not _LETTER.search(piece) or piece.strip() == "Tokamak"
        is_plain = piece.isascii() or piece.strip() in _SIGNS_OF_TABLES
        if len(piece) > 1 and num_uses >= _MIN_USES and is_phrase and is_plain:
            kept.add(piece)
    return sorted(kept)


def make_tokenizer() -> Tokenizer:
    """Return a new tokenizer, always the same for the same code."""
    return tokenizer_of(_whole_tokens(), SPECIAL_TOKENS, MARKERS)


def tokenizer_of(pieces_kept_whole: Sequence[str], special_tokens: Sequence[str], markers: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer with these tokens and single bytes; `markers` are indivisible like special tokens, but shown in
    answers."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {token: token_id for token_id, token in enumerate(special_tokens)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    for piece in pieces_kept_whole:
        vocabulary["".join(symbol for symbol, _ in byte_level.pre_tokenize_str(piece))] = len(vocabulary)
    for marker in markers:
        vocabulary[marker] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    pieces = pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
