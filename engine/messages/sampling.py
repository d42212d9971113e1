"""Parts of requests and answers: sampling parameters, options of the text, prompts, log-probabilities."""

from __future__ import annotations

from typing import Literal

import msgspec


class Grammar(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Grammar of an answer, in llguidance's Lark dialect; the tokenizer has checked it against the limits. It applies from the
    first token of the answer or, if the prompt ends inside reasoning (`SamplingParams.is_thinking`), after the tokens that end
    the reasoning. A grammar that applies from a trigger on begins with a lazy rule for any text up to the trigger. Tokens are
    written as `<name>` or `<[id]>`."""

    text: str  # empty: anything
    end_of_thinking: bytes = b""  # int32: tokens that end the reasoning; empty: the model does not reason
    begin_of_thinking: bytes = b""  # int32: tokens with which an answer starts reasoning by itself
    max_thinking_tokens: int = -1  # reasoning tokens after which its end is forced; -1: never


class Pooling(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Request for a vector or scores of the whole prompt instead of tokens."""

    num_dimensions: int = 0  # the first numbers of a vector; 0: all
    # normalize vectors to length 1, apply the model's activation to scores; None: the model's default
    is_finished: bool | None = None


class SamplingParams(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Sampling parameters of one sequence. The tokenizer resolves what needs a vocabulary or a model limit (`max_tokens`,
    `stop_token_ids` with the model's end tokens unless `ignore_eos`, `bad_words_token_ids`)."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # u64, always set by the api process, so that a retry draws the same numbers
    sample_index: int = 0  # index among the n sequences of one prompt
    min_tokens: int = 0
    max_tokens: int = -1  # -1: up to the model's limit (resolved by the tokenizer)
    ignore_eos: bool = False
    num_logprobs: int = -1  # -1: none; 0: the sampled token only; k: the k best too
    num_prompt_logprobs: int = -1  # the same for each prompt token after the first
    stop_token_ids: list[int] = []
    allowed_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    logit_bias: dict[int, float] = {}
    prediction_token_ids: bytes = b""  # int32, the client's prediction of the answer: it changes no byte of it
    top_n_sigma: float = 0.0  # 0: all tokens; else those within this many standard deviations of the largest logit
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0  # 0: repetitions are not penalized
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_last_n: int = -1  # tokens that are searched; -1: all
    dry_breaker_token_ids: list[int] = []
    logprob_token_ids: list[int] = []  # tokens with log-probabilities at each position, instead of the best
    grammar: Grammar | None = None
    is_thinking: bool = False  # the prompt ends inside reasoning (resolved by the tokenizer)
    pooling: Pooling | None = None  # no token is sampled, the sequence ends with its prompt; None: it generates


class RepetitionLimits(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An answer ends when its last tokens are a pattern of this size, repeated this many times."""

    max_pattern_size: int
    min_pattern_size: int  # from 1
    min_count: int  # from 2


class AnswerFormat(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Structured output as the client asked for it."""

    kind: Literal["json", "regex", "choice", "grammar", "structural_tag"]
    text: str  # JSON, except for a regex and a grammar (Lark or GBNF)
    param: str  # the field of the request, for messages
    whitespace: str | None = None  # regex for whitespace between parts of JSON; empty: none; None: any
    is_strict: bool = False  # a schema is rejected if the grammar cannot express all of it


class Parsing(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Which parts the engine's parsers look for in the answer to a conversation. An engine without parsers looks for none."""

    finds_calls: bool = False  # looks for calls of the prompt's tools
    finds_reasoning: bool = False
    choice: str = "auto"  # "auto" | "required": at least one call | "named": one of `names`
    names: list[str] = []  # functions that may be called; empty: all
    is_parallel: bool = True  # more than one call
    binds: bool = False  # a call is required, or must follow a strict schema
    thinking_token_budget: int = -1  # at most this many reasoning tokens; -1: no limit
    leaves_calls: bool = False  # calls stay in the content, as the model wrote them
    leaves_reasoning: bool = False  # reasoning stays in the content
    has_format: bool = False  # the answer is tool calls, or has the format of `TextOptions.format`

    @property
    def has_grammar(self) -> bool:
        return self.binds or self.thinking_token_budget >= 0


class TextOptions(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Options of a request for the tokenizer."""

    stop: list[str] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: list[str] = []
    return_prompt_token_ids: bool = False  # the first Delta carries them
    prediction: str = ""  # the client's prediction of the answer
    truncate_prompt_tokens: int = 0  # use only the last tokens of the prompt; 0: all, -1: as many as fit
    repetition: RepetitionLimits | None = None
    dry_breakers: list[str] = []  # tokens that end a repetition for DRY
    is_max_tokens_cut: bool = False  # cut to the model's limit instead of rejected
    parsing: Parsing | None = None  # None: the whole answer is content
    format: AnswerFormat | None = None

    @property
    def is_bound(self) -> bool:
        """Whether the answer has a grammar."""
        return self.format is not None or (self.parsing is not None and self.parsing.has_grammar)


class AdapterUse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The LoRA adapter of a request, found by the api process under the name of a model."""

    number: int  # unique for each load within a run
    slot: int  # of the arena
    contents: str  # fingerprint of its weights, hexadecimal


class PromptOptions(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Options of a request's prompt for the scheduler."""

    returns_progress: bool = False  # Outputs report how many prompt tokens are computed
    cache_salt: str = ""  # cached prefixes are shared only between requests with the same salt
    adapter: AdapterUse | None = None  # None: the base model


class TextPrompt(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    text: str
    add_special_tokens: bool = True
    suffix: str | None = None  # the text behind the gap for fill-in-the-middle; None: no gap
    second: str | None = None  # the text it is scored with: a document if `text` is the query


class TokensPrompt(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    token_ids: bytes  # int32


class ChatPrompt(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    """A conversation as the client sent it, for the chat template. Each part is JSON text."""

    messages: bytes  # JSON list of {"role", "content", ...}
    tools: bytes = b""  # JSON list, or empty
    documents: bytes = b""  # likewise
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
    """`TokenLogprobs` with each token's bytes, as the api process shows them (the token itself first, then the best). Tuples,
    because a request may hold very many until its end, and the garbage collector skips tuples of plain values."""

    token_id: int
    logprob: float
    rank: int
    token: bytes
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    top_tokens: tuple[bytes, ...] = ()
