"""Batches sent to the ranks, their results, and the weights that the ranks hold.

scheduler => workers (broadcast)    Step, LoadWeights, ClearWeights, CompileGrammar
worker -> scheduler                 Hello, StepResult, WeightsChanged, GrammarCompiled
"""

from __future__ import annotations

import msgspec

from engine.messages.media import EncoderCall, MediaUnit
from engine.messages.sampling import SamplingParams


class SlotStart(msgspec.Struct, array_like=True, gc=False):
    """Everything a worker needs for a request that gets a batch slot, for the first time or again."""

    slot: int
    request_id: str
    token_ids: bytes  # int32: prompt, then the outputs so far
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: bytes  # int32: the block table so far; 0: a block that is not needed any more
    wants_prompt_logprobs: bool = False
    units: tuple[MediaUnit, ...] = ()  # in the prompt's order
    unit_rows: bytes = b""  # int32 [units]: first row of each in the encoder arena; -1: not there yet
    unit_hashes: tuple[bytes, ...] = ()  # of each unit, as the arena's headers have them
    mask_bounds: bytes = b""  # int32 [prompt tokens, 2]: first and last key that each sees; empty: causal
    max_total_tokens: int = 0  # limit of the sequence; drafts do not go beyond it
    second_start: int = 0  # of a prompt of two texts: first token of the second; 0: one text
    adapter_slot: int = -1  # of the arena, the same for all its rows; -1: none
    source: str = ""  # source of the request: masks are computed by turns between sources
    other_block_ids: tuple[bytes, ...] = ()  # block tables of further layers (`engine/checkpoint/kv_cache_spec.py`)


class Step(msgspec.Struct, tag=True, array_like=True, gc=False):
    """One batch. Row i computes positions [start[i], start[i] + num_tokens[i]) of slot[i], in slot order. If `is_sampling[i]`,
    the token after the last position is sampled, appended to the slot's tokens, and returned. A token at a position that the
    scheduler does not know yet is the one that the worker sampled itself (one step ahead).

    With drafts, a row may continue after its last position, which is then the slot's last token: up to `num_drafts[i]` draft
    tokens are computed too, and those that equal the sampled tokens before them are accepted. The scheduler does not know how
    many were accepted in a step without a result: the next row of the slot then is `is_following`; it begins at the slot's last
    token, and `start[i]` is the lowest possible value.
    """

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
    rank_group_epoch: int = 0  # epoch that all ranks had joined; ranks of another epoch ignore the step
    encoder: EncoderCall | None = None  # runs before the rows, which read features of earlier steps
    unit_slots: bytes = b""  # int32 [k]: features that a slot's units got: unit unit_indexes[j] of unit_slots[j] begins
    unit_indexes: bytes = b""  # int32 [k]  at row unit_rows[j] of the encoder arena; -1: it is there no more
    unit_rows: bytes = b""  # int32 [k]
    is_following: bytes = b""  # int8 [n]; empty: none is
    num_drafts: bytes = b""  # int32 [n]: drafts that a row may verify; empty: none
    ended: bytes = b""  # int32 [e, 2]: slots with a complete sequence (without a salt), and its tokens; read before the starts
    generation: int = 0  # of the prefix cache: when it is emptied, the sources of drafts are cleared too
    wants_drafts: bytes = b""  # bool [n]: drafts would pay, now or later, so draft layers keep up with the row; empty: none
    block_tables: bytes = b""  # int32 [m]: the block table that block_ids[j] is in; empty: the first
    # int32 [n, 5], with recurrent layers: each row reads the state of slot 0, with so many tokens, and writes another slot; a
    # third one, if it is not 0, gets the state with so many tokens, if the row reaches it. `is_following`: lowest possible
    states: bytes = b""


class LoadWeights(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Load a checkpoint beside the current one, validate it, then swap. Ranks that are not named keep theirs."""

    command_id: str
    path: str
    version: int
    ranks: list[int]  # tensor ranks; empty: all
    contents: str = ""  # what it must contain (LoadedWeights.contents); empty: not checked


class ClearWeights(msgspec.Struct, tag=True, array_like=True, gc=False):
    command_id: str


class CompileGrammar(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Compile a grammar that a sequence will need. Steps continue meanwhile: with its first grammar a rank loads the
    vocabulary."""

    number: int
    text: str


class GrammarCompiled(msgspec.Struct, tag=True, array_like=True, gc=False):
    """A rank's answer to CompileGrammar: a sequence with this grammar no longer delays others."""

    number: int
    rank: int


class WeightsChanged(msgspec.Struct, tag=True, array_like=True, gc=False):
    """A rank's answer to LoadWeights or ClearWeights. On an error it still holds its old weights."""

    command_id: str
    rank: int
    version: int  # 0: cleared
    path: str
    error: str = ""
    contents: str = ""  # fingerprint of the weights; empty: none are loaded


class Hello(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The first message of an actor's life to a peer (worker to scheduler, cache actor to scheduler)."""

    actor: str
    epoch: int
    weight_version: int = 0
    weight_path: str = ""
    weight_contents: str = ""
    rank_group_epoch: int = 0  # epoch that the rank joined; 0: it has no peers
    arena_id: int = 0  # identifies the memory of a rank's KV cache; if it changes, the contents of all blocks are lost


class PromptLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of prompt tokens [start, start + n) (position 0 has none), row major."""

    start: int
    num_top: int
    token_logprobs: bytes  # float32 [n]
    token_ranks: bytes  # int32 [n]
    top_token_ids: bytes  # int32 [n, num_top]
    top_logprobs: bytes  # float32 [n, num_top]


class StepResult(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Result of a Step: the tokens that its rows sampled, in the Step's row order, `counts[i]` of row i: one for a sampling
    row, and one more for each accepted draft. A row has none if its sequence is complete."""

    step_id: int
    rank: int
    weight_version: int
    token_ids: bytes  # int32 [tokens]
    logprobs: bytes  # float32 [tokens]; 0 where the sequence wants none (num_logprobs -1)
    ranks: bytes  # int32 [tokens], the same
    counts: bytes = b""  # int32 [n]
    top_rows: dict[int, tuple[bytes, bytes]] = {}  # token -> (int32 [k], float32 [k]), best first
    prompt_rows: dict[int, PromptLogprobs] = {}  # row -> of this chunk
    num_tokens: int = 0
    dispatch_ns: int = 0  # as in the Step
    received_ns: int = 0
    run_ns: int = 0  # durations
    sample_ns: int = 0
    idle_ns: int = 0  # rank idle before this step
    error: str = ""  # the step was not run: the rank holds no weights
    encoded: list[bytes] = []  # units whose features this step completed
    missing: dict[bytes, str] = {}  # units without pixels or features, and why: the step was not run
    num_drafts: bytes = b""  # int32 [n]: verified drafts; empty: none
    num_wanted: bytes = b""  # int32 [n]: drafts that would pay in the next step; empty: none
    num_wanted_by_new_requests: int = 0  # the same for sequences without a row so far
    failed: dict[int, str] = {}  # rows with a grammar that exceeds the limits, and why: they have no next token
    pooled: dict[int, bytes] = {}  # row that ends its prompt -> float32, if the engine pools
