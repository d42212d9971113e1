"""The tokenizer: turns the text of requests into tokens, and the tokens of answers into text.

Runs as `tokenizer0..`, between the api and the scheduler:

    api   Submit, Abort, Tokenize, Detokenize  ->  tokenizer  ->  Request, Abort   scheduler
    api   Deltas, Rejected, Tokenized, Detokenized  <-  tokenizer  <-  Outputs, Rejected   scheduler

It owns the decoding state of every open sequence (`TextStream`), which can be rebuilt: when it dies, the api process submits
its sequences again with the tokens delivered so far, which are replayed here. A mistake in a request fails only that request.

Streams come first: rendering and encoding of text is done by helper processes (`lanes.py`), sequences are opened (their replay
may take long) for at most `MAX_OPENING_NS` per turn, and deltas are sent as soon as they are ready.
"""

from __future__ import annotations

import time
from array import array
from pathlib import Path

import msgspec

from engine.checkpoint.record import VOCABULARIES, ModelRecord
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.grammars.tokens import GrammarTokens
from engine.messages import (
    Abort,
    Detokenize,
    Detokenized,
    Message,
    Output,
    Outputs,
    Rejected,
    SequencePart,
    Submit,
    Tokenize,
    Tokenized,
    decode,
)
from engine.parsers.registry import Parsers
from engine.parsers.thinking import ThinkingFamily
from engine.process.actor import Actor
from engine.process.context import ActorContext
from engine.process.outbox import RETRY_INTERVAL_NS
from engine.process.run_directory import Run
from engine.process.shares import has_room
from engine.process.topology import role_of
from engine.tokenizer.answer_formats import AnswerFormats
from engine.tokenizer.answer_measures import AnswerMeasures
from engine.tokenizer.api_channel import ApiChannel
from engine.tokenizer.chat.template import ChatTemplates
from engine.tokenizer.lanes import Job, Lanes
from engine.tokenizer.openings import Openings
from engine.tokenizer.placement import Placement
from engine.tokenizer.preparation import Answer, Preparation, Prepared, Refusal, is_light, refusal_of
from engine.tokenizer.prompt_encoder import PromptEncoder, max_text_bytes
from engine.tokenizer.ready import ReadyPrompt, ReadyRequest, ReadySequence
from engine.tokenizer.replicas import UNKNOWN, Replicas
from engine.tokenizer.sampling_rules import SamplingRules
from engine.tokenizer.settings import TokenizerSettings
from engine.tokenizer.text_stream import TextStream
from engine.tokenizer.vocabulary import Vocabulary

RETRY_AFTER_S = 1
MAX_OPENING_NS = 10_000_000
MAX_GATHERING_NS = 10_000_000  # a long turn sends its deltas in between


