"""Every message that crosses a process boundary, in the order of a request's way.

Used by all actors. One msgspec tagged struct per message, encoded as MessagePack by `encode` and decoded by `decode`;
arrays travel inside as raw little-endian bytes (int32 token ids and block ids, float32 log-probabilities), made and read
with numpy. Nothing here is ever pickled.

    api -> tokenizer    Submit, Abort, Tokenize, Detokenize
    tokenizer -> scheduler    Request, Abort
    scheduler => workers (broadcast)    Step, LoadWeights, ClearWeights
    worker -> scheduler    Hello, StepResult, WeightsChanged
    scheduler -> tokenizer    Outputs, Rejected
    tokenizer -> api    Deltas, Rejected, Tokenized, Detokenized
    scheduler <-> cache messenger    BlocksStored, BlocksRemoved, BlocksCleared, BlocksMove, BlocksMoved
    supervisor -> actor (control ring)    Command structs; the answer is `Reply`, over ZeroMQ
"""

from __future__ import annotations

import msgspec

# --------------------------------------------------------------------------------------------------------- parts


class SamplingParams(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How one sample of a request is drawn. The tokenizer resolves what needs a vocabulary or a model limit
    (`max_tokens`, `stop_token_ids` with the model's end tokens unless `ignore_eos`, `bad_words_token_ids`)."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # u64, always set by the edge, so that a replay draws the same numbers
    sample_index: int = 0  # index among the n samples of one prompt
    min_tokens: int = 0
    max_tokens: int = -1  # -1: up to the model's limit (resolved by the tokenizer)
    ignore_eos: bool = False
    num_logprobs: int = -1  # -1: none; 0: the sampled token only; k: the k best besides
    num_prompt_logprobs: int = -1  # likewise, for each prompt token after the first
    stop_token_ids: list[int] = []
    allowed_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    logit_bias: dict[int, float] = {}


class TextOptions(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the tokenizer does with a request's text."""

    stop: list[str] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: list[str] = []
    return_prompt_token_ids: bool = False  # the first Delta carries them


class TextPrompt(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    text: str
    add_special_tokens: bool = True


class TokensPrompt(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    token_ids: bytes  # int32


class ChatPrompt(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    """A conversation as the client sent it, to be rendered by the chat template. JSON text of each part."""

    messages: bytes  # JSON list of {"role", "content", ...}
    tools: bytes = b""  # JSON list, or empty
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str = ""  # empty: the model's
    chat_template_kwargs: bytes = b""  # JSON object, or empty


Prompt = TextPrompt | TokensPrompt | ChatPrompt


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log-probability of one token and the best alternatives at its position. Ranks start at 1."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: list[int] = []  # best first
    top_logprobs: list[float] = []


class DecodedLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`TokenLogprobs` with each token's bytes, as the edge shows them (the token itself first, then the best)."""

    token_id: int
    logprob: float
    rank: int
    token: bytes
    top_token_ids: list[int] = []
    top_logprobs: list[float] = []
    top_tokens: list[bytes] = []


# ------------------------------------------------------------------------------------------------ api -> tokenizer


class Submit(msgspec.Struct, tag=True, array_like=True, gc=False):
    """One sample of a request: the edge's truth, sent again with `attempt + 1` whenever an actor behind it comes back."""

    request_id: str  # unique in the run; samples of one prompt share `group_id`
    api: str  # actor name to answer to
    api_epoch: int
    attempt: int
    prompt: Prompt
    sampling: SamplingParams
    text: TextOptions
    resume_token_ids: bytes = b""  # int32, tokens that the edge already has
    has_prompt_logprobs: bool = False  # the edge already has them (a resubmission)
    group_id: str = ""
    priority: int = 0  # lower runs first
    arrival_ns: int = 0  # CLOCK_MONOTONIC
    deadline_ns: int = 0  # CLOCK_MONOTONIC, 0: none


class Abort(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Forget a request: its client left, its deadline passed, or the tokenizer found a stop string."""

    request_id: str
    attempt: int  # attempts up to this one
    reason: str = "abort"  # "abort" | "stop" | "timeout"


class Tokenize(msgspec.Struct, tag=True, array_like=True, gc=False):
    call_id: str
    api: str
    prompt: Prompt


class Detokenize(msgspec.Struct, tag=True, array_like=True, gc=False):
    call_id: str
    api: str
    token_ids: bytes  # int32


# ------------------------------------------------------------------------------------------ tokenizer -> scheduler


class Request(msgspec.Struct, tag=True, array_like=True, gc=False):
    """A tokenized sample, ready to be scheduled."""

    request_id: str
    api: str
    api_epoch: int
    tokenizer: str
    attempt: int
    prompt_token_ids: bytes  # int32
    resume_token_ids: bytes  # int32
    sampling: SamplingParams
    has_prompt_logprobs: bool = False
    group_id: str = ""
    priority: int = 0
    arrival_ns: int = 0
    deadline_ns: int = 0


# ---------------------------------------------------------------------------------- scheduler => workers, and back


class SlotStart(msgspec.Struct, array_like=True, gc=False):
    """Everything a worker must know of a request that takes (or takes again) a batch slot."""

    slot: int
    request_id: str
    token_ids: bytes  # int32: prompt, then the outputs so far
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: bytes  # int32: the block table so far
    has_prompt_logprobs: bool = False  # do not compute them again


class Step(msgspec.Struct, tag=True, array_like=True, gc=False):
    """One batch. Row i computes positions [start[i], start[i] + num_tokens[i]) of slot[i], in slot order; where
    `is_sampling[i]` the token after the last position is sampled, appended to the slot's tokens, and returned. A token at a
    position that the scheduler does not know yet is the one the worker sampled itself (one step ahead)."""

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


class LoadWeights(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Load a checkpoint beside the present one, validate it, then swap. Ranks not named keep theirs."""

    command_id: str
    path: str
    version: int
    ranks: list[int]  # empty: all


class ClearWeights(msgspec.Struct, tag=True, array_like=True, gc=False):
    command_id: str


class WeightsChanged(msgspec.Struct, tag=True, array_like=True, gc=False):
    """A rank's answer to LoadWeights or ClearWeights; on an error it still holds what it held."""

    command_id: str
    rank: int
    version: int  # 0: cleared
    path: str
    error: str = ""


class Hello(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The first message of an actor's life to a peer that must know it (worker to scheduler, cache messenger to scheduler)."""

    actor: str
    epoch: int
    weight_version: int = 0
    weight_path: str = ""


class PromptLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of prompt tokens [start, start + n) (position 0 has none), row major."""

    start: int
    num_top: int
    token_logprobs: bytes  # float32 [n]
    token_ranks: bytes  # int32 [n]
    top_token_ids: bytes  # int32 [n, num_top]
    top_logprobs: bytes  # float32 [n, num_top]


class StepResult(msgspec.Struct, tag=True, array_like=True, gc=False):
    """What came of a Step: row i's sampled token or -1, in the Step's row order."""

    step_id: int
    rank: int
    weight_version: int
    token_ids: bytes  # int32 [n]
    logprobs: bytes  # float32 [n], of the sampled tokens; 0 where the sample wants none (num_logprobs -1)
    ranks: bytes  # int32 [n], likewise
    top_rows: dict[int, tuple[bytes, bytes]] = {}  # row -> (int32 [k], float32 [k]), best first
    prompt_rows: dict[int, PromptLogprobs] = {}  # row -> this chunk's
    num_tokens: int = 0
    dispatch_ns: int = 0  # the Step's
    received_ns: int = 0
    run_ns: int = 0  # durations
    sample_ns: int = 0
    idle_ns: int = 0  # rank idle before this step


# ------------------------------------------------------------------------------------------ scheduler -> tokenizer


class Output(msgspec.Struct, array_like=True, gc=False):
    request_id: str
    attempt: int
    token_ids: list[int]
    finish_reason: str = ""  # "" | "stop" | "length" | "abort" | "timeout"
    stop_token_id: int = -1  # the stop token that ended it (the last of token_ids)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    weight_version: int = 0
    logprobs: list[TokenLogprobs] = []  # one per token; all 0 where the sample wants none
    prompt_logprobs: list[TokenLogprobs] | None = None  # whole prompt after its first token, once


class Outputs(msgspec.Struct, tag=True, array_like=True, gc=False):
    """All that one step brought for the requests of one tokenizer: one record a step and peer."""

    outputs: list[Output]


class Rejected(msgspec.Struct, tag=True, array_like=True, gc=False):
    """A request that does not run (any more): an HTTP status with OpenAI's error fields."""

    request_id: str
    attempt: int
    api: str
    status: int
    message: str
    code: str = ""
    param: str = ""
    retry_after_s: int = 0


# ------------------------------------------------------------------------------------------------ tokenizer -> api


class Delta(msgspec.Struct, array_like=True, gc=False):
    """Tokens and the text they released (text held back for half characters or possible stop strings comes later)."""

    request_id: str
    attempt: int
    token_ids: list[int]
    text: str
    finish_reason: str = ""  # "" | "stop" | "length" | "abort" | "timeout"
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    weight_version: int = 0
    logprobs: list[DecodedLogprobs] = []  # with each token; token bytes only where log-probabilities were asked for
    prompt_token_ids: bytes = b""  # int32, in the first Delta where asked for
    prompt_logprobs: list[DecodedLogprobs] | None = None
    prompt_tokens: list[bytes] | None = None  # bytes of each prompt token, with prompt_logprobs


class Deltas(msgspec.Struct, tag=True, array_like=True, gc=False):
    deltas: list[Delta]


class Tokenized(msgspec.Struct, tag=True, array_like=True, gc=False):
    call_id: str
    token_ids: bytes  # int32
    max_model_len: int
    tokens: list[bytes] = []


class Detokenized(msgspec.Struct, tag=True, array_like=True, gc=False):
    call_id: str
    text: str


# ------------------------------------------------------------------------------------ scheduler <-> cache messenger


class BlocksStored(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Blocks that became reusable: a chain of full blocks."""

    block_hashes: list[bytes]
    parent_hash: bytes  # empty: the chain starts here
    token_ids: bytes  # int32 [len(block_hashes) * block_size]
    block_size: int
    block_ids: list[int] = []


class BlocksRemoved(msgspec.Struct, tag=True, array_like=True, gc=False):
    block_hashes: list[bytes]


class BlocksCleared(msgspec.Struct, tag=True, array_like=True, gc=False):
    pass


class BlocksMove(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Copy blocks between tiers ("device", "host", "disk", "remote"); answered by BlocksMoved. Only "device" exists yet,
    a move to another tier is answered with an error."""

    move_id: int
    source: str
    target: str
    block_hashes: list[bytes]
    block_ids: list[int]  # on the device tier


class BlocksMoved(msgspec.Struct, tag=True, array_like=True, gc=False):
    move_id: int
    error: str = ""


# ------------------------------------------------------------------------------------------------ control, events


class ListActors(msgspec.Struct, tag=True, frozen=True):
    pass


class RestartActor(msgspec.Struct, tag=True, frozen=True):
    actor: str


class Pause(msgspec.Struct, tag=True, frozen=True):
    mode: str = "abort"  # "abort" | "wait" | "requeue" | "keep"
    level: str = "pause"  # "pause" | "sleep" (sleep also clears the weights)


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Resume, and wake: after a sleep it loads the weights that were in use."""


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    pass


class ReloadWeights(msgspec.Struct, tag=True, frozen=True):
    path: str = ""  # empty: the ones in use, read anew
    mode: str = "requeue"  # "abort" | "wait" | "requeue" | "keep"
    ranks: list[int] = []  # empty: the whole engine


class DropWeights(msgspec.Struct, tag=True, frozen=True):
    mode: str = "abort"


class AbortRequest(msgspec.Struct, tag=True, frozen=True):
    request_id: str


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    pass


Order = ListActors | RestartActor | Pause | Resume | ResetPrefixCache | ReloadWeights | DropWeights | AbortRequest | Shutdown


class Command(msgspec.Struct, tag=True):
    """An operator's order on its way: client -> supervisor (ZeroMQ) -> actor (control ring)."""

    command_id: str
    order: Order
    epoch: int = 0  # set by the supervisor: the actor's epoch it is meant for; a successor must not carry it out


class Reply(msgspec.Struct, tag=True):
    """The answer, when it is done on every rank: an HTTP status and, for people, a message."""

    command_id: str
    status: int = 200
    message: str = ""
    details: dict[str, int | float | str | list[dict[str, int | float | str | None]] | None] = {}


class ActorState(msgspec.Struct, tag=True):
    """An actor's event to the supervisor: it is READY, or FAILED with a cause."""

    actor: str
    epoch: int
    state: str
    text: str = ""


class WeightsInUse(msgspec.Struct, tag=True):
    """Scheduler to supervisor: what a (re)started worker must load from now on."""

    path: str
    version: int


Message = (
    Submit
    | Abort
    | Tokenize
    | Detokenize
    | Request
    | Step
    | LoadWeights
    | ClearWeights
    | WeightsChanged
    | Hello
    | StepResult
    | Outputs
    | Rejected
    | Deltas
    | Tokenized
    | Detokenized
    | BlocksStored
    | BlocksRemoved
    | BlocksCleared
    | BlocksMove
    | BlocksMoved
)
Control = Command | Reply | ActorState | WeightsInUse

_encoder = msgspec.msgpack.Encoder()
_message_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_control_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


def encode(message: Message | Control) -> bytes:
    """A message as MessagePack bytes."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """A ring record back as its message. Raises msgspec.DecodeError (our own bug) where it is none."""
    return _message_decoder.decode(data)


def decode_control(data: bytes | memoryview) -> Control:
    """A control record or frame back as its message."""
    return _control_decoder.decode(data)
