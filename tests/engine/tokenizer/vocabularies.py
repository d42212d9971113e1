"""Real tokenizers of every family, made by the tests: checkpoint directories with only tokenizer files, and the vocabularies
that the engine reads from them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.record import ModelRecord, small_files
from engine.tokenizer.settings import TokenizerSettings
from engine.tokenizer.vocabulary import Vocabulary
from tests.paths import GOLDEN

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Don't stop!",
    "Tokamak serves language models: actors, rings and shared memory.",
    "Größe, naïve café, übermäßig; Ελληνικά и русский язык.",
    "日本語のテキストと中文文本。 emoji 😀👩‍👩‍👧 flags 🇩🇪 e\u0301",
    "def main():\n    print('hello   world')\n\treturn 0\n",
] * 4

SPECIAL_TOKENS = ["<s>", "</s>", "<|end|>"]


def byte_level() -> Tokenizer:
    """Return a tokenizer like GPT-2's, with a special and an ordinary added token that are not ASCII."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<begin▁é>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<tool é>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def llama() -> Tokenizer:
    """Return a tokenizer like Llama 2's: BPE with byte fallback, spaces as U+2581, one put before the text and removed when
    decoding."""
    byte_pieces = {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    trained = Tokenizer(models.BPE())
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.normalizer = prepend
    trained.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = [piece for piece in model["vocab"] if piece != "<unk>"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | byte_pieces | {piece: 259 + index for index, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = prepend
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


def unigram() -> Tokenizer:
    """Return a Unigram tokenizer with Metaspace."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=[*SPECIAL_TOKENS, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=250, special_tokens=["[UNK]", *SPECIAL_TOKENS], show_progress=False)
    )
    return tokenizer


def word_level() -> Tokenizer:
    """Return a tokenizer without any decoder."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=[*SPECIAL_TOKENS, "<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama": llama,
    "unigram": unigram,
    "word_piece": word_piece,
    "word_level": word_level,
}


def vocabulary_of(directory: Path) -> Vocabulary:
    return Vocabulary.of(_record_of(directory))


def settings_of(directory: Path) -> TokenizerSettings:
    return TokenizerSettings.of(_record_of(directory))


def _record_of(directory: Path) -> ModelRecord:
    """Return a record with a configuration unrelated to the tokenizer."""
    return ModelRecord(str(directory), ModelConfig.read(GOLDEN / "llama"), dict(small_files(directory)))


def write_checkpoint(directory: Path, tokenizer: Tokenizer | bytes, **files: Any) -> Path:
    """Write a directory with a tokenizer.json (or, of bytes, a tokenizer.model) and `files`, by name without .json."""
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, bytes):
        (directory / "tokenizer.model").write_bytes(tokenizer)
    else:
        tokenizer.save(str(directory / "tokenizer.json"))
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def sentencepiece_model() -> bytes:
    """Return a BPE model with byte fallback, like Llama's and Ernie's."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()
