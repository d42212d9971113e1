"""Turns a request body into a submission: defaults, limits, and rules for combinations of parameters.

Called by the completion handlers of the api process. Pure except for the seed: if the client sent none, it is chosen here once,
so that a retry after a crash draws the same numbers.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request

from api.access import priority_of, source_of
from api.client.generation import Generation
from api.media.store import MediaLease
from api.model import ServedModel
from api.request_context import ABORT_KEY, RequestContext
from api.schemas.formats import format_of
from api.schemas.requests import ChatRequest, GenerationRequest, RepetitionDetection, invalid
from engine.errors import RequestError
from engine.messages import (
    MediaItem,
    Parsing,
    Prompt,
    PromptOptions,
    RepetitionLimits,
    SamplingParams,
    SequencePart,
    SharedPart,
    TextOptions,
)

if TYPE_CHECKING:
    from api.schemas.pooling import PoolingRequest  # of routes that most engines never use

V = TypeVar("V", int, float)

DRY_BREAKERS = ("\n", ":", '"', "*")  # as in text-generation-webui and llama.cpp
_SEED_MASK = 2**64 - 1
RANK_HEADER = "x-data-parallel-rank"  # as in vLLM


def sampling_params(
    request: GenerationRequest, model: ServedModel, *, max_tokens: int | None, num_logprobs: int, num_prompt_logprobs: int
) -> SamplingParams:
    """Return the sampling parameters of a sequence, without its index. `max_tokens` None: up to the model's limit; 0: only the
    prompt."""
    for param in ("logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
        if token_ids := getattr(request, param):
            check_vocabulary(param, token_ids, model)
    defaults = model.defaults
    asked = max(num_logprobs, num_prompt_logprobs, len(request.logprob_token_ids or ()))
    if asked > model.max_logprobs:
        raise invalid(
            _logprobs_param(request, model.max_logprobs),
            (
                f"{asked} exceeds the limit of {model.max_logprobs} log-probabilities per position; ask for fewer, or "
                "start the server with a higher --max-logprobs"
            ),
        )
    top_p = _first(request.top_p, defaults.top_p, 1.0)
    return SamplingParams(
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        top_k=max(0, _first(request.top_k, defaults.top_k, 0)) if top_p else 1,  # 0: only the most likely token
        top_p=top_p or 1.0,
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=secrets.randbits(64) if request.seed in (None, -1) else request.seed & _SEED_MASK,
        min_tokens=request.min_tokens or 0,
        max_tokens=_least(max_tokens, defaults.max_new_tokens),
        ignore_eos=bool(request.ignore_eos),
        num_logprobs=0 if request.logprob_token_ids else num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        stop_token_ids=request.stop_token_ids or [],
        allowed_token_ids=request.allowed_token_ids or [],
        logit_bias=request.logit_bias or {},
        logprob_token_ids=request.logprob_token_ids or [],
        top_n_sigma=max(0.0, request.top_n_sigma or 0.0),
        typical_p=_first(request.typical_p, None, 1.0),
        xtc_probability=request.xtc_probability or 0.0,
        xtc_threshold=_first(request.xtc_threshold, None, 0.1),
        dry_multiplier=request.dry_multiplier or 0.0,
        dry_base=_first(request.dry_base, None, 1.75),
        dry_allowed_length=_first(request.dry_allowed_length, None, 2),
        dry_last_n=_first(request.dry_penalty_last_n, None, -1),
    )


def _logprobs_param(request: GenerationRequest, most: int) -> str:
    """Return the field that asks for more than `most`."""
    asked = {name: getattr(request, name, None) for name in ("top_logprobs", "logprobs", "prompt_logprobs")}
    asked["logprob_token_ids"] = len(request.logprob_token_ids or ())
    return next(name for name, number in asked.items() if (number or 0) > most)


def check_max_tokens(param: str, max_tokens: int, request: GenerationRequest, model: ServedModel) -> None:
    """Check `max_tokens`, from the parameter `param`, against the model and `min_tokens`."""
    if max_tokens > model.max_model_len and request.fit_max_tokens is False:
        raise invalid(
            param,
            (
                f"{max_tokens} exceeds the limit of the model, {model.max_model_len} tokens; ask for fewer, or remove "
                "fit_max_tokens"
            ),
        )
    if (request.min_tokens or 0) > max_tokens:
        raise invalid("min_tokens", f"{request.min_tokens} exceeds {param}, {max_tokens}; lower it")


def text_options(request: GenerationRequest, parsing: Parsing | None = None) -> TextOptions:
    stop = request.stop or []
    return TextOptions(
        stop=[stop] if isinstance(stop, str) else stop,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        bad_words=request.bad_words or [],
        return_prompt_token_ids=bool(request.return_token_ids or request.return_tokens_as_token_ids),
        prediction=request.prediction.text if isinstance(request, ChatRequest) and request.prediction else "",
        truncate_prompt_tokens=truncation_of(request),
        repetition=_repetition(request.repetition_detection),
        is_max_tokens_cut=request.fit_max_tokens is not False,
        parsing=parsing,
        format=format_of(request),
        dry_breakers=_breakers(request) if request.dry_multiplier else [],
    )


def _breakers(request: GenerationRequest) -> list[str]:
    return list(DRY_BREAKERS) if request.dry_sequence_breakers is None else request.dry_sequence_breakers


def truncation_of(request: GenerationRequest | PoolingRequest) -> int:
    """Return the value of `TextOptions.truncate_prompt_tokens`."""
    if request.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "0 leaves nothing of the prompt; expected at least 1, or -1")
    return request.truncate_prompt_tokens or 0


def _repetition(asked: RepetitionDetection | None) -> RepetitionLimits | None:
    if asked is None or not (asked.max_pattern_size or asked.min_count or asked.min_pattern_size):
        return None
    if asked.min_pattern_size > asked.max_pattern_size or asked.min_count < 2:
        raise invalid(
            "repetition_detection",
            (
                f"min_pattern_size {asked.min_pattern_size}, max_pattern_size {asked.max_pattern_size}, min_count "
                f"{asked.min_count}: expected min_pattern_size <= max_pattern_size and min_count >= 2"
            ),
        )
    return RepetitionLimits(asked.max_pattern_size, max(1, asked.min_pattern_size), asked.min_count)


def check_sequences(request: GenerationRequest, num_prompts: int, model: ServedModel) -> tuple[int, int]:
    """Return (n, best_of), checked against each other, streaming and the engine's limit."""
    n = request.n or 1
    best_of = request.best_of or n
    if best_of < n:
        raise invalid("best_of", f"{best_of} is less than n, {n}")
    if request.stream and best_of > n:
        raise invalid(
            "best_of",
            (
                f"{best_of} with n {n} cannot be streamed, because the best answers are only known at the end; set "
                "stream to false"
            ),
        )
    if num_prompts * best_of > model.max_sequences:
        raise invalid(
            "n" if num_prompts == 1 else "prompt",
            (
                f"{num_prompts} prompts with {best_of} answers each are {num_prompts * best_of} sequences, but the "
                f"limit per request is {model.max_sequences}; send fewer, or start the server with a higher "
                "--max-waiting"
            ),
        )
    return n, best_of


