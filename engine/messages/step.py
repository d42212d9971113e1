"""A batch on its way to the ranks, what comes of it, and the weights that the ranks hold.

scheduler => workers (broadcast)    Step, LoadWeights, ClearWeights, CompileGrammar
worker -> scheduler                 Hello, StepResult, WeightsChanged, GrammarCompiled
"""

from __future__ import annotations

import msgspec

from engine.messages.media import EncoderCall, MediaUnit
from engine.messages.sampling import SamplingParams


class SlotStart(msgspec.Struct, array_like=True, gc=False):
    """Everything a worker must know of a request that takes (or takes again) a batch slot."""

    slot: int
    request_id: str
    token_ids: bytes  # int32: prompt, then the outputs so far
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: bytes  # int32: the block table so far
    wants_prompt_logprobs: bool = False
    units: tuple[MediaUnit, ...] = ()  # in the prompt's order
    unit_rows: bytes = b""  # int32 [units]: first row of each in the encoder arena; -1: not there (yet)
    unit_hashes: tuple[bytes, ...] = ()  # of each unit, as the arena's headers have them
    mask_bounds: bytes = b""  # int32 [prompt tokens, 2]: first and last key that each sees; empty: causal
    max_total_tokens: int = 0  # the sequence has no more than these; no draft goes beyond
    second_start: int = 0  # of a prompt of two texts: the second's first token; 0: there is none
    adapter_slot: int = -1  # of the arena, which has an adapter for all its rows; -1: it has none
    source: str = ""  # whose request it is: masks are made by turns between sources


class Step(msgspec.Struct, tag=True, array_like=True, gc=False):
    """One batch. Row i computes positions [start[i], start[i] + num_tokens[i]) of slot[i], in slot order; where
    `is_sampling[i]` the token after the last position is sampled, appended to the slot's tokens, and returned. A token at a
    position that the scheduler does not know yet is the one the worker sampled itself (one step ahead).

    With drafts a row may go on behind its last position, which then is the slot's last token: up to `num_drafts[i]` draft
    tokens are computed too, and those that equal the tokens sampled before them are accepted. The scheduler does not know how
    many were accepted in a step without its result yet: such a row is_following, it begins at the slot's last token, and
    `start[i]` is the least that this can be."""

    step_id: int
    starts: list[SlotStart]
    slots: bytes  # int32 [n]
    start: bytes  # int32 [n]
    num_tokens: bytes  # int32 [n]
    is_sampling: bytes  # int8 [n]
    block_slots: bytes  # int32 [m]: block-table growth, entry j appends
    block_indexes: bytes  # int32 [m]: block_ids[j] at block_indexes[j] of block_slots[j]
    block_ids: bytes  # int32 [m]
    dispatch_ns: int = 0  # CLOCK_MONOTONIC when it was dispatched
    rank_group_epoch: int = 0  # that all ranks had joined then; ranks of another leave it alone
    encoder: EncoderCall | None = None  # comes before the rows, which read what steps before made
    unit_slots: bytes = b""  # int32 [k]: features that a slot's units got: unit unit_indexes[j] of unit_slots[j] begins
    unit_indexes: bytes = b""  # int32 [k]  at row unit_rows[j] of the encoder arena; -1: it is there no more
    unit_rows: bytes = b""  # int32 [k]
    is_following: bytes = b""  # int8 [n]; empty: none is
    num_drafts: bytes = b""  # int32 [n]: that a row may verify; empty: none
    ended: bytes = b""  # int32 [e, 2]: slots whose sequence, without a salt, is complete, and its tokens; before the starts
    generation: int = 0  # of the prefix cache: when it is emptied, what drafts were made of is forgotten too
    wants_drafts: bytes = b""  # bool [n]: some would pay, now or later: layers that draft keep up with it; empty: none does


class LoadWeights(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Load a checkpoint beside the present one, validate it, then swap. Ranks not named keep theirs."""

    command_id: str
    path: str
    version: int
    ranks: list[int]  # tensor ranks; empty: all
    contents: str = ""  # what it must hold (LoadedWeights.contents); empty: whatever it does


class ClearWeights(msgspec.Struct, tag=True, array_like=True, gc=False):
    command_id: str


class CompileGrammar(msgspec.Struct, tag=True, array_like=True, gc=False):
    """A sequence is going to need it. Steps go on meanwhile: with the first one a rank takes the vocabulary in."""

    number: int
    text: str


class GrammarCompiled(msgspec.Struct, tag=True, array_like=True, gc=False):
    """A rank's answer to CompileGrammar: a sequence that has it delays no other any more."""

    number: int
    rank: int


class WeightsChanged(msgspec.Struct, tag=True, array_like=True, gc=False):
    """A rank's answer to LoadWeights or ClearWeights; on an error it still holds what it held."""

    command_id: str
    rank: int
    version: int  # 0: cleared
    path: str
    error: str = ""
    contents: str = ""  # what tells them from any others; empty: none are loaded


class Hello(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The first message of an actor's life to a peer that must know it (worker to scheduler, cache actor to scheduler)."""

    actor: str
    epoch: int
    weight_version: int = 0
    weight_path: str = ""
    weight_contents: str = ""
    rank_group_epoch: int = 0  # that a rank has joined; 0: it has no peers
    arena_id: int = 0  # of the memory that a rank's KV cache is; another than before: what the blocks held is gone


class PromptLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of prompt tokens [start, start + n) (position 0 has none), row major."""

    start: int
    num_top: int
    token_logprobs: bytes  # float32 [n]
    token_ranks: bytes  # int32 [n]
    top_token_ids: bytes  # int32 [n, num_top]
    top_logprobs: bytes  # float32 [n, num_top]


class StepResult(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Result of a Step: the tokens that its rows sampled, in the Step's row order, `counts[i]` of row i: one of a row that is
    sampling, and one more for each draft that stood. A row whose sequence has all its tokens has none."""

    step_id: int
    rank: int
    weight_version: int
    token_ids: bytes  # int32 [tokens]
    logprobs: bytes  # float32 [tokens]; 0 where the sequence wants none (num_logprobs -1)
    ranks: bytes  # int32 [tokens], likewise
    counts: bytes = b""  # int32 [n]
    top_rows: dict[int, tuple[bytes, bytes]] = {}  # token -> (int32 [k], float32 [k]), best first
    prompt_rows: dict[int, PromptLogprobs] = {}  # row -> this chunk's
    num_tokens: int = 0
    dispatch_ns: int = 0  # the Step's
    received_ns: int = 0
    run_ns: int = 0  # durations
    sample_ns: int = 0
    idle_ns: int = 0  # rank idle before this step
    error: str = ""  # the step was not run: the rank holds no weights
    encoded: list[bytes] = []  # units whose features this step completed
    missing: dict[bytes, str] = {}  # units whose pixels or features are not there, and why: the step was not run
    num_drafts: bytes = b""  # int32 [n]: that were verified; empty: none
    num_wanted: bytes = b""  # int32 [n]: drafts that would pay in the next step; empty: none
    num_wanted_by_new_requests: int = 0  # likewise of sequences that have no row yet
    failed: dict[int, str] = {}  # rows with a grammar beyond the limits, and why: they have no next token
    pooled: dict[int, bytes] = {}  # row that ends its prompt -> float32, where the engine pools
