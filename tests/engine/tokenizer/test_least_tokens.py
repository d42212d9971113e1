"""A lower bound on the tokens of a text, high enough to refuse too long ones before they are encoded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from engine.errors import RequestError
from engine.messages import TextPrompt
from engine.tokenizer.chat.template import ChatTemplates
from engine.tokenizer.prompt_encoder import PromptEncoder
from engine.tokenizer.vocabulary import Vocabulary
from tests.engine.tokenizer.vocabularies import CORPUS, TOKENIZERS, byte_level, vocabulary_of, write_checkpoint
from tests.paths import GOLDEN

QWEN = vocabulary_of(GOLDEN / "qwen3")
PARTS = ["x", "q", " ", "\n", "the ", "quick", "<|im_end|>", "ж", "日", "e\u0301", "é", "\u0301", "==", "\x00", *CORPUS[:5]]


def encoder_of(vocabulary: Vocabulary, max_model_len: int) -> PromptEncoder:
    templates = ChatTemplates({}, {}, 1 << 20, trusts_requests=False)
    return PromptEncoder(vocabulary, templates, vocab_size=vocabulary.size, max_model_len=max_model_len)


@given(st.lists(st.tuples(st.sampled_from(PARTS) | st.text(max_size=5), st.integers(1, 40)), max_size=12))
def test_no_text_has_fewer(parts: list[tuple[str, int]]) -> None:
    text = "".join(part * count for part, count in parts)
    assert QWEN.least_tokens(text) <= len(QWEN.encode(text, False))


def test_too_long_text_is_refused_by_its_bytes() -> None:
    text = "x" * 1_000_000
    assert QWEN.is_lossless
    assert QWEN.least_tokens(text) > 4096
    with pytest.raises(RequestError, match=r"1000000 bytes, which are at least \d+ tokens") as refused:
        encoder_of(QWEN, 4096).encode(TextPrompt(text), must_fit=True)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


def test_counted_or_truncated_text_is_always_encoded() -> None:
    assert len(encoder_of(QWEN, 16).encode(TextPrompt("x" * 1000)).token_ids) > 16


def losing() -> dict[str, Tokenizer]:
    """Return tokenizers by the step that loses a part of a text, or may."""
    found = {name: byte_level() for name in ("strip", "replace", "split", "added")}
    found["strip"].normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    found["replace"].normalizer = normalizers.Replace("x", "")
    found["split"].pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("x", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    found["added"].add_special_tokens([AddedToken("<pad>", rstrip=True, special=True)])
    return found | {name: make() for name, make in TOKENIZERS.items() if name != "byte_level"}


LOSING = losing()


@pytest.mark.parametrize("name", LOSING)
def test_lossy_tokenizer_has_no_bound(name: str, tmp_path: Path) -> None:
    assert vocabulary_of(write_checkpoint(tmp_path, LOSING[name])).least_tokens("x" * 10_000) == 0


def test_lossless_tokenizer_has_a_bound(tmp_path: Path) -> None:
    assert vocabulary_of(write_checkpoint(tmp_path, byte_level())).least_tokens("x" * 10_000) > 100


def test_text_that_is_not_composed_may_become_shorter() -> None:
    assert QWEN.least_tokens("e\u0301" * 1000) == 0 < QWEN.least_tokens("é" * 1000)