def check_stream(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "only allowed if stream is true")
    for param in ("return_progress", "timings_per_token"):
        if getattr(request, param) and not request.stream:
            raise invalid(param, "only allowed if stream is true")
    whole = {"prompt_logprobs": request.prompt_logprobs is not None, "logprobs_by_id": request.logprobs_by_id}
    for param, is_asked in whole.items():
        if is_asked and request.stream:
            raise invalid(param, "not available in streams; set stream to false")


def check_vocabulary(param: str, token_ids: Iterable[int], model: ServedModel) -> None:
    largest = max(token_ids, default=0)
    if largest >= model.vocab_size:
        raise invalid(param, f"token id {largest} is outside the vocabulary of {model.vocab_size} tokens")


def open_generation(
    request: Request,
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    best_of: int,
    media: MediaLease,
    mask_bounds: bytes = b"",
    parsing: Parsing | None = None,
) -> Generation:
    """Submit every sequence of every prompt. The `media` is released when all have ended, or if they cannot begin. Raises
    RequestError if the engine accepts no more."""
    context = RequestContext.of(request)
    model = context.services.model
    try:
        model.check_task("generate")
        shared = shared_part(
            request,
            body,
            sampling,
            text_options(body, parsing),
            PromptOptions(bool(body.return_progress), body.cache_salt or "", model.use_of(body.model)),
            media.items,
            mask_bounds,
        )
        generation = context.services.client.open(
            shared,
            prompts,
            sequence_parts(context.key, len(prompts), best_of),
            sequences_per_prompt=best_of,
            is_streaming=bool(body.stream),
            abort_connection=request.scope[ABORT_KEY],
            release=media.release,
        )
        return context.opened(generation, prompts)
    except BaseException:
        media.release()
        raise


