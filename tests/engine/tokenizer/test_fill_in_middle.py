"""Fill-in-the-middle prompts in the format of each family."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from engine.errors import RequestError
from engine.messages import TextPrompt
from engine.tokenizer.chat.template import ChatTemplates
from engine.tokenizer.fill_in_middle import _FAMILIES
from engine.tokenizer.prompt_encoder import PromptEncoder
from engine.tokenizer.vocabulary import Vocabulary
from tests.engine.tokenizer.vocabularies import byte_level, llama, vocabulary_of, write_checkpoint


def encoder_of(vocabulary: Vocabulary) -> PromptEncoder:
    templates = ChatTemplates({}, {}, 100, trusts_requests=False)
    return PromptEncoder(vocabulary, templates, vocab_size=vocabulary.size, max_model_len=64)


@pytest.mark.parametrize("family", _FAMILIES)
def test_the_gap_of_each_family(tmp_path: Path, family: tuple[str, str, str]) -> None:
    tokenizer = llama()
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in (*family, "<s>")])
    vocabulary = vocabulary_of(write_checkpoint(tmp_path, tokenizer, tokenizer_config={"bos_token": "<s>"}))
    first = vocabulary.encode("", True)
    for add_special_tokens in (True, False):
        prompt = TextPrompt("def f():", add_special_tokens, "return 1")
        pieces = [vocabulary.pieces[token_id] for token_id in encoder_of(vocabulary).encode(prompt).token_ids]
        before, behind, middle = (pieces.index(piece) for piece in family)
        assert (before, middle) == (len(first) * add_special_tokens, len(pieces) - 1)
        assert pieces[before + 1 : behind] == [vocabulary.pieces[i] for i in vocabulary.encode("def f():", False)]
        assert pieces[behind + 1 : middle] == [vocabulary.pieces[i] for i in vocabulary.encode("return 1", False)]


def test_a_model_without_one(tmp_path: Path) -> None:
    encoder = encoder_of(vocabulary_of(write_checkpoint(tmp_path, byte_level())))
    with pytest.raises(RequestError, match="does not support fill-in-the-middle") as error:
        encoder.encode(TextPrompt("a", True, ""))
    assert (error.value.status, error.value.param) == (400, "suffix")
