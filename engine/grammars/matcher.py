"""llguidance through its C interface, without the GIL: its Python classes hold the GIL while they load a vocabulary, which
takes most of a second in which a rank could compute nothing.

Used only by `matching.py`. The interface is llguidance's `parser/src/ffi.rs`, which the library of its Python package exports
too. Structs have the sizes of version 1.9; `_Library` checks that the defaults are where they are expected.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import TokamakError
from engine.grammars.tokens import GrammarTokens

_NO_TOKEN = 0xFFFFFFFF
_ERROR_BYTES = 1024
_DEFAULTS = (2000, 1_000_000, 200_000, 50_000, 250_000, 500_000)  # of `_Limits`, in its order


class MatcherLimits(msgspec.Struct, frozen=True):
    """Limits of a grammar in the library's own units, so that every machine accepts the same grammars."""

    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_lexer_states: int
    max_grammar_size: int


class _Limits(ctypes.Structure):
    _fields_ = (
        ("max_items_in_row", c_size_t),
        ("initial_lexer_fuel", c_uint64),
        ("step_lexer_fuel", c_uint64),
        ("step_max_items", c_size_t),
        ("max_lexer_states", c_size_t),
        ("max_grammar_size", c_size_t),
        ("precompute_large_lexemes", c_bool),
        ("verbose_errors", c_bool),
    )


class _MatcherInit(ctypes.Structure):
    _fields_ = (
        ("tokenizer", c_void_p),
        ("log_buffer_level", c_uint32),
        ("log_stderr_level", c_uint32),
        ("ff_tokens_ok", c_bool),
        ("backtrack_ok", c_bool),
        ("limits", _Limits),
        ("unknown", c_uint8 * 256),  # room for fields of later versions
    )


class _TokenizerInit(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("vocab_size", c_uint32),
        ("tok_eos", c_uint32),
        ("token_lens", c_void_p),
        ("token_bytes", c_char_p),
        ("tokenizer_json", c_char_p),
        ("tokenize_assumes_string", c_bool),
        ("tokenize_fn", c_void_p),
        ("use_approximate_greedy_tokenize_fn", c_bool),
        ("tokenize_user_data", c_void_p),
        ("slices", c_void_p),
        ("tok_eos_extra", POINTER(c_uint32)),
        ("tok_eos_extra_count", c_uint32),
    )


