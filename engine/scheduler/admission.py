"""Admission to the scheduler: a `Request` becomes a `Sequence`, or is rejected for a reason that the user can fix.

Used by the scheduler process alone. A request that passes can run to its end when it is alone in the engine, so it cannot fail
later for lack of memory.
"""

from __future__ import annotations

from array import array

import msgspec

from engine.block_keys import BlockExtras
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.messages import SamplingParams, SequenceRequest
from engine.process.shares import has_room
from engine.scheduler.delivery import Stream
from engine.scheduler.limits import Limits
from engine.scheduler.queues import place_in_line
from engine.scheduler.sequence import POOLED_BYTES, Sequence, start_bytes
from engine.scheduler.sequence_media import SequenceMedia

RETRY_AFTER_S = 1

SHARED_FIELDS = (
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words_token_ids",
    "logit_bias",
    "prediction_token_ids",
    "logprob_token_ids",
    "grammar",
    "dry_breaker_token_ids",
)
MAX_INDEX_BYTES = 16  # bytes by which the encoded `sample_index` and `max_tokens` of two sequences may differ


class AdmissionControl:
    """Turns requests into sequences; counts them to keep first-come order."""

    def __init__(self, config: EngineConfig, limits: Limits) -> None:
        self._config = config
        self._limits = limits
        self._num_taken = 0
        self._max_priority_wait_ns = int(config.max_priority_wait_s * 1e9)
        self._sized = SamplingParams()  # the last one encoded to see its size
        self._num_sized_bytes = 0
        self.max_positions = config.max_positions
        pooling = config.pooling
        self.num_pooled_bytes = POOLED_BYTES + 4 * pooling.num_values if pooling else 0
        self._is_pooled_whole = pooling is not None and pooling.needs_all_tokens

    def accept(
        self, request: SequenceRequest, stream: Stream, num_waiting: int, num_own: int, tokenizer_epoch: int
    ) -> Sequence:
        """Return the sequence of a new request. `num_own`: waiting sequences of its source, among `num_waiting`. Raises
        RequestError: 429 if too many wait, 400 if it can never run."""
        self._check_queue(num_waiting, num_own)
        prompt = array("i", request.prompt.token_ids)
        sampling = request.sampling
        self._check_length(len(prompt), sampling.max_tokens)
        options = request.shared.options
        extras = BlockExtras.of(
            request.prompt.units, request.shared.media, request.shared.mask_bounds, options.cache_salt, options.adapter
        )
        media = self._media(request, extras, len(prompt))
        num_sampling_bytes = self._num_bytes(sampling) + len(request.own.request_id) + (media.num_start_bytes if media else 0)
        max_total_tokens = self.max_positions if sampling.max_tokens < 0 else len(prompt) + sampling.max_tokens
        num_sampling_bytes += self.num_table_bytes(max_total_tokens)
        num_start_bytes = start_bytes(max_total_tokens, num_sampling_bytes)
        if num_start_bytes > self._limits.max_start_bytes:
            raise RequestError(
                f"the prompt and the sampling parameters need {num_start_bytes} bytes, the limit is "
                f"{self._limits.max_start_bytes}; shorten logit_bias, allowed_token_ids, bad_words, the structured output or "
                "the prediction, or send fewer images"
            )
        self._num_taken += 1
        place = place_in_line(request.shared.priority, request.shared.arrival_ns, self._max_priority_wait_ns)
        return Sequence(
            request=request,
            reader=stream,
            token_ids=prompt + array("i", request.own.resume_token_ids),
            num_prompt_tokens=len(prompt),
            max_total_tokens=max_total_tokens,
            rank=(place, request.shared.priority, self._num_taken),
            tokenizer_epoch=tokenizer_epoch,
            num_sampling_bytes=num_sampling_bytes,
            media=media,
            extras=extras,
            num_scored_prompt_tokens=request.own.num_scored_prompt_tokens,
            is_reporting=request.shared.options.returns_progress and not request.own.resume_token_ids,
            num_pooled_bytes=self.num_pooled_bytes,
            is_pooled_whole=self._is_pooled_whole,
        )

    def num_table_bytes(self, num_tokens: int) -> int:
        """Return the bytes of block tables in a SlotStart beyond those of one with blocks of one token."""
        limits = self._limits
        return 4 * num_tokens * max(0, limits.pages_per_block - limits.block_size) // limits.block_size

    def _media(self, request: SequenceRequest, extras: BlockExtras | None, num_tokens: int) -> SequenceMedia | None:
        """Return the parts of the prompt that are not causal text. Raises RequestError if one of them can never be computed."""
        config = self._config
        bounds = array("i", request.shared.mask_bounds)
        if bounds:
            _check_bounds(bounds, num_tokens)
        media = SequenceMedia.of(request, extras, can_cut_units=not config.disable_chunked_mm_input)
        if media is None:
            return None
        largest = max((unit.num_rows for unit in media.units), default=0)
        if largest > config.encoder_cache_size:
            raise RequestError(
                (
                    f"an image of {largest} tokens does not fit into the encoder cache of {config.encoder_cache_size}; "
                    "send a smaller image, or start the server with a larger --encoder-cache-size"
                ),
                param="messages",
            )
        first, end = media.longest_whole
        if end - first > self._limits.max_tokens:
            raise RequestError(
                f"tokens {first} to {end - 1} of the prompt must be computed in one step "
                f"{'(--disable-chunked-mm-input)' if config.disable_chunked_mm_input else '(attention to later tokens)'}, "
                f"but these are {end - first} tokens, the limit of a step is {self._limits.max_tokens}; shorten them or start "
                "with a larger --max-num-batched-tokens",
                param="attention_mask_offset" if bounds and not config.disable_chunked_mm_input else "messages",
            )
        return media

    def _num_bytes(self, sampling: SamplingParams) -> int:
        """Return a bound on the encoded size. The sequences of a request share their long parts, which may be very long."""
        is_shared = all(getattr(sampling, name) is getattr(self._sized, name) for name in SHARED_FIELDS)
        if not is_shared or not self._num_sized_bytes:
            self._sized = sampling
            self._num_sized_bytes = len(msgspec.msgpack.encode(sampling)) + MAX_INDEX_BYTES
        return self._num_sized_bytes

    def _check_queue(self, num_waiting: int, num_own: int) -> None:
        if not has_room(num_own, num_waiting, self._config.max_waiting):
            raise RequestError(
                (
                    f"the request queue is full: {num_waiting} sequences are waiting, {num_own} of them yours, limit "
                    f"{self._config.max_waiting} without other users; try again later, or start the server with a larger "
                    "--max-waiting"
                ),
                status=429,
                code="too_many_requests",
                retry_after_s=RETRY_AFTER_S,
            )

    def _check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        if num_prompt_tokens == 0:
            raise RequestError("the prompt has no tokens; send at least one", param="prompt")
        num_wanted = num_prompt_tokens + (1 if max_tokens < 0 else max_tokens)
        if num_wanted <= self.max_positions:
            return
        if self.max_positions < self._config.max_model_len:
            limit = f"{self._config.num_kv_blocks} KV blocks of {self._config.block_size} tokens hold {self.max_positions}"
            remedy = "start with more --num-kv-blocks"
        else:
            limit = f"the limit is {self.max_positions}"
            remedy = "start with a larger --max-model-len"
        raise RequestError(
            f"prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together {num_wanted}; {limit}: shorten "
            f"the prompt, lower max_tokens, or {remedy}",
            code="context_length_exceeded",
            param="prompt" if num_prompt_tokens >= self.max_positions else "max_tokens",
        )


def _check_bounds(bounds: array[int], num_tokens: int) -> None:
    """Raise RequestError unless these are a first and a last visible position for each prompt token."""
    if len(bounds) != 2 * num_tokens:
        raise RequestError(
            f"attention_mask_offset has {len(bounds) // 2} entries, but the prompt has {num_tokens} tokens; send one "
            "entry per token",
            param="attention_mask_offset",
        )
    for position, (first, last) in enumerate(zip(bounds[::2], bounds[1::2], strict=True)):
        if not 0 <= first <= position <= last < num_tokens:
            raise RequestError(
                f"attention_mask_offset[{position}] is [{first}, {last}]; expected 0 <= first <= {position} <= last < "
                f"{num_tokens}",
                param="attention_mask_offset",
            )
