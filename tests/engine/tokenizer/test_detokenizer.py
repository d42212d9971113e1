"""Incremental decoding: compared with the libraries, at every split, with stop strings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.messages import TextOptions
from engine.tokenizer.detokenizer import Detokenizer, decode
from engine.tokenizer.vocabulary import Vocabulary
from tests.engine.tokenizer.vocabularies import (
    CORPUS,
    TOKENIZERS,
    byte_level,
    llama,
    sentencepiece_model,
    vocabulary_of,
    write_checkpoint,
)

many = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
texts = st.text(max_size=40) | st.sampled_from([*CORPUS, "😀👩‍👩‍👧 e\u0301 日本", "", " ", "  a  ", "\x00\u2028\ufffd"])
id_lists = st.lists(st.integers(min_value=0, max_value=520), max_size=30)


@pytest.fixture(scope="module", params=TOKENIZERS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Vocabulary]:
    tokenizer = TOKENIZERS[request.param]()
    return tokenizer, vocabulary_of(write_checkpoint(tmp_path_factory.mktemp(request.param), tokenizer))


@pytest.fixture(scope="module")
def bytes_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return vocabulary_of(write_checkpoint(tmp_path_factory.mktemp("bytes"), byte_level()))


def cuts(items: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    """Yield all at once, one by one, and every split in two."""
    yield [items]
    yield [items[i : i + 1] for i in range(len(items))]
    for place in range(len(items) + 1):
        yield [items[:place], items[place:]]


@many
@given(text=texts, skips=st.booleans())
def test_text_equals_that_of_the_library(family: tuple[Tokenizer, Vocabulary], text: str, skips: bool) -> None:
    tokenizer, vocabulary = family
    token_ids = tokenizer.encode(text).ids
    assert decode(vocabulary, token_ids, skip_special_tokens=skips) == tokenizer.decode(token_ids, skip_special_tokens=skips)


@many
@given(token_ids=id_lists, skips=st.booleans())
def test_any_ids_decode_as_in_the_library(family: tuple[Tokenizer, Vocabulary], token_ids: list[int], skips: bool) -> None:
    tokenizer, vocabulary = family
    expected = tokenizer.decode([i for i in token_ids if i not in odd_ids(vocabulary)], skip_special_tokens=skips)
    got = decode(vocabulary, [i for i in token_ids if i not in odd_ids(vocabulary)], skip_special_tokens=skips)
    if any(piece and piece.startswith("<0x") for piece in vocabulary.pieces) and "\ufffd" in expected + got:
        return  # the library spoils a whole run of byte pieces for one bad byte, which no stream can know beforehand
    assert got == expected


def odd_ids(vocabulary: Vocabulary) -> frozenset[int]:
    """Return added tokens that are not ASCII: the library takes some of their characters for bytes, we show them unchanged."""
    return frozenset(token_id for token_id in vocabulary.verbatim_ids if not (vocabulary.pieces[token_id] or "").isascii())


@many
@given(
    token_ids=id_lists,
    stops=st.lists(st.text(alphabet="aeo \ufffdt", min_size=1, max_size=3), max_size=3),
    least=st.integers(0, 9),
)
def test_released_text_depends_on_the_tokens_alone(
    family: tuple[Tokenizer, Vocabulary], token_ids: list[int], stops: list[str], least: int
) -> None:
    """The same text is released after each n tokens, however they were grouped; released text never changes."""
    _, vocabulary = family
    options = TextOptions(stop=stops)
    released: dict[int, str] = {}
    for pushes in cuts(token_ids):
        detokenizer = Detokenizer(vocabulary, options, min_tokens=least)
        text = ""
        for push in pushes:
            text += detokenizer.push(push)
            assert released.setdefault(detokenizer.num_tokens, text) == text
        text += detokenizer.finish()
        assert released.setdefault(-1, text) == text
    assert all(released[-1].startswith(text) for text in released.values())


def test_never_half_a_character(bytes_vocabulary: Vocabulary) -> None:
    text = "a😀日e\u0301"
    token_ids = [bytes_vocabulary.token_bytes.index(bytes([byte])) for byte in text.encode()]
    detokenizer = Detokenizer(bytes_vocabulary, TextOptions())
    pushes = [detokenizer.push([token_id]) for token_id in token_ids]
    assert [push for push in pushes if push] == list(text)
    assert detokenizer.finish() == ""


def test_an_incomplete_character_at_the_end_is_replaced(bytes_vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(bytes_vocabulary, TextOptions())
    token_ids = [bytes_vocabulary.token_bytes.index(bytes([byte])) for byte in b"a\xf0\x9f\x98"]
    assert detokenizer.push(token_ids) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_continuation_keeps_its_leading_space(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(write_checkpoint(tmp_path, llama()))
    token_ids = vocabulary.encode("The quick", False)
    assert Detokenizer(vocabulary, TextOptions(), is_continuation=True).push(token_ids) == " The quick"
    assert Detokenizer(vocabulary, TextOptions(), is_continuation=False).push(token_ids) == "The quick"


def test_special_tokens_are_shown_only_when_asked_for(bytes_vocabulary: Vocabulary) -> None:
    token_ids = bytes_vocabulary.encode("a<|end|>b<tool é>", False)
    assert Detokenizer(bytes_vocabulary, TextOptions()).push(token_ids) == "ab<tool é>"
    assert Detokenizer(bytes_vocabulary, TextOptions(skip_special_tokens=False)).push(token_ids) == "a<|end|>b<tool é>"


@many
@given(text=texts)
def test_sentencepiece_text_equals_that_of_the_library(sentencepieces: tuple[Vocabulary, bytes], text: str) -> None:
    vocabulary, model = sentencepieces
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    token_ids = processor.EncodeAsIds(text)
    assert decode(vocabulary, token_ids) == processor.Decode(token_ids)


@pytest.fixture(scope="module")
def sentencepieces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Vocabulary, bytes]:
    model = sentencepiece_model()
    return vocabulary_of(write_checkpoint(tmp_path_factory.mktemp("model"), model)), model


# -------------------------------------------------------------------------------------------------------- stop strings


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Return (end, stop string) by the plain definition: the match that ends first, the longest of those."""
    ends = [(end, stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    return min(ends, key=lambda match: (match[0], -len(match[1])), default=None)


@many
@given(text=st.text(alphabet="ab€", max_size=25), stops=st.lists(st.text(alphabet="ab€", min_size=1, max_size=5), max_size=4))
@example(text="aabaabaaab", stops=["aabaaa"])
@example(text="aab", stops=["aa", "ab", "aab"])
@pytest.mark.parametrize("is_included", [False, True])
def test_stop_strings_cut_at_the_first_complete_match(
    bytes_vocabulary: Vocabulary, text: str, stops: list[str], is_included: bool
) -> None:
    token_ids = [bytes_vocabulary.token_bytes.index(bytes([byte])) for byte in text.encode()]
    detokenizer = Detokenizer(bytes_vocabulary, TextOptions(stop=stops, include_stop_str_in_output=is_included))
    released = [detokenizer.push([token_id]) for token_id in token_ids]
    match = first_stop(text, stops)
    if match is None:
        assert detokenizer.stop_string is None
        assert "".join(released) + detokenizer.finish() == text
        return
    end, stop = match
    assert detokenizer.stop_string == stop
    assert detokenizer.num_tokens == len(text[:end].encode())
    assert "".join(released) + detokenizer.finish() == text[: end if is_included else end - len(stop)]


def test_only_possible_stop_strings_are_held_back(bytes_vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(bytes_vocabulary, TextOptions(stop=["</tool>"]))
    tokens = [bytes_vocabulary.encode(text, False) for text in ("x <", "/to", "day </", "tool", "> more")]
    assert [detokenizer.push(token_ids) for token_ids in tokens] == ["x ", "", "</today ", "", ""]
    assert detokenizer.stop_string == "</tool>"
    assert detokenizer.finish() == ""


def test_no_stop_before_min_tokens(bytes_vocabulary: Vocabulary) -> None:
    token_ids = [bytes_vocabulary.token_bytes.index(byte) for byte in (b"x", b"a", b"b", b"a", b"b", b"c")]
    for least, expected, num_tokens in ((0, "x", 3), (3, "x", 3), (4, "xab", 5), (6, "xababc", 6)):
        detokenizer = Detokenizer(bytes_vocabulary, TextOptions(stop=["ab"]), min_tokens=least)
        text = "".join(itertools.chain(map(detokenizer.push, ([token_id] for token_id in token_ids)), [detokenizer.finish()]))
        assert (text, detokenizer.num_tokens) == (expected, num_tokens)