def shared_part(
    request: Request,
    body: GenerationRequest | PoolingRequest,
    sampling: SamplingParams,
    text: TextOptions,
    options: PromptOptions,
    media: list[MediaItem] | None = None,
    mask_bounds: bytes = b"",
) -> SharedPart:
    """Return the part of a request that its sequences share."""
    context = RequestContext.of(request)
    actor = context.services.context
    return SharedPart(
        context.key,
        actor.name,
        actor.epoch,
        sampling,
        text,
        priority_of(request, body.priority, actor.config),
        context.arrival_ns,
        deadline_of(context, body),
        pinned_replica(request.headers, 0 if actor.config.is_router else actor.config.data_parallel_size),
        media or [],
        mask_bounds,
        options,
        source_of(request, actor.config),
    )


def sequence_parts(key: str, num_prompts: int, best_of: int) -> list[SequencePart]:
    """Return the sequences of a request, prompt by prompt. The part of their ids before the first `~` is the request id that
    the client knows."""
    parts = []
    for number in range(num_prompts):
        group_id = key if num_prompts == 1 else f"{key}~p{number}"
        for index in range(best_of):
            parts.append(SequencePart(group_id if best_of == 1 else f"{group_id}-{index}", group_id, number, index))
    return parts


def deadline_of(context: RequestContext, body: GenerationRequest | PoolingRequest) -> int:
    """Return the deadline (CLOCK_MONOTONIC); 0: none."""
    timeout_s = body.timeout or context.services.model.request_timeout_s
    return context.arrival_ns + int(timeout_s * 1e9) if timeout_s else 0


def pinned_replica(headers: Headers, num_replicas: int) -> int:
    """Return the replica that a client asks for; -1: any. `num_replicas`: 0 if clients cannot choose."""
    given = headers.get(RANK_HEADER)
    if given is None:
        return -1
    if not num_replicas:
        raise RequestError(f"{RANK_HEADER}: this is a router, which chooses the engine itself; remove it", param=RANK_HEADER)
    if given not in map(str, range(num_replicas)):
        raise RequestError(
            (
                f"{RANK_HEADER} is {given[:20]!r}, but the replicas are 0 to {num_replicas - 1}; choose one of them, "
                "or remove it"
            ),
            param=RANK_HEADER,
        )
    return int(given)


def int32(token_ids: Sequence[int]) -> bytes:
    """Return token ids as encoded in messages."""
    return array("i", token_ids).tobytes()


def _least(max_tokens: int | None, limit: int | None) -> int:
    """Return the smaller limit; -1: none is given."""
    return min((number for number in (max_tokens, limit) if number is not None), default=-1)


def _first(given: V | None, default: V | None, neutral: V) -> V:
    if given is not None:
        return given
    return neutral if default is None else default
