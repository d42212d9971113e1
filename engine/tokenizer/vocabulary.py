"""A model's vocabulary: text to token ids, token ids to bytes.

Used by the tokenizer processes. `tokenizer.json` is read by `tokenizers`, and so is `tiktoken.model` (`tiktoken_file.py`),
`tokenizer.model` by `sentencepiece`; code outside this file does not know which. Token ids are in [0, size); the model may have
more (its embedding is often padded), and unused ids have no bytes.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
import tokenizers

from engine.checkpoint.families import media_rules
from engine.checkpoint.record import VOCABULARIES, ModelRecord
from engine.errors import CheckpointError, RequestError
from engine.tokenizer.least_tokens import LeastTokens
from engine.tokenizer.settings import TokenizerSettings
from engine.tokenizer.tiktoken_file import tokenizer_json
from engine.tokenizer.token_bytes import WORD_START, PieceRule, byte_of_piece, is_byte_level, rule_of

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

Encode = Callable[[str, bool], list[int]]
"""(text, whether to add the special tokens around a prompt) -> token ids."""
EncodePair = Callable[[str, str], tuple[list[int], int]]
"""Two texts -> token ids with special tokens, and the first one of the second text's type; 0: none."""

_KEEPING = ("ByteLevel", "Split", "Digits", "Punctuation")  # steps before the merges that keep all bytes
_MAX_TOKEN_ID = (1 << 24) - 1
_OLDER_NAMES = {"<|image@placeholder|>": "image", "<|video@placeholder|>": "video"}  # in Baidu's templates
_UNKNOWN_TEXT = " \u2047 "  # shown by sentencepiece for an unknown piece


