"""The tokenizer: text to tokens on a request's way in, tokens to text on its answer's way out.

Runs as `tokenizer0..`, in the middle of every request's way:

    api   Submit, Abort, Tokenize, Detokenize  ->  tokenizer  ->  Request, Abort   scheduler
    api   Deltas, Rejected, Tokenized, Detokenized  <-  tokenizer  <-  Outputs, Rejected   scheduler

It owns the decoding state of every open sample (`TextStream`) and nothing that cannot be made again: when it dies, the edge
submits its samples anew with the tokens delivered so far, which are replayed here. A mistake in a request fails that request.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from pathlib import Path

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.errors import CheckpointError, RequestError
from engine.messages import (
    Abort,
    Delta,
    Detokenize,
    Detokenized,
    Message,
    Output,
    Outputs,
    Rejected,
    Request,
    SamplingParams,
    Submit,
    Tokenize,
    Tokenized,
    encode,
)
from engine.process.actor import Actor
from engine.process.context import ActorContext
from engine.process.topology import SCHEDULER, role_of
from engine.tokenizer.api_channel import ApiChannel
from engine.tokenizer.chat.template import ChatTemplates
from engine.tokenizer.detokenizer import decode
from engine.tokenizer.prompt_encoder import PromptEncoder, max_text_bytes, param_of
from engine.tokenizer.sampling_rules import SamplingRules
from engine.tokenizer.settings import TokenizerSettings
from engine.tokenizer.text_stream import TextStream
from engine.tokenizer.vocabulary import Vocabulary

RETRY_AFTER_S = 1
RETRY_INTERVAL_NS = 2_000_000  # a ring that empties wakes nobody


class TokenizerActor(Actor):
    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._streams: dict[str, TextStream] = {}
        self._channels: dict[str, ApiChannel] = {}
        self._to_scheduler: deque[bytes] = deque()
        self._num_dropped = context.counter("messages_dropped_total")
        self._num_tokenized = context.counter("tokenized_tokens_total")
        self._num_detokenized = context.counter("detokenized_tokens_total")
        self._num_stop_strings = context.counter("stop_strings_total")
        self._num_open = context.counter("open_streams")

    # ------------------------------------------------------------------------------------------------------- life

    def on_start(self) -> None:
        config = self.context.config
        path = Path(config.model)
        model = ModelConfig.read(path)
        self._vocabulary = _load_vocabulary(path, config, model.vocab_size)
        sources = {"default": config.chat_template} if config.chat_template else TokenizerSettings.read(path).chat_templates
        templates = ChatTemplates(
            sources, self._vocabulary.special_tokens, max_text_bytes(self._vocabulary, config.max_model_len)
        )
        self._encoder = PromptEncoder(
            self._vocabulary, templates, vocab_size=model.vocab_size, max_model_len=config.max_model_len
        )
        self._rules = SamplingRules(
            self._vocabulary,
            vocab_size=model.vocab_size,
            eos_token_ids=tuple(dict.fromkeys((*model.eos_token_ids, *self._vocabulary.eos_token_ids))),
            max_model_len=config.max_model_len,
            max_positions=config.max_positions,
        )

    def on_message(self, sender: str, message: Message) -> None:
        if isinstance(message, Outputs):
            self._take_outputs(message.outputs)
        elif isinstance(message, Rejected):
            self._take_rejected(message)
        elif isinstance(message, Submit):
            self._take_submit(message)
        elif isinstance(message, Abort):
            self._take_abort(message)
        elif isinstance(message, Tokenize):
            self._take_tokenize(message)
        elif isinstance(message, Detokenize):
            self._take_detokenize(message)
        else:
            raise AssertionError(f"{type(message).__name__} from {sender} is not for a tokenizer")

    def on_peer(self, name: str, epoch: int) -> None:
        """A new HTTP process has none of its predecessor's samples. After a new scheduler the edge submits anew by itself."""
        if role_of(name) == "api":
            self._channel(name)

    def step(self) -> int:
        """Send what has gathered."""
        num_sent = self._flush_to_scheduler()
        for channel in self._channels.values():
            if channel.is_waiting:
                num_sent += channel.flush()
                self._end_too_large(channel)
        return num_sent

    def deadline_ns(self) -> int:
        is_waiting = self._to_scheduler or any(channel.is_waiting for channel in self._channels.values())
        return time.monotonic_ns() + RETRY_INTERVAL_NS if is_waiting else 0

    # ---------------------------------------------------------------------------------------------------- from the api

    def _take_submit(self, submit: Submit) -> None:
        known = self._streams.get(submit.request_id)
        is_known = known is not None and known.attempt >= submit.attempt
        if is_known or submit.api_epoch < self._channel(submit.api).epoch:
            self._num_dropped.add(1)
            return
        self._forget(submit.request_id)
        try:
            self._open(submit)
        except RequestError as error:
            self._reject(submit.request_id, submit.attempt, submit.api, error)
        except Exception as error:  # our own mistake must not come back with every attempt until the engine is down
            self._note_own_mistake(error)
            internal = RequestError(f"the request could not be prepared: {error!r}", status=500)
            self._reject(submit.request_id, submit.attempt, submit.api, internal)

    def _open(self, submit: Submit) -> None:
        self._check_backlog(submit)
        prompt_token_ids = self._encoder.encode(submit.prompt, submit.arrival_ns)
        sampling = self._rules.resolve(submit.sampling, submit.text, len(prompt_token_ids), param_of(submit.prompt))
        self._num_tokenized.add(len(prompt_token_ids))
        stream = TextStream(submit, prompt_token_ids, self._vocabulary)
        if stream.has_stopped:
            self._channel(stream.api).add(stream.already_stopped())
            return
        self._send(_request(submit, self.context.name, prompt_token_ids, sampling))
        self._streams[stream.request_id] = stream
        self._num_open.set(len(self._streams))

    def _check_backlog(self, submit: Submit) -> None:
        """Where the scheduler does not keep up, new samples are refused; one that is being answered is not."""
        limit = self.context.config.max_waiting
        if submit.attempt == 0 and len(self._to_scheduler) >= limit:
            raise RequestError(
                f"{len(self._to_scheduler)} samples wait for the scheduler, the limit is {limit}; try again later",
                status=429,
                code="too_many_requests",
                retry_after_s=RETRY_AFTER_S,
            )

    def _take_abort(self, abort: Abort) -> None:
        stream = self._streams.get(abort.request_id)
        if stream is not None and stream.attempt <= abort.attempt:
            self._forget(abort.request_id)
        self._send(abort)

    def _take_tokenize(self, call: Tokenize) -> None:
        try:
            token_ids = self._encoder.encode(call.prompt)
        except RequestError as error:
            self._reject(call.call_id, 0, call.api, error)
        except Exception as error:  # as in _take_submit
            self._note_own_mistake(error)
            self._reject(call.call_id, 0, call.api, RequestError(f"the text could not be tokenized: {error!r}", status=500))
        else:
            tokens = [self._vocabulary.bytes_of(token_id) for token_id in token_ids]
            answer = Tokenized(call.call_id, token_ids.tobytes(), self.context.config.max_model_len, tokens)
            self._channel(call.api).post(answer)

    def _take_detokenize(self, call: Detokenize) -> None:
        try:
            token_ids = self._encoder.checked(array("i", call.token_ids), "tokens")
        except RequestError as error:
            self._reject(call.call_id, 0, call.api, error)
        else:
            self._channel(call.api).post(Detokenized(call.call_id, decode(self._vocabulary, token_ids)))

    # ---------------------------------------------------------------------------------------------- from the scheduler

    def _take_outputs(self, outputs: list[Output]) -> None:
        num_tokens = 0
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None or stream.attempt != output.attempt:
                self._num_dropped.add(1)
                continue
            delta = stream.take(output)
            num_tokens += len(delta.token_ids)
            self._channels[stream.api].add(delta)
            if delta.finish_reason:
                self._close(stream, delta, output)
        self._num_detokenized.add(num_tokens)

    def _close(self, stream: TextStream, delta: Delta, output: Output) -> None:
        """A sample's last Delta. The scheduler does not know of a stop string unless it ended the sample itself."""
        self._forget(stream.request_id)
        if stream.has_stopped:
            self._num_stop_strings.add(1)
            if not output.finish_reason:
                self._send(Abort(stream.request_id, stream.attempt, delta.finish_reason))

    def _take_rejected(self, rejected: Rejected) -> None:
        stream = self._streams.get(rejected.request_id)
        if stream is None or stream.attempt != rejected.attempt:
            self._num_dropped.add(1)
            return
        self._forget(rejected.request_id)
        self._channels[stream.api].post(rejected)

    # --------------------------------------------------------------------------------------------------------- sending

    def _send(self, message: Request | Abort) -> None:
        """To the scheduler, behind what waits already. RequestError where no ring record can hold it."""
        record = encode(message)
        limit = self.context.outbox(SCHEDULER).max_record_bytes
        if len(record) > limit:
            raise RequestError(
                f"the tokenized request takes {len(record)} bytes, the limit is {limit}; shorten logit_bias, allowed_token_ids "
                "or bad_words"
            )
        self._to_scheduler.append(record)
        self._flush_to_scheduler()

    def _flush_to_scheduler(self) -> int:
        num_sent = 0
        while self._to_scheduler and self.context.outbox(SCHEDULER).send_bytes(self._to_scheduler[0]):
            self._to_scheduler.popleft()
            num_sent += 1
        return num_sent

    def _channel(self, api: str) -> ApiChannel:
        """The channel to `api` as it runs now: what belonged to its dead predecessor is gone."""
        epoch = self.context.peer_epoch(api)
        channel = self._channels.get(api)
        if channel is None:
            channel = self._channels[api] = ApiChannel(self.context.outbox(api), epoch)
        elif channel.epoch != epoch:
            channel.forget(epoch)
            for stream in [stream for stream in self._streams.values() if stream.api == api]:
                self._abort(stream.request_id)
        return channel

    def _end_too_large(self, channel: ApiChannel) -> None:
        for request_id in channel.too_large:
            if request_id in self._streams:
                self._abort(request_id)
        channel.too_large.clear()

    def _abort(self, request_id: str) -> None:
        """End an open sample that nobody reads any more."""
        stream = self._streams[request_id]
        self._forget(request_id)
        self._send(Abort(request_id, stream.attempt))

    def _forget(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._num_open.set(len(self._streams))

    def _reject(self, request_id: str, attempt: int, api: str, error: RequestError) -> None:
        self._channel(api).post(
            Rejected(request_id, attempt, api, error.status, error.message, error.code, error.param, error.retry_after_s)
        )

    def _note_own_mistake(self, error: Exception) -> None:
        self.context.log.error("a request could not be prepared", exc_info=error)
        self.context.counters.errors.record(self.context.name, repr(error))


def _request(submit: Submit, tokenizer: str, prompt_token_ids: array[int], sampling: SamplingParams) -> Request:
    return Request(
        request_id=submit.request_id,
        api=submit.api,
        api_epoch=submit.api_epoch,
        tokenizer=tokenizer,
        attempt=submit.attempt,
        prompt_token_ids=prompt_token_ids.tobytes(),
        resume_token_ids=submit.resume_token_ids,
        sampling=sampling,
        num_scored_prompt_tokens=submit.num_scored_prompt_tokens,
        group_id=submit.group_id,
        priority=submit.priority,
        arrival_ns=submit.arrival_ns,
        deadline_ns=submit.deadline_ns,
    )


def _load_vocabulary(path: Path, config: EngineConfig, vocab_size: int) -> Vocabulary:
    """Dummy weights do without a tokenizer too: `config.json` alone is a model then, for token ids."""
    try:
        return Vocabulary.load(path)
    except CheckpointError:
        if config.load_format != "dummy" or (path / "tokenizer.json").exists() or (path / "tokenizer.model").exists():
            raise
        return Vocabulary.without_text(vocab_size)
