"""Vocabularies of GGUF files that llama.cpp publishes with the tokens of 46 texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.checkpoint.gguf.file import GgufFile
from engine.checkpoint.gguf.tokenizer import tokenizer_files
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.record import ModelRecord
from engine.tokenizer.vocabulary import Vocabulary
from tests.paths import REPOSITORY
from tests.published_files import published_vocabularies, vectors_of


@pytest.mark.parametrize("path", published_vocabularies(), ids=lambda path: path.stem.removeprefix("ggml-vocab-"))
def test_published_texts_have_the_published_tokens(path: Path) -> None:
    files = tokenizer_files(JsonOptions(GgufFile(path).metadata, path))
    config = ModelConfig.read(REPOSITORY / "tests" / "golden" / "llama")
    vocabulary = Vocabulary.of(ModelRecord(str(path.parent), config, files))
    for text, token_ids in vectors_of(path):
        assert vocabulary.encode(text, False) == token_ids, text
