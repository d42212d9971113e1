"""Parts of requests and answers: sampling parameters, options of the text, prompts, log-probabilities."""

from __future__ import annotations

from typing import Literal

import msgspec


class Grammar(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Grammar of an answer: Lark as llguidance reads it, checked once by the tokenizer against limits. It binds from the
    answer's first token or, where the prompt ends inside thinking (`SamplingParams.is_thinking`), behind the tokens that end
    that. What binds from a trigger on says so itself: a lazy rule of any text up to the trigger comes before the rest. Tokens
    that are named there: `<name>`, or `<[id]>`."""

    text: str  # empty: anything
    end_of_thinking: bytes = b""  # int32: the tokens that end it; empty: the model does not think
    begin_of_thinking: bytes = b""  # int32: the tokens with which an answer begins to think by itself
    max_thinking_tokens: int = -1  # after so many, its end is forced; -1: never


class Pooling(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Request for one vector, or scores, of the whole prompt in place of tokens."""

    num_dimensions: int = 0  # the first so many numbers of a vector; 0: all
    is_finished: bool | None = None  # a vector has length 1, scores went through the model's activation; None: as the model's


class SamplingParams(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How one sequence of a request is drawn. The tokenizer resolves what needs a vocabulary or a model limit
    (`max_tokens`, `stop_token_ids` with the model's end tokens unless `ignore_eos`, `bad_words_token_ids`)."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # u64, always set by the api process, so that a replay draws the same numbers
    sample_index: int = 0  # index among the n sequences of one prompt
    min_tokens: int = 0
    max_tokens: int = -1  # -1: up to the model's limit (resolved by the tokenizer)
    ignore_eos: bool = False
    num_logprobs: int = -1  # -1: none; 0: the sampled token only; k: the k best besides
    num_prompt_logprobs: int = -1  # likewise, for each prompt token after the first
    stop_token_ids: list[int] = []
    allowed_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    logit_bias: dict[int, float] = {}
    prediction_token_ids: bytes = b""  # int32, a guess at the answer by who asks: it changes no byte of it
    top_n_sigma: float = 0.0  # 0: all; else those within so many standard deviations of the largest logit
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0  # 0: repetitions are not penalized
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_last_n: int = -1  # tokens that are looked back at; -1: all
    dry_breaker_token_ids: list[int] = []
    logprob_token_ids: list[int] = []  # whose log-probabilities are wanted at each position, in place of the best
    grammar: Grammar | None = None
    is_thinking: bool = False  # the prompt ends inside thinking (resolved by the tokenizer)
    pooling: Pooling | None = None  # no token is sampled, the sequence ends with its prompt; None: tokens are


class RepetitionLimits(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An answer ends whose last tokens are a pattern of so many tokens, so many times."""

    max_pattern_size: int
    min_pattern_size: int  # from 1
    min_count: int  # from 2


class AnswerFormat(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Structured output as the client asked for it."""

    kind: Literal["json", "regex", "choice", "grammar", "structural_tag"]
    text: str  # JSON but for a regex and a grammar (Lark or GBNF)
    param: str  # the field of the request, for messages
    whitespace: str | None = None  # between the parts of JSON: a regex; empty: none; None: any
    is_strict: bool = False  # of a schema: what no grammar can hold is refused, not left out


class Parsing(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Parts that the engine's parsers look for in the answer to a conversation; an engine without parsers looks for none."""

    finds_calls: bool = False  # of the prompt's tools
    finds_reasoning: bool = False
    choice: str = "auto"  # "auto" | "required": at least one call | "named": one of `names`
    names: list[str] = []  # functions that may be called; empty: all
    is_parallel: bool = True  # more than one call
    binds: bool = False  # a call is demanded, or must follow a strict schema
    thinking_token_budget: int = -1  # tokens of reasoning at most; -1: any number
    leaves_calls: bool = False  # in the content, as the model writes them
    leaves_reasoning: bool = False  # likewise
    has_format: bool = False  # the answer is calls, or has the format of `TextOptions.format`

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
    prediction: str = ""  # what the answer is guessed to be
    truncate_prompt_tokens: int = 0  # the last tokens of the prompt that count; 0: all, -1: as many as there is room for
    repetition: RepetitionLimits | None = None
    dry_breakers: list[str] = []  # across which no repetition is sought
    is_max_tokens_cut: bool = False  # to what the model has room for
    parsing: Parsing | None = None  # None: the answer is content alone
    format: AnswerFormat | None = None

    @property
    def is_bound(self) -> bool:
        """Whether an answer has a grammar."""
        return self.format is not None or (self.parsing is not None and self.parsing.has_grammar)


class AdapterUse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The LoRA adapter of a request, as the api process found it under the name of a model."""

    number: int  # of its loading: none is used twice in a run
    slot: int  # of the arena
    contents: str  # what tells its numbers from any others', in hexadecimal


class PromptOptions(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Options of a request's prompt for the scheduler."""

    returns_progress: bool = False  # Outputs say how much of it is computed
    cache_salt: str = ""  # cached prefixes are shared with requests of the same alone
    adapter: AdapterUse | None = None  # None: the base model


class TextPrompt(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    text: str
    add_special_tokens: bool = True
    suffix: str | None = None  # what stands behind the gap that is to be filled in; None: there is no gap
    second: str | None = None  # what it is scored with: a document, where `text` is the query


class TokensPrompt(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    token_ids: bytes  # int32


class ChatPrompt(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    """A conversation as the client sent it, to be rendered by the chat template. JSON text of each part."""

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
    """`TokenLogprobs` with each token's bytes, as the api process shows them (the token itself first, then the best).
    Tuples, because a request may hold very many until its end, and the collector leaves tuples of plain values
    alone."""

    token_id: int
    logprob: float
    rank: int
    token: bytes
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    top_tokens: tuple[bytes, ...] = ()