class TokenizerActor(Actor):
    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._streams: dict[str, TextStream] = {}
        self._jobs: dict[str, Job] = {}  # by request id or call id: jobs of helpers
        self._openings = Openings()
        self._gathering_since_ns = 0  # since when deltas wait for the end of this turn; 0: none wait
        self._channels: dict[str, ApiChannel] = {}
        self._replicas = Replicas(context)
        self._num_dropped = context.counter("messages_dropped_total")
        self._num_tokenized = context.counter("tokenized_tokens_total")
        self._num_detokenized = context.counter("detokenized_tokens_total")
        self._num_stop_strings = context.counter("stop_strings_total")
        self._num_open = context.counter("open_streams")
        self._answers = AnswerMeasures(context)
        self._num_jobs = context.counter("helper_jobs_total")
        self._num_waiting_jobs = context.counter("helper_jobs_waiting")
        self._num_refused_jobs = context.counter("helper_jobs_refused_total")
        self._num_cancelled_jobs = context.counter("helper_jobs_cancelled_total")

    # ------------------------------------------------------------------------------------------------------- life

    def on_start(self) -> None:
        config = self.context.config
        record = ModelRecord.of_run(self.context.run.model_path)
        self._preparation, self._vocabulary, templates = preparation_for(config, record)
        self._parsers = self._preparation.parsers
        self._lanes = Lanes(self._preparation.answer, config.max_waiting, templates.has)
        if config.cluster_listen and self.context.index == 0:  # routers check formats, and the ranks here need the vocabulary
            self._preparation.write_vocabulary()

    def on_record(self, sender: str, record: bytes) -> Message:
        """Decode a record. If it needs work on text, a helper gets it undecoded."""
        message = decode(record)
        if isinstance(message, Submit):
            self._take_submit(message, record)
        elif isinstance(message, (Tokenize, Detokenize)):
            self._take_call(message, record)
        else:
            self.on_message(sender, message)
        if self._gathering_since_ns and time.monotonic_ns() - self._gathering_since_ns > MAX_GATHERING_NS:
            self._flush_channels()
        return message

    def on_message(self, sender: str, message: Message) -> None:
        if isinstance(message, Outputs):
            self._take_outputs(message.outputs)
        elif isinstance(message, Rejected):
            self._take_rejected(message)
        elif isinstance(message, Abort):
            self._take_abort(message)
        else:
            raise AssertionError(f"unexpected {type(message).__name__} from {sender}")

    def on_peer(self, name: str, epoch: int) -> None:
        """Drop the sequences of an HTTP process that restarted. After a restart of the scheduler, the api process submits them
        again."""
        if role_of(name) == "api":
            self._channel(name)

    def on_stop(self) -> None:
        self._lanes.close()
        self._replicas.close()

    def do_work(self) -> int:
        """Send collected deltas, take results of helpers, and open sequences for a while."""
        num_done = self._flush_channels() + self._replicas.flush()
        for job, answer in self._lanes.finished():
            num_done += 1
            if job.is_wanted:
                self._take_answer(job, answer)
        num_done += self._open_sequences()
        self._num_waiting_jobs.set(self._lanes.num_waiting)
        return num_done + self._flush_channels() + self._replicas.flush()

    def deadline_ns(self) -> int:
        if self._openings:
            return time.monotonic_ns()
        is_waiting = self._replicas.is_waiting or any(channel.is_waiting for channel in self._channels.values())
        retry_ns = time.monotonic_ns() + RETRY_INTERVAL_NS if is_waiting else 0
        look_ns = self._lanes.deadline_ns
        return min(retry_ns, look_ns) if retry_ns and look_ns else retry_ns or look_ns

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being prepared or opened."""
        return not self._jobs and not self._openings

    # ---------------------------------------------------------------------------------------------------- from the api

    def _take_submit(self, submit: Submit, record: bytes) -> None:
        begin_ns = time.monotonic_ns()
        shared = submit.shared
        is_stale = shared.api_epoch < self._channel(shared.api).epoch
        sequences = (
            {} if is_stale else {own.request_id: self._placed(own) for own in submit.sequences if not self._is_known(own)}
        )
        self._num_dropped.add(len(submit.sequences) - len(sequences))
        for request_id in sequences:
            self._forget(request_id)
        if not sequences:
            return
        is_new_request = all(own.attempt == 0 for own in sequences.values())
        job = Job(submit, record, sequences)
        try:
            if is_new_request:
                self._check_backlog(shared.source)
            self._begin(job, is_new_request)
        except RequestError as error:
            self._refuse(job, refusal_of(error))
        if self.context.tracer.is_on:
            for request_id in sequences:
                self.context.tracer.span("prepare", begin_ns, label=request_id)

    def _placed(self, own: SequencePart) -> SequencePart:
        """Return the sequence with the replica of its previous attempt, if that is still open here."""
        stream = self._streams.get(own.request_id)
        return own if stream is None else msgspec.structs.replace(own, replica=stream.replica)

    def _check_backlog(self, source: str) -> None:
        """Reject new sequences if the scheduler does not keep up; a sequence that is being answered is accepted."""
        limit = self.context.config.max_waiting
        num_all, num_own = self._replicas.num_waiting(source)
        if not has_room(num_own, num_all, limit):
            raise RequestError(
                (
                    f"the scheduler queue is full: {num_all} sequences are waiting, {num_own} of them yours, limit "
                    f"{limit} without other users; try again later"
                ),
                status=429,
                code="too_many_requests",
                retry_after_s=RETRY_AFTER_S,
            )

    def _begin(self, job: Job, is_new_request: bool) -> None:
        """Start its preparation. Raises RequestError if too many jobs wait already."""
        for request_id in job.ids:
            self._jobs[request_id] = job
        if is_light(job.work):
            self._take_answer(job, self._preparation.prepare(job.work))
            return
        try:
            self._lanes.add(job, is_new_request)
        except RequestError:
            self._num_refused_jobs.add(1)
            raise
        self._num_jobs.add(1)

    def _take_call(self, call: Tokenize | Detokenize, record: bytes) -> None:
        self._forget(call.call_id)  # an earlier attempt that was still in the ring
        job = Job(call, record)
        try:
            self._begin(job, is_new_request=call.attempt == 0)
        except RequestError as error:
            self._refuse(job, refusal_of(error))

    def _take_abort(self, abort: Abort) -> None:
        """Abort a sequence, perhaps also in the scheduler, or a call."""
        attempt = self._attempt_of(abort.request_id)
        job = self._jobs.get(abort.request_id)
        is_call = job is not None and not isinstance(job.work, Submit)
        stream = self._streams.get(abort.request_id)
        key = job.key if job else stream.key if stream else abort.request_id
        if attempt is not None and attempt <= abort.attempt:
            self._forget(abort.request_id)
        if not is_call:
            self._replicas.abort(stream.replica if stream else UNKNOWN, key, abort)

    # -------------------------------------------------------------------------------------------------- prepared, opened

    def _take_answer(self, job: Job, answer: Answer) -> None:
        for request_id in job.ids:
            self._jobs.pop(request_id, None)
        if isinstance(job.work, Submit) and job.work.shared.text.is_bound:
            self._answers.on_format(isinstance(answer, Refusal), job.begun_ns)
        if isinstance(answer, Refusal):
            self._refuse(job, answer)
        elif isinstance(answer, (Tokenized, Detokenized)):
            self._channel(job.api).post(answer)
        else:
            self._take_prepared(job, answer)

    def _take_prepared(self, job: Job, prepared: Prepared) -> None:
        assert isinstance(job.work, Submit)
        request = ReadyRequest.of(job.work.shared, prepared.sampling)
        prompts = [
            found if isinstance(found, Refusal) else ReadyPrompt.of(asked, found.tokenized)
            for asked, found in zip(job.work.prompts, prepared.prompts, strict=True)
        ]
        for own in job.sequences.values():
            prompt = prompts[own.prompt_index]
            if isinstance(prompt, Refusal):
                self._reject(own.request_id, own.attempt, job.api, prompt)
            else:
                self._openings.add(ReadySequence(request, prompt, own))

    def _open_sequences(self) -> int:
        """Open streams for prepared sequences and send their requests, as far as this turn's time allows."""
        end_ns = time.monotonic_ns() + MAX_OPENING_NS
        num_done = 0
        while self._openings and (not num_done or time.monotonic_ns() < end_ns):
            num_done += 1
            opened = self._openings.next(self._vocabulary, self._parsers)
            if opened is not None:
                self._open(*opened)
        return num_done

    def _open(self, sequence: ReadySequence, stream: TextStream) -> None:
        begin_ns = time.monotonic_ns()
        self._num_tokenized.add(sequence.num_prompt_tokens)
        if stream.has_stopped:
            self._channel(stream.api).add(stream.already_stopped())
            return
        try:
            self._route(stream, sequence, sequence.request.shared.pinned_replica)
        except RequestError as error:
            self._reject(stream.request_id, stream.attempt, stream.api, refusal_of(error))
            return
        self._replicas.leave(stream.replica, stream.key, sequence.own)
        self._streams[stream.request_id] = stream
        self._num_open.set(len(self._streams))
        if self.context.tracer.is_on:
            self.context.tracer.span("tokenized", begin_ns, value=sequence.num_prompt_tokens, label=stream.request_id)

    def _route(self, stream: TextStream, sequence: ReadySequence, pinned: int) -> None:
        replica, num_tokens = self._replicas.choose(sequence, pinned, stream.refused_by)
        self._replicas.send(replica, sequence, num_tokens)
        stream.replica = replica
        if self._replicas.are_several and pinned == UNKNOWN:
            stream.sequence = sequence

    # ---------------------------------------------------------------------------------------------- from the scheduler

    def _take_outputs(self, outputs: list[Output]) -> None:
        self._gathering_since_ns = self._gathering_since_ns or time.monotonic_ns()
        num_tokens = 0
        is_traced = self.context.tracer.is_on
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None or stream.attempt != output.attempt:
                self._num_dropped.add(1)
                continue
            stream.sequence = None
            begin_ns = time.monotonic_ns() if is_traced else 0
            is_first = is_traced and not stream.num_tokens
            delta = stream.take(output)
            num_tokens += len(delta.token_ids)
            self._channels[stream.api].add(delta)
            if delta.parts:
                self._answers.on_parts(delta)
            if delta.finish_reason:
                self._answers.on_end(delta, stream.num_malformed_calls)
                self._close(stream, delta.finish_reason, output)
            if begin_ns and ((is_first and delta.token_ids) or delta.finish_reason):
                self.context.tracer.span("decode text", begin_ns, value=stream.num_tokens, label=stream.request_id)
        self._num_detokenized.add(num_tokens)

    def _close(self, stream: TextStream, finish_reason: str, output: Output) -> None:
        """Send a sequence's last Delta. The scheduler must be told about a stop string unless it ended the sequence itself."""
        self._forget(stream.request_id)
        if stream.has_found_string:
            self._num_stop_strings.add(1)
        if stream.has_stopped and not output.finish_reason:
            self._replicas.abort(stream.replica, stream.key, Abort(stream.request_id, stream.attempt, "stop"))

    def _take_rejected(self, rejected: Rejected) -> None:
        stream = self._streams.get(rejected.request_id)
        if stream is None or stream.attempt != rejected.attempt:
            self._num_dropped.add(1)
            return
        if rejected.status == 429 and stream.sequence is not None and self._is_rerouted(stream, stream.sequence):
            return
        self._forget(rejected.request_id)
        self._channels[stream.api].post(rejected)

    def _is_rerouted(self, stream: TextStream, sequence: ReadySequence) -> bool:
        """Send a sequence to another replica with room, if a replica rejected it because others had filled it meanwhile."""
        stream.refused_by |= {stream.replica}
        if not self._replicas.is_any_left(stream.refused_by):
            return False
        self._replicas.ended(stream.group_id)
        self._route(stream, sequence, UNKNOWN)
        return True

    # --------------------------------------------------------------------------------------------------------- sending

    def _flush_channels(self) -> int:
        self._gathering_since_ns = 0
        num_sent = 0
        for channel in self._channels.values():
            if channel.is_waiting:
                num_sent += channel.flush()
                self._end_too_large(channel)
        return num_sent

    def _channel(self, api: str) -> ApiChannel:
        """Return the channel to the current life of `api`; messages for an earlier life are dropped."""
        epoch = self.context.peer_epoch(api)
        channel = self._channels.get(api)
        if channel is None:
            channel = self._channels[api] = ApiChannel(self.context.outbox(api), epoch)
        elif channel.epoch != epoch:
            channel.forget(epoch)
            for stream in [stream for stream in self._streams.values() if stream.api == api]:
                self._abort(stream)
            for request_id in [request_id for request_id, job in self._jobs.items() if job.api == api]:
                self._forget(request_id)
            self._openings.drop_api(api)
        return channel

    def _end_too_large(self, channel: ApiChannel) -> None:
        for request_id in channel.too_large:
            if request_id in self._streams:
                self._abort(self._streams[request_id])
        channel.too_large.clear()

    def _abort(self, stream: TextStream) -> None:
        """End an open sequence that is no longer read."""
        self._forget(stream.request_id)
        self._replicas.abort(stream.replica, stream.key, Abort(stream.request_id, stream.attempt))

    # ------------------------------------------------------------------------------------------------------- what is known

    def _is_known(self, own: SequencePart) -> bool:
        """Return whether this attempt, or a later one, is known here."""
        attempt = self._attempt_of(own.request_id)
        return attempt is not None and attempt >= own.attempt

    def _attempt_of(self, request_id: str) -> int | None:
        """Return the attempt of a sequence that is here, in whatever state; 0 for a call; None: none."""
        stream = self._streams.get(request_id)
        if stream is not None:
            return stream.attempt
        job = self._jobs.get(request_id)
        if job is not None:
            return job.sequences[request_id].attempt if request_id in job.sequences else 0
        return self._openings.attempt_of(request_id)

    def _forget(self, request_id: str) -> None:
        """Forget a sequence or a call that is no longer wanted."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._replicas.ended(stream.group_id)
            self._num_open.set(len(self._streams))
        self._openings.drop(request_id)
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.sequences.pop(request_id, None)
            if not job.sequences:
                self._lanes.cancel(job)
                self._num_cancelled_jobs.add(1)

    def _refuse(self, job: Job, refusal: Refusal) -> None:
        """Reject all sequences of a job."""
        for request_id in job.ids:
            self._jobs.pop(request_id, None)
        if refusal.status >= 500:
            self.context.counters.errors.record(self.context.name, refusal.message)
        if not isinstance(job.work, Submit):
            self._reject(job.work.call_id, job.work.attempt, job.api, refusal)
        for own in job.sequences.values():
            self._reject(own.request_id, own.attempt, job.api, refusal)

    def _reject(self, request_id: str, attempt: int, api: str, refusal: Refusal) -> None:
        self._channel(api).post(
            Rejected(
                request_id, attempt, api, refusal.status, refusal.message, refusal.code, refusal.param, refusal.retry_after_s
            )
        )


def preparation_for(config: EngineConfig, record: ModelRecord) -> tuple[Preparation, Vocabulary, ChatTemplates]:
    """Return the preparation, the vocabulary and the chat templates for this model."""
    model = record.config
    vocabulary = vocabulary_for(record, config.load_format)
    parsers = Parsers(config.tool_call_parser, config.reasoning_parser, vocabulary.pieces)
    sources = {"default": config.chat_template} if config.chat_template else TokenizerSettings.of(record).chat_templates
    templates = ChatTemplates(
        sources,
        vocabulary.special_tokens,
        max_text_bytes(vocabulary, config.max_model_len),
        trusts_requests=config.trust_request_chat_template,
        marks=vocabulary.marks,
        write_calls=parsers.write_calls,
    )
    encoder = PromptEncoder(
        vocabulary,
        templates,
        vocab_size=model.vocab_size,
        max_model_len=config.max_model_len,
        placement=Placement(model.vision, vocabulary.pieces, vocabulary.marks) if model.vision else None,
        num_token_types=model.position_tables.num_token_types if model.position_tables else 0,
    )
    eos_token_ids = tuple(dict.fromkeys((*model.eos_token_ids, *vocabulary.eos_token_ids)))
    rules = SamplingRules(
        vocabulary,
        vocab_size=model.vocab_size,
        eos_token_ids=eos_token_ids,
        max_model_len=config.max_model_len,
        max_positions=config.max_positions,
    )
    formats = AnswerFormats(
        lambda: _grammar_tokens(vocabulary, model.vocab_size, eos_token_ids),
        Run(config.run_id, Path(config.run_dir)).vocabulary_path,
        config.max_grammar_bytes,
        *(_ids_of(parsers.thinking, vocabulary) if parsers.thinking else ()),
    )
    preparation = Preparation(
        vocabulary,
        encoder,
        rules,
        formats,
        parsers,
        config.max_model_len,
        has_causal_layers=bool(model.causal_layers),
    )
    return preparation, vocabulary, templates


def _ids_of(thinking: ThinkingFamily, vocabulary: Vocabulary) -> tuple[bytes, bytes]:
    """Return the tokens (int32) that end reasoning, and those that begin it."""
    end, begin = (array("i", vocabulary.encode(marker, False)).tobytes() for marker in (thinking.end, thinking.begin))
    return end, begin


def _grammar_tokens(vocabulary: Vocabulary, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarTokens:
    return GrammarTokens.of(vocabulary.token_bytes, vocabulary.special_ids, vocabulary.verbatim_ids, eos_token_ids, vocab_size)


def vocabulary_for(model: ModelRecord, load_format: str) -> Vocabulary:
    """Return the model's vocabulary. Dummy weights need no tokenizer: then `config.json` is enough, for token ids only. Raises
    CheckpointError."""
    if load_format == "dummy" and not model.files.keys() & set(VOCABULARIES):
        return Vocabulary.without_text(model.config.vocab_size)
    return Vocabulary.of(model)