@dataclass(slots=True)
class Vocabulary:
    """`pieces[i]` is token i as the tokenizer writes it, None for an unused id.

    `encode` recognizes placeholders of images and video only by a mark, a random name that users cannot guess; their own names
    are ordinary text. Code that trusts a text (a template, a bare prompt) inserts the marks with `marked`.
    """

    pieces: Sequence[str | None]
    rule: PieceRule
    encode: Encode
    special_ids: frozenset[int]
    special_tokens: dict[str, str]  # by role (bos_token, eos_token, ...), for chat templates
    verbatim_ids: frozenset[int] = frozenset()  # tokens with their text as piece
    marks: dict[str, str] = field(default_factory=dict)  # by the name of a placeholder
    encode_pair: EncodePair | None = None  # None: the tokenizer file does not define it
    is_lossless: bool = False  # each byte of a text, except for what NFC composes, is in one of its tokens
    token_bytes: list[bytes] = field(init=False)  # of each token when it follows another
    longest_token_bytes: int = field(init=False)
    _least_tokens: LeastTokens | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.token_bytes = [self._bytes_of(token_id, is_first=False) for token_id in range(self.size)]
        self.longest_token_bytes = max(map(len, self.token_bytes), default=0)

    @classmethod
    def of(cls, model: ModelRecord) -> Vocabulary:
        """Return the vocabulary of the checkpoint. Raises CheckpointError."""
        settings = TokenizerSettings.of(model)
        vision = model.config.vision
        kinds = {vision.video_token_id: "video", vision.image_token_id: "image"} if vision else {}
        if vision and media_rules(vision.kind).text_around:
            kinds[vision.start_token_id] = "start"
        for name, read in zip(VOCABULARIES, (_read_tokenizer_json, _read_sentencepiece, _read_tiktoken), strict=True):
            if name in model.files:
                return read(Path(model.path) / name, model.files[name], settings, kinds)
        raise CheckpointError(f"{model.path} has none of {', '.join(VOCABULARIES)}; copy it from the original model")

    @classmethod
    def without_text(cls, size: int) -> Vocabulary:
        """Return a vocabulary for a model without a tokenizer (dummy weights): it takes only token ids and decodes no text."""

        def encode(text: str, add_special_tokens: bool) -> list[int]:
            raise RequestError("this model has no tokenizer; send the prompt as token ids", param="prompt")

        return cls([None] * size, rule_of(None), encode, frozenset(), {})

    @property
    def size(self) -> int:
        return len(self.pieces)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Id of the end token that the tokenizer names, if any."""
        eos_token = self.special_tokens.get("eos_token")
        return (self.pieces.index(eos_token),) if eos_token and eos_token in self.pieces else ()

    def marked(self, text: str) -> str:
        """Return `text` with the placeholder names replaced by their marks."""
        for name, mark in self.marks.items():
            text = text.replace(name, mark)
        return text

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the tokens in this text; 0: unknown. Takes a hundredth of the time of `encode`."""
        if not self.is_lossless or not unicodedata.is_normalized("NFC", text):
            return 0
        for mark in self.marks.values():  # longer than the name that is counted
            text = text.replace(mark, "")
        if self._least_tokens is None:
            self._least_tokens = LeastTokens(self.token_bytes)
        return self._least_tokens.of(text.encode())

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token inside a text; any id is allowed."""
        return self.token_bytes[token_id] if 0 <= token_id < self.size else b""

    def first_bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token at the beginning of a text."""
        return self._bytes_of(token_id, is_first=True) if 0 <= token_id < self.size else b""

    def end_of(self, token_ids: bytes, num_tokens: int = 32) -> str:
        """Return the text of the last of `token_ids` (int32)."""
        last = memoryview(token_ids)[-4 * num_tokens :].cast("i")
        return b"".join(map(self.bytes_of, last)).decode(errors="replace")

    def _bytes_of(self, token_id: int, is_first: bool) -> bytes:
        piece = self.pieces[token_id]
        if piece is None:
            return b""
        return piece.encode() if token_id in self.verbatim_ids else self.rule(piece, is_first)


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    lstrip: bool = False
    rstrip: bool = False


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is read here; `tokenizers` reads the rest."""

    decoder: dict[str, Any] | None = None
    added_tokens: list[_AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


def _read_tokenizer_json(path: Path, data: bytes, settings: TokenizerSettings, kinds: dict[int, str]) -> Vocabulary:
    """`path`: for error messages, also below. `kinds`: of the placeholders, by token id."""
    try:
        file = msgspec.json.decode(data, type=_TokenizerFile)
        names = {token.content: token.id for token in file.added_tokens if token.id in kinds}
        marks = {name: _mark() for name in names}
        tokenizer = tokenizers.Tokenizer.from_buffer(_renamed(data, marks))
        decoder = file.decoder
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # `tokenizers` raises nothing more specific; a panic is not even an Exception
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    id_of_piece = tokenizer.get_vocab(with_added_tokens=True) | names
    pieces: list[str | None] = [None] * _size(path, id_of_piece.values())
    for piece, token_id in id_of_piece.items():
        pieces[token_id] = piece
    added = tokenizer.get_added_tokens_decoder()
    declared = {id_of_piece[token] for token in _declared_special(settings) if token in id_of_piece}

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_pair(first: str, second: str) -> tuple[list[int], int]:
        encoded = tokenizer.encode(first, second)
        return encoded.ids, encoded.type_ids.index(1) if 1 in encoded.type_ids else 0

    return Vocabulary(
        pieces=pieces,
        rule=rule_of(decoder),
        encode=encode,
        encode_pair=encode_pair,
        special_ids=frozenset(declared | {token_id for token_id, token in added.items() if token.special}),
        special_tokens=settings.special_tokens,
        verbatim_ids=frozenset(added) if is_byte_level(decoder) else frozenset(),
        marks=_with_older_names(marks, {name: kinds[token_id] for name, token_id in names.items()}),
        is_lossless=isinstance(tokenizer.model, tokenizers.models.BPE) and _is_lossless(file),
    )


def _is_lossless(file: _TokenizerFile) -> bool:
    """Return whether nothing of a text is lost before the byte merges; unknown steps count as lossy."""
    steps = _steps(file.pre_tokenizer, "pretokenizers")
    return (
        any(step["type"] == "ByteLevel" for step in steps)
        and all(step["type"] in _KEEPING and step.get("behavior") != "Removed" for step in steps)
        and all(step["type"] == "NFC" for step in _steps(file.normalizer, "normalizers"))
        and not any(token.lstrip or token.rstrip for token in file.added_tokens)
    )


def _steps(section: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if section is None:
        return []
    return [step for each in section[name] for step in _steps(each, name)] if section["type"] == "Sequence" else [section]


def _mark() -> str:
    return f"<|{secrets.token_hex(16)}|>"


def _renamed(data: bytes, marks: dict[str, str]) -> bytes:
    """Return a tokenizer.json with the marks as names of the placeholders; the names occur nowhere else in the file."""
    for name, mark in marks.items():
        if (written := orjson.dumps(name)) not in data:
            data = orjson.dumps(orjson.loads(data))  # it was written with escapes
        data = data.replace(written, orjson.dumps(mark))
    return data


def _with_older_names(marks: dict[str, str], kind_of: dict[str, str]) -> dict[str, str]:
    mark_of_kind = {kind_of[name]: mark for name, mark in marks.items()}
    return marks | {name: mark_of_kind[kind] for name, kind in _OLDER_NAMES.items() if kind in mark_of_kind}


def _read_sentencepiece(path: Path, data: bytes, settings: TokenizerSettings, kinds: dict[int, str]) -> Vocabulary:
    """Read a sentencepiece model. Added and special tokens are cut out of a text first; sentencepiece encodes the rest."""
    from sentencepiece import SentencePieceProcessor  # most models do without it

    try:
        processor = SentencePieceProcessor(model_proto=data or b"\0")  # an empty model is not read, and fails later
    except RuntimeError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    pieces: list[str | None] = [processor.IdToPiece(token_id) for token_id in range(processor.GetPieceSize())]
    control_ids = {token_id for token_id in range(len(pieces)) if processor.IsControl(token_id)}
    pieces += [None] * (_size(path, [token.token_id for token in settings.added_tokens]) - len(pieces))
    for token in settings.added_tokens:
        pieces[token.token_id] = token.content
    id_of_piece = {piece: token_id for token_id, piece in enumerate(pieces) if piece is not None}
    declared = {id_of_piece[token] for token in _declared_special(settings) if token in id_of_piece}
    special_ids = frozenset(control_ids | declared | {token.token_id for token in settings.added_tokens if token.is_special})
    verbatim_ids = (special_ids | {token.token_id for token in settings.added_tokens}) - {processor.unk_id()}
    names = {pieces[token_id] or "": token_id for token_id in kinds if token_id in verbatim_ids}
    marks = {name: _mark() for name in names}
    around = [id_of_piece.get(settings.special_tokens.get(role, ""), -1) for role in ("bos_token", "eos_token")]
    return Vocabulary(
        pieces=pieces,
        rule=_sentencepiece_rule(processor),
        encode=_sentencepiece_encode(
            processor,
            {marks.get(piece, piece): token_id for piece, token_id in id_of_piece.items() if token_id in verbatim_ids},
            before=around[:1] if settings.is_adding_bos and around[0] >= 0 else [],
            after=around[1:] if settings.is_adding_eos and around[1] >= 0 else [],
        ),
        special_ids=special_ids,
        special_tokens=settings.special_tokens,
        verbatim_ids=verbatim_ids,
        marks=_with_older_names(marks, {name: kinds[token_id] for name, token_id in names.items()}),
    )


def _read_tiktoken(path: Path, data: bytes, settings: TokenizerSettings, kinds: dict[int, str]) -> Vocabulary:
    try:
        converted = tokenizer_json(data, settings.added_tokens)
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _read_tokenizer_json(path, converted, settings, kinds)


def _size(path: Path, token_ids: Iterable[int]) -> int:
    """Return the highest id plus one. Raises CheckpointError if a list of this size would take too much memory."""
    highest = max(token_ids, default=-1)
    if highest > _MAX_TOKEN_ID:
        raise CheckpointError(f"{path}: token id {highest} exceeds the limit {_MAX_TOKEN_ID}")
    return highest + 1


def _declared_special(settings: TokenizerSettings) -> set[str]:
    return {*settings.special_tokens.values(), *settings.more_special_tokens}


def _sentencepiece_rule(processor: SentencePieceProcessor) -> PieceRule:
    is_space_prepended = processor.DecodePieces([WORD_START + "a"]) == "a"  # then decoding removes it again
    unknown = processor.IdToPiece(processor.unk_id())

    def rule(piece: str, is_first: bool) -> bytes:
        if piece == unknown:
            return _UNKNOWN_TEXT.encode()
        byte = byte_of_piece(piece)
        if byte is not None:
            return byte.encode("utf-8", "surrogateescape")
        if is_first and is_space_prepended:
            piece = piece.removeprefix(WORD_START)
        return piece.replace(WORD_START, " ").encode()

    return rule


def _sentencepiece_encode(
    processor: SentencePieceProcessor, added: dict[str, int], before: list[int], after: list[int]
) -> Encode:
    longest_first = sorted(added, key=len, reverse=True)
    splitter = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if added else None

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        token_ids = list(before) if add_special_tokens else []
        for index, part in enumerate(splitter.split(text) if splitter else [text]):
            if index % 2:
                token_ids.append(added[part])
            elif part:
                token_ids += processor.EncodeAsIds(part)
        return token_ids + after if add_special_tokens else token_ids

    return encode