class _Library:
    """Its functions: those that may take long release the GIL, the others keep it."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("llguidance")
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        found = [path for place in places for path in sorted(Path(place).glob("_lib*.so"))]
        if not found:
            raise TokamakError(
                "structured output needs the llguidance wheel, which is not installed or incomplete; reinstall it with pip"
            )
        slow, quick = ctypes.CDLL(str(found[0])), ctypes.PyDLL(str(found[0]))
        try:
            self.new_tokenizer = _function(slow.llg_new_tokenizer_v2, c_void_p, POINTER(_TokenizerInit), c_char_p, c_size_t)
            self.free_tokenizer = _function(slow.llg_free_tokenizer, None, c_void_p)
            self.new_matcher = _function(slow.llg_new_matcher, c_void_p, POINTER(_MatcherInit), c_char_p, c_char_p)
            self.clone_matcher = _function(slow.llg_clone_matcher, c_void_p, c_void_p)
            self.free_matcher = _function(quick.llg_free_matcher, None, c_void_p)
            self.compute_mask = _function(slow.llg_matcher_compute_mask_into, c_int32, c_void_p, c_void_p, c_size_t)
            self.mask_bytes = _function(quick.llg_matcher_get_mask_byte_size, c_size_t, c_void_p)
            self.consume_tokens = _function(quick.llg_matcher_consume_tokens, c_int32, c_void_p, c_void_p, c_size_t)
            self.validate_tokens = _function(slow.llg_matcher_validate_tokens, c_int32, c_void_p, c_void_p, c_size_t)
            self.rollback = _function(quick.llg_matcher_rollback, c_int32, c_void_p, c_size_t)
            self.is_accepting = _function(quick.llg_matcher_is_accepting, c_bool, c_void_p)
            self.is_stopped = _function(quick.llg_matcher_is_stopped, c_bool, c_void_p)
            self.is_error = _function(quick.llg_matcher_is_error, c_bool, c_void_p)
            self.get_error = _function(quick.llg_matcher_get_error, c_char_p, c_void_p)
            self.set_defaults = _function(quick.llg_constraint_init_set_defaults, None, POINTER(_MatcherInit), c_void_p)
        except AttributeError as error:
            raise TokamakError(
                f"the installed version of llguidance is not supported: {error}; install the version that Tokamak requires"
            ) from error
        init = _MatcherInit()
        self.set_defaults(ctypes.byref(init), None)
        limits = tuple(getattr(init.limits, name) for name, _ in _Limits._fields_)
        if limits != (*_DEFAULTS, True, True):
            raise TokamakError(
                f"the installed version of llguidance is not supported: its limits are {limits}; install the version that "
                "Tokamak requires"
            )


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


@lru_cache(maxsize=1)
def _library() -> _Library:
    return _Library()


class MatcherVocabulary:
    """A vocabulary in the library: about 200 bytes per token, built once per process."""

    def __init__(self, tokens: GrammarTokens) -> None:
        self._library = _library()
        extra = (c_uint32 * max(1, len(tokens.end_ids)))(*tokens.end_ids[1:])
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit),
            vocab_size=tokens.num_tokens,
            tok_eos=tokens.end_ids[0] if tokens.end_ids else _NO_TOKEN,
            token_lens=ctypes.cast(ctypes.c_char_p(tokens.sizes), c_void_p),
            token_bytes=tokens.data,
            # never called: the model also chooses tokens that are certain (`no_forcing`)
            use_approximate_greedy_tokenize_fn=True,
            tok_eos_extra=ctypes.cast(extra, POINTER(c_uint32)) if len(tokens.end_ids) > 1 else None,
            tok_eos_extra_count=max(0, len(tokens.end_ids) - 1),
        )
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self.address = self._library.new_tokenizer(ctypes.byref(init), error, _ERROR_BYTES)
        if not self.address:
            raise TokamakError(f"llguidance rejected the vocabulary: {error.value.decode(errors='replace')}")

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self._library.free_tokenizer(self.address)

    def matcher(self, grammar: str, limits: MatcherLimits) -> Matcher:
        """Return the matcher of Lark in llguidance's dialect, without NUL; `is_error` says whether it is invalid."""
        init = _MatcherInit()
        self._library.set_defaults(ctypes.byref(init), self.address)
        init.log_stderr_level = 0
        for name in limits.__struct_fields__:
            setattr(init.limits, name, getattr(limits, name))
        init.limits.verbose_errors = False
        return Matcher(self, self._library.new_matcher(ctypes.byref(init), b"lark", grammar.encode()))


class Matcher:
    """Position of an answer in a grammar. Nothing is raised: an error is a state, which stays. Not thread-safe."""

    __slots__ = ("_address", "_library", "_vocabulary")

    def __init__(self, vocabulary: MatcherVocabulary, address: int) -> None:
        self._library, self._vocabulary, self._address = _library(), vocabulary, address

    def __del__(self) -> None:
        if self._address:
            self._library.free_matcher(self._address)

    def _take_address(self) -> int:
        """Return the library's matcher; the caller owns it from now on."""
        address, self._address = self._address, 0
        return address

    def copy(self) -> Matcher:
        return Matcher(self._vocabulary, self._library.clone_matcher(self._address))

    def is_error(self) -> bool:
        return bool(self._library.is_error(self._address))

    def error(self) -> str:
        """The error; empty: none."""
        return (self._library.get_error(self._address) or b"").decode(errors="replace")

    def is_accepting(self) -> bool:
        """Return whether the answer may end here."""
        return bool(self._library.is_accepting(self._address))

    def is_stopped(self) -> bool:
        """Return whether it must end here; also in an error state."""
        return bool(self._library.is_stopped(self._address))

    def consume(self, *token_ids: int) -> bool:
        """Take these tokens; return whether they were allowed."""
        return not self._library.consume_tokens(self._address, _ids(token_ids), len(token_ids))

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens are allowed, from the first on."""
        return max(0, int(self._library.validate_tokens(self._address, _ids(token_ids), len(token_ids))))

    def rollback(self, num_tokens: int) -> bool:
        return not self._library.rollback(self._address, num_tokens)

    def fill_mask(self, address: int, num_bytes: int) -> None:
        """Write a bit for each allowed token to `address`; `num_bytes` for the whole vocabulary, in 32-bit words."""
        self._library.compute_mask(self._address, address, num_bytes)

    def mask(self) -> bytes:
        """Return the mask as bytes."""
        buffer = ctypes.create_string_buffer(self._library.mask_bytes(self._address))
        self.fill_mask(ctypes.addressof(buffer), len(buffer))
        return buffer.raw


def _ids(token_ids: Sequence[int]) -> Any:
    return (c_uint32 * len(token_ids))(*token_ids)
