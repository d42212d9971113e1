"""Vocabularies stored as `tiktoken.model`, compared with the published rule: the pair with the lowest rank is merged first."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers

from engine.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from engine.errors import CheckpointError
from engine.tokenizer.vocabulary import Vocabulary
from tests.engine.tokenizer.vocabularies import CORPUS, vocabulary_of
from tests.paths import GOLDEN

WORDS = [b"he", b"an", b"th", b"the", b" the", b"or", b"le", b"qu", b"ick", b"ck", b"ic", b"quick", b" quick", b"\xc3\xa9"]
WORDS += [b"\xe6\x97", b"\xe6\x97\xa5", b"in", b"ing", b"rings", b"ings", b"gs", b"over", b"ver", b"er", b"ov", b" o", b"  "]
RANKS = {token: rank for rank, token in enumerate([*(bytes([255 - byte]) for byte in range(256)), *WORDS])}
FIRST = len(RANKS)
NAMES = {FIRST: "[BOS]", FIRST + 2: "<|im_end|>"}


def write(directory: Path, lines: str) -> None:
    (directory / "tiktoken.model").write_text(lines)
    added = {str(token_id): {"content": name, "special": True} for token_id, name in NAMES.items()}
    settings = {"added_tokens_decoder": added, "eos_token": "<|im_end|>", "tokenizer_class": "TikTokenTokenizer"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_bytes((GOLDEN / "llama" / "config.json").read_bytes())


@pytest.fixture
def vocabulary(tmp_path: Path) -> Vocabulary:
    write(tmp_path, "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items()))
    return vocabulary_of(tmp_path)


def ids_of(word: bytes) -> list[int]:
    """Merge the pair with the lowest rank, the leftmost first, until none is left; a word that is a token is one."""
    if word in RANKS:
        return [RANKS[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        ranks = [RANKS.get(first + second, FIRST) for first, second in itertools.pairwise(parts)]
        if min(ranks, default=FIRST) == FIRST:
            return [RANKS[part] for part in parts]
        place = ranks.index(min(ranks))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def test_pairs_are_merged_by_rank(vocabulary: Vocabulary) -> None:
    splitter = pre_tokenizers.Split(Regex(*PRE_TOKENIZERS["kimi-k2"].patterns), "isolated")
    for text in [*CORPUS, "quick the quick rings over", "日本 é  hers", ""]:
        words = [word for word, _ in splitter.pre_tokenize_str(text)]
        expected = [token_id for word in words for token_id in ids_of(word.encode())]
        assert vocabulary.encode(text, True) == expected
        assert b"".join(map(vocabulary.bytes_of, expected)) == text.encode()


def test_special_tokens_follow_the_others(vocabulary: Vocabulary) -> None:
    assert vocabulary.size == FIRST + 256
    text = f"[BOS]the<|im_end|><|reserved_token_{FIRST + 1}|>"
    assert vocabulary.encode(text, True) == [FIRST, RANKS[b"the"], FIRST + 2, FIRST + 1]
    assert vocabulary.special_ids == frozenset(range(FIRST, FIRST + 256))
    assert vocabulary.eos_token_ids == (FIRST + 2,)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("YQ== 0\nYg==\n", "line 2 is b'Yg==', expected a token in base64 and its rank"),
        (f"YQ== 0\n{'YWFh' * 2000} 1\n", "line 2 has 8002 bytes, at most 4096 are supported"),
        ("YQ== 0\nYg== 2\n", "ranks of 2 tokens should be 0 to 1, each once"),
        ("YQ== 0\nYg== 1\n", "254 of the 256 single bytes are no tokens, the first is 0"),
    ],
)
def test_damaged_file_is_refused(lines: str, problem: str, tmp_path: Path) -> None:
    write(tmp_path, lines)
    with pytest.raises(CheckpointError, match=problem):
        vocabulary_of(tmp_path)
