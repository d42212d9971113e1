"""The tokenizer actor on real rings, with the test as api and scheduler."""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from engine.checkpoint.record import ModelRecord
from engine.errors import CheckpointError
from engine.grammars.tokens import GrammarTokens
from engine.messages import (
    Abort,
    AnswerFormat,
    ChatPrompt,
    Delta,
    Deltas,
    Detokenize,
    Detokenized,
    MediaItem,
    MediaSource,
    Message,
    Output,
    Outputs,
    Prompt,
    Rejected,
    RepetitionLimits,
    Request,
    SamplingParams,
    SequenceRequest,
    Submit,
    TextOptions,
    TextPrompt,
    Tokenize,
    Tokenized,
    TokenLogprobs,
    TokensPrompt,
    decode,
    encode,
)
from engine.parsers.registry import Parsers
from engine.process.actor import ActorLoop
from engine.process.context import ActorContext
from engine.process.run_directory import Run
from engine.process.segments import RunSegments, unlink_segments
from engine.process.topology import CACHE, SCHEDULER, RingSizes, names_of
from engine.tokenizer.actor import TokenizerActor, vocabulary_for
from engine.tokenizer.answer_formats import AnswerFormats
from engine.tokenizer.chat.template import ChatTemplates
from engine.tokenizer.lanes import MAX_CALLS
from engine.tokenizer.preparation import Preparation, Prepared, PreparedPrompt, Refusal
from engine.tokenizer.prompt_encoder import PromptEncoder
from engine.tokenizer.sampling_rules import SamplingRules
from engine.tokenizer.vocabulary import Vocabulary
from shm.counters import State
from shm.mailbox import Mailbox, MailboxSender
from tests.configurations import engine_config
from tests.engine.tokenizer.vocabularies import vocabulary_of
from tests.paths import GOLDEN
from tests.requests import sequence_request, submit_of, together
from tests.waiting import wait_until

MODEL = GOLDEN / "qwen3"
NAMES = ("api0", "api1", "tokenizer0", "scheduler", "cache", "worker0")
EOS = 2
MAX_MODEL_LEN = 64
RING_BYTES = 64 << 10

T = TypeVar("T")


def int32(*token_ids: int) -> bytes:
    return array("i", token_ids).tobytes()


def submit(prompt: Prompt | str, request_id: str = "r", attempt: int = 0, api: str = "api0", **parts: Any) -> Submit:
    """Return a Submit. Keywords are those of SamplingParams and TextOptions, and those of its parts."""
    return submit_of(prompt, request_id, attempt=attempt, api=api, **parts)


def chat(*messages: dict[str, Any], **options: Any) -> ChatPrompt:
    return ChatPrompt(json.dumps(messages).encode(), **options)


class Bench:
    """A tokenizer between an api and a scheduler of the test."""

    def __init__(self, directory: Path, ring_bytes: int = RING_BYTES, scheduler_ring_bytes: int = 0, **options: Any) -> None:
        self.run_id = secrets.token_hex(4)
        fields: dict[str, Any] = {"model": str(MODEL), "max_model_len": MAX_MODEL_LEN}
        fields |= {"trust_request_chat_template": True, "num_kv_blocks": 64, "run_id": self.run_id, "run_dir": str(directory)}
        self.config = engine_config(**(fields | options))
        num_replicas = self.config.data_parallel_size
        schedulers = names_of(SCHEDULER, num_replicas)
        names = NAMES if num_replicas == 1 else ("api0", "api1", "tokenizer0", *schedulers, *names_of(CACHE, num_replicas))
        sizes = dict.fromkeys(names, ring_bytes) | dict.fromkeys(schedulers, scheduler_ring_bytes or ring_bytes)
        self._segments = RunSegments(self.run_id, names, RingSizes(sizes, 1 << 20), 0)
        for name in names:
            self.begin_epoch(name, 1)
            self.set_state(name, State.READY)
        run = Run(self.run_id, directory)
        run.write(run.model_path, ModelRecord.read(Path(self.config.model)).encode())
        self.context = ActorContext(run, self.config, "tokenizer0", 1)
        self._inboxes = {name: Mailbox.attach(self.run_id, name, 1) for name in ("api0", "api1", *schedulers)}
        self._outboxes = {name: MailboxSender.attach(self.run_id, "tokenizer0", name, 1) for name in self._inboxes}
        self.actor = TokenizerActor(self.context)
        self.actor.on_start()
        self._loop = ActorLoop(self.actor)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.actor.on_stop()
        for mailbox in (*self._inboxes.values(), *self._outboxes.values()):
            mailbox.close()
        self.context.close()
        self._segments.close()
        unlink_segments(self.run_id)

    def begin_epoch(self, name: str, epoch: int) -> None:
        self._segments.counters.actor(name).begin_epoch(epoch, 0)

    def set_state(self, name: str, state: State) -> None:
        self._segments.counters.actor(name).set_state(state)

    def send(self, sender: str, *messages: Message) -> None:
        """Send messages and wait until they are done, by the helpers as well."""
        self.post(sender, *messages)
        wait_until(lambda: (self.turn(), self.actor.is_idle)[1], what="the helpers done")

    def post(self, sender: str, *messages: Message) -> None:
        for message in messages:
            record = encode(message)
            assert self._outboxes[sender].try_send(record)

    def turn(self) -> int:
        return self._loop.turn()

    def received(self, receiver: str = "api0") -> list[Message | SequenceRequest]:
        """Return messages with each sequence by itself."""
        messages = [decode(payload) for payload in self.records(receiver)]
        return [
            part for message in messages for part in (message.per_sequence() if isinstance(message, Request) else [message])
        ]

    def records(self, receiver: str) -> list[bytes]:
        return [payload for _, payload in self._inboxes[receiver].receive()]

    def one(self, kind: type[T], receiver: str = "api0") -> T:
        messages = self.received(receiver)
        assert len(messages) == 1, messages
        assert isinstance(messages[0], kind), messages[0]
        return messages[0]

    def delta(self, receiver: str = "api0") -> Delta:
        deltas = self.one(Deltas, receiver).deltas
        assert len(deltas) == 1, deltas
        return deltas[0]

    def request(self) -> SequenceRequest:
        return self.one(SequenceRequest, "scheduler")

    def count(self, name: str) -> float:
        return self.context.counter(name).value


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        yield bench


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_of(MODEL)


def sent_requests(record: bytes) -> list[SequenceRequest]:
    message = decode(record)
    assert isinstance(message, Request)
    return message.per_sequence()


def outputs(token_ids: list[int], finish_reason: str = "", request_id: str = "r", attempt: int = 0, **fields: Any) -> Outputs:
    entries = [TokenLogprobs(token_id, -0.5, 1) for token_id in token_ids]
    return Outputs([Output(request_id, attempt, token_ids, finish_reason, logprobs=fields.pop("logprobs", entries), **fields)])


# ----------------------------------------------------------------------------------------------------------- the way in


def test_a_text_becomes_a_request(bench: Bench, vocabulary: Vocabulary) -> None:
    parts = {"group_id": "g", "arrival_ns": 5, "deadline_ns": 6, "key": "k", "source": "user"}
    bench.send("api0", submit("Hello world", priority=3, seed=7, stop_token_ids=[9], **parts))
    request = bench.request()
    token_ids = vocabulary.encode("Hello world", True)
    sampling = SamplingParams(seed=7, max_tokens=MAX_MODEL_LEN - len(token_ids), stop_token_ids=[9, EOS])
    expected = sequence_request(int32(*token_ids), sampling=sampling, priority=3, **parts)
    shared = msgspec.structs.replace(expected.shared, sampling=request.shared.sampling)  # resolved, except for `max_tokens`
    assert request == msgspec.structs.replace(expected, shared=shared)
    assert bench.count("tokenized_tokens_total") == len(token_ids)
    assert bench.count("open_streams") == 1


def test_chat_gets_no_second_special_tokens(bench: Bench, vocabulary: Vocabulary) -> None:
    bench.send("api0", submit(chat({"role": "user", "content": "Hi"})))
    expected = vocabulary.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False)
    assert bench.request().prompt.token_ids == int32(*expected)
    assert expected[0] in vocabulary.special_ids


def test_the_template_sees_the_time_of_arrival(bench: Bench) -> None:
    """A resubmission renders the same text however much later it comes."""
    prompt = chat({"role": "user", "content": "x"}, chat_template="{{ strftime_now('%Y') }}")
    for request_id, arrival_ns in (("old", 1), ("now", 0)):
        bench.send("api0", submit(prompt, request_id, arrival_ns=arrival_ns))
    old, now = (message for message in bench.received("scheduler") if isinstance(message, SequenceRequest))
    assert len(old.prompt.token_ids) == len(now.prompt.token_ids)


def test_end_tokens_and_bad_words_are_filled_in(bench: Bench, vocabulary: Vocabulary) -> None:
    bench.send("api0", submit(TokensPrompt(int32(5, 6)), ignore_eos=True, bad_words=["the", " of"], max_tokens=4))
    sampling = bench.request().sampling
    assert (sampling.stop_token_ids, sampling.max_tokens) == ([], 4)
    assert vocabulary.encode("the", False) in sampling.bad_words_token_ids
    assert vocabulary.encode(" the", False) in sampling.bad_words_token_ids
    assert vocabulary.encode("of", False) in sampling.bad_words_token_ids


def test_a_prediction_travels_and_is_counted(bench: Bench, vocabulary: Vocabulary) -> None:
    """The count includes an attempt that continues with tokens that the api has."""
    predicted = vocabulary.encode("hello wide world", False)
    answer = [*predicted[:2], 7, *predicted[3:-1]]
    sampling = {"max_tokens": 30, "ignore_eos": True}
    for attempt, resumed in ((0, []), (1, answer[:3])):
        sent = submit(
            TokensPrompt(int32(5, 6)),
            prediction="hello wide world",
            resume_token_ids=int32(*resumed),
            attempt=attempt,
            **sampling,
        )
        bench.send("api0", sent)
        assert bench.request().sampling.prediction_token_ids == int32(*predicted)
        bench.send("scheduler", outputs(answer[len(resumed) : 4], attempt=attempt))
        bench.send("scheduler", outputs(answer[4:], "length", attempt=attempt))
        first, last = (delta for message in bench.received() if isinstance(message, Deltas) for delta in message.deltas)
        assert (first.num_accepted_prediction_tokens, first.num_rejected_prediction_tokens) == (0, 0)
        assert (last.num_accepted_prediction_tokens, last.num_rejected_prediction_tokens) == (len(predicted) - 2, 2)


CONTEXT = "context_length_exceeded"
MISTAKES: dict[str, tuple[Prompt | str, dict[str, Any], str, str, str]] = {
    "empty": ("", {}, "prompt", "", "no tokens"),
    "full": (TokensPrompt(int32(*range(64))), {}, "prompt", CONTEXT, "64 tokens"),
    "too long": (TokensPrompt(int32(*range(65))), {"max_tokens": 0}, "prompt", CONTEXT, "65 tokens"),
    "asks too much": (TokensPrompt(int32(1, 2)), {"max_tokens": 63}, "max_tokens", CONTEXT, "65 tokens"),
    "long chat": (chat({"role": "user", "content": "x" * 500}), {}, "messages", CONTEXT, "--max-model-len"),
    "huge text": ("x" * (2 << 20), {}, "prompt", CONTEXT, "2097152 bytes"),
    "huge chat": (chat({"role": "user", "content": "x" * (2 << 20)}), {}, "messages", "", "exceeds"),
    "prompt ids": (TokensPrompt(int32(1024)), {}, "prompt", "", "1024"),
    "negative ids": (TokensPrompt(int32(5, -1)), {}, "prompt", "", "-1"),
    "stop ids": ("a", {"stop_token_ids": [-1]}, "stop_token_ids", "", "-1"),
    "allowed ids": ("a", {"allowed_token_ids": [5000]}, "allowed_token_ids", "", "5000"),
    "bias ids": ("a", {"logit_bias": {1024: 1.0}}, "logit_bias", "", "1024"),
    "empty stop": ("a", {"stop": ["x", ""]}, "stop", "", "empty"),
    "empty bad word": ("a", {"bad_words": [" "]}, "bad_words", "", "no tokens"),
    "template": (chat({"role": "user", "content": "x"}, chat_template="{{ 1 / 0 }}"), {}, "chat_template", "", "division"),
    "surrogate": (chat({"role": "user", "content": "x"}, chat_template="{{ '\\ud800' }}"), {}, "messages", "", "Unicode"),
    "complaint": (
        chat({"role": "user", "content": "x"}, chat_template="{{ raise_exception('\\ud800') }}"),
        {},
        "chat_template",
        "",
        "\\ud800",
    ),
    "huge parameters": ("a", {"logit_bias": dict.fromkeys(range(1000), 1.5)}, "", "", "shorten logit_bias"),
    "messages": (chat(), {}, "messages", "", "empty"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_fails_its_request_alone(tmp_path: Path, name: str) -> None:
    prompt, options, param, code, fragment = MISTAKES[name]
    with Bench(tmp_path, ring_bytes=16 << 20, scheduler_ring_bytes=16 << 10) as bench:
        bench.send("api0", submit(prompt, "bad", **options), submit("fine", "good"))
        rejected = bench.one(Rejected)
        assert (rejected.request_id, rejected.status, rejected.param, rejected.code) == ("bad", 400, param, code)
        assert fragment in rejected.message
        assert bench.request().own.request_id == "good"
        assert bench.count("open_streams") == 1


def test_sequences_share_prompt_and_options(bench: Bench, vocabulary: Vocabulary) -> None:
    """Rendered, encoded and sent once for all of them."""
    options: dict[str, Any] = {"stop": ["END"], "bad_words": ["the"], "key": "k"}
    prompt = chat({"role": "user", "content": "Hi"})
    samples = [submit(prompt, f"k-{index}", sample_index=index, group_id="k", **options) for index in range(100)]
    bench.send("api0", together(samples))
    assert bench.count("helper_jobs_total") == 1
    records = bench.records("scheduler")
    assert sum(record.count(b"k-") for record in records) == 100
    assert len(records) < 6
    requests = [request for record in records for request in sent_requests(record)]
    assert [(request.own.request_id, request.sampling.sample_index) for request in requests] == [
        (f"k-{i}", i) for i in range(100)
    ]
    assert all(vocabulary.encode("the", False) in request.sampling.bad_words_token_ids for request in requests)
    bench.send("scheduler", outputs(vocabulary.encode("aEND", False), request_id="k-99"))
    assert bench.delta().text == "a"
    wrong = chat({"role": "user", "content": "x"}, chat_template="{{ 1 / 0 }}")
    bench.send("api0", together([submit(wrong, f"r-{index}", key="r") for index in range(5)]))
    assert [message.status for message in bench.received() if isinstance(message, Rejected)] == [400] * 5
    assert bench.count("helper_jobs_total") == 2


def test_prompt_that_just_fits_is_accepted(bench: Bench) -> None:
    bench.send("api0", submit(TokensPrompt(int32(*range(63))), "a"), submit(TokensPrompt(int32(*range(60))), "b", max_tokens=4))
    bench.send("api0", submit(TokensPrompt(int32(*range(64))), "c", max_tokens=0))
    requests = bench.received("scheduler")
    assert [request.sampling.max_tokens for request in requests if isinstance(request, SequenceRequest)] == [1, 4, 0]


def test_an_answer_never_exceeds_the_kv_cache(tmp_path: Path) -> None:
    with Bench(tmp_path, num_kv_blocks=2) as bench:
        bench.send("api0", submit(TokensPrompt(int32(*range(20)))))
        assert bench.request().sampling.max_tokens == 12


def test_stuck_scheduler_refuses_new_requests(tmp_path: Path) -> None:
    with Bench(tmp_path, ring_bytes=4096, max_waiting=3) as bench:
        for index in range(40):
            bench.send("api0", submit("x", f"r{index}"))
        rejected = [message for message in bench.received() if isinstance(message, Rejected)]
        assert rejected
        assert {(message.status, message.retry_after_s) for message in rejected} == {(429, 1)}
        bench.send("api0", submit("x", "r0", attempt=1))  # has been answered: it may wait
        assert bench.received() == []
        assert bench.actor.deadline_ns() > 0
        taken = [message for _ in range(3) for message in (bench.received("scheduler"), bench.turn())[0]]
        assert [message.own.request_id for message in taken if isinstance(message, SequenceRequest)][-1] == "r0"
        assert len(taken) + len(rejected) == 41


def test_full_backlog_leaves_room_for_other_sources(tmp_path: Path) -> None:
    with Bench(tmp_path, ring_bytes=4096, max_waiting=3) as bench:
        for index in range(40):
            bench.send("api0", submit("x", f"r{index}", source="many"))
        assert any(isinstance(message, Rejected) for message in bench.received())
        bench.send("api0", submit("x", "few", source="few"))
        assert bench.received() == []
        taken = [message for _ in range(3) for message in (bench.received("scheduler"), bench.turn())[0]]
        assert "few" in [message.own.request_id for message in taken if isinstance(message, SequenceRequest)]


# ---------------------------------------------------------------------------------------------------------- the way out


def test_tokens_become_text_until_the_end(bench: Bench, vocabulary: Vocabulary) -> None:
    bench.send("api0", submit("Hi", return_prompt_token_ids=True))
    token_ids = vocabulary.encode("Ends with 日本", False)
    bench.send("scheduler", outputs(token_ids[:-1], num_prompt_tokens=2, num_cached_tokens=1, weight_version=4))
    first = bench.delta()
    assert (first.num_prompt_tokens, first.num_cached_tokens, first.weight_version) == (2, 1, 4)
    assert first.prompt_token_ids == int32(*vocabulary.encode("Hi", True))
    assert [(entry.token_id, entry.logprob, entry.token) for entry in first.logprobs] == [
        (i, -0.5, b"") for i in token_ids[:-1]
    ]
    bench.send("scheduler", outputs([token_ids[-1], EOS], "stop", stop_token_id=EOS))
    last = bench.delta()
    assert last.token_ids == [token_ids[-1], EOS]
    assert (last.finish_reason, last.stop_reason, last.prompt_token_ids) == ("stop", None, b"")
    assert first.text + last.text == "Ends with 日本"
    assert bench.received("scheduler")[1:] == []  # only the Request
    assert bench.count("open_streams") == 0
    assert bench.count("detokenized_tokens_total") == len(token_ids) + 1


@pytest.mark.parametrize("reason", ["length", "abort", "timeout"])
def test_held_text_is_released_at_the_end(bench: Bench, vocabulary: Vocabulary, reason: str) -> None:
    bench.send("api0", submit("Hi", stop=["stop here"]))
    euro = [vocabulary.token_bytes.index(bytes([byte])) for byte in "€".encode()]
    bench.send("scheduler", outputs([*vocabulary.encode("now stop ", False), *euro[:2]]))
    assert bench.delta().text == "now "
    bench.send("scheduler", outputs([], reason))
    last = bench.delta()
    assert (last.text, last.finish_reason, last.token_ids) == ("stop \ufffd", reason, [])


def test_stop_string_ends_the_sequence_everywhere(bench: Bench, vocabulary: Vocabulary) -> None:
    bench.send("api0", submit("Hi", stop=["END"]))
    bench.request()
    token_ids = vocabulary.encode("textENDmore", False)
    bench.send("scheduler", outputs(token_ids, "length"), outputs([7]))
    delta = bench.delta()
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("text", "stop", "END")
    assert delta.token_ids == token_ids[: len(delta.token_ids)]
    assert vocabulary_text(vocabulary, delta.token_ids).startswith("textEND")
    assert not vocabulary_text(vocabulary, delta.token_ids[:-1]).startswith("textEND")
    assert len(delta.logprobs) == len(delta.token_ids)
    assert bench.received("scheduler") == []  # it had ended the sample itself
    assert bench.count("stop_strings_total") == 1
    assert bench.count("messages_dropped_total") == 1

    bench.send("api0", submit("Hi", "s", stop=["END"], include_stop_str_in_output=True))
    bench.request()
    bench.send("scheduler", outputs(token_ids, request_id="s"))
    assert bench.delta().text == "textEND"
    assert bench.one(Abort, "scheduler") == Abort("s", 0, "stop")


def test_repetition_ends_the_sequence_everywhere(bench: Bench, vocabulary: Vocabulary) -> None:
    """A replay ends at the same place."""
    words = vocabulary.encode("one two", False)
    told = [*vocabulary.encode("three", False), *words * 5]
    limits = RepetitionLimits(8, len(words), 3)
    end = len(told) - 2 * len(words)
    bench.send("api0", submit("a", repetition=limits))
    bench.received("scheduler")
    bench.send("scheduler", outputs(told))
    delta = bench.delta()
    assert (delta.token_ids, delta.finish_reason, delta.stop_reason) == (told[:end], "repetition", "repetition_detected")
    assert delta.text == vocabulary_text(vocabulary, told[:end])
    assert bench.one(Abort, "scheduler").reason == "stop"
    bench.send("api0", submit("a", "again", attempt=1, repetition=limits, resume_token_ids=int32(*told[: end - 1])))
    bench.received("scheduler")
    bench.send("scheduler", outputs(told[end - 1 :], "length", "again", 1))
    delta = bench.delta()
    assert (delta.token_ids, delta.finish_reason) == (told[end - 1 : end], "repetition")


def test_dry_breakers_are_last_tokens(bench: Bench, vocabulary: Vocabulary) -> None:
    bench.send("api0", submit(TokensPrompt(int32(5)), dry_breakers=["\n", " and:"]))
    assert bench.request().sampling.dry_breaker_token_ids == sorted(
        {vocabulary.encode("a\n", False)[-1], vocabulary.encode("a and:", False)[-1]}
    )


def test_the_last_tokens_of_a_long_prompt(bench: Bench) -> None:
    prompt = TokensPrompt(int32(*range(10, 110)))
    for num_kept, max_tokens, expected in ((5, 8, 5), (-1, 8, MAX_MODEL_LEN - 8), (-1, -1, MAX_MODEL_LEN - 1), (200, 1, 0)):
        request_id = f"r{num_kept}.{max_tokens}"
        bench.send("api0", submit(prompt, request_id, truncate_prompt_tokens=num_kept, max_tokens=max_tokens))
        if expected:
            assert bench.request().prompt.token_ids == int32(*range(110 - expected, 110))
            call = Tokenize("c", "api0", prompt, truncate_prompt_tokens=num_kept, max_tokens=max_tokens)
            bench.send("api0", call)  # shows the same
            assert bench.one(Tokenized).token_ids == int32(*range(110 - expected, 110))
        else:
            assert bench.one(Rejected).code == "context_length_exceeded"


def test_the_end_of_a_text_that_cannot_fit(bench: Bench, vocabulary: Vocabulary) -> None:
    text = "x" * 100 * MAX_MODEL_LEN
    token_ids = vocabulary.encode(text, False)
    bench.send("api0", submit(text, "cut", truncate_prompt_tokens=5))
    assert bench.request().prompt.token_ids == int32(*token_ids[-5:])
    bench.send("api0", Tokenize("c", "api0", TextPrompt(text)))
    assert bench.one(Tokenized).token_ids == int32(*token_ids)
    bench.send("api0", submit(text, "whole"))
    rejected = bench.one(Rejected)
    assert rejected.code == "context_length_exceeded"
    assert f"{len(text)} bytes, which are at least" in rejected.message


def vocabulary_text(vocabulary: Vocabulary, token_ids: list[int]) -> str:
    return b"".join(map(vocabulary.bytes_of, token_ids)).decode()


def test_the_text_of_a_stop_token_is_hidden(bench: Bench, vocabulary: Vocabulary) -> None:
    word = vocabulary.encode("a", False)[0]
    for request_id, options, text, reason in (
        ("own", {"stop_token_ids": [word]}, "", word),
        ("shown", {"stop_token_ids": [word], "include_stop_str_in_output": True}, "a", word),
        ("end", {"skip_special_tokens": False}, "", None),
        ("end shown", {"skip_special_tokens": False, "include_stop_str_in_output": True}, "<|im_end|>", None),
    ):
        stop = EOS if reason is None else word
        bench.send("api0", submit("Hi", request_id, **options))
        bench.send("scheduler", outputs([stop], "stop", request_id, stop_token_id=stop))
        delta = bench.delta()
        assert (delta.text, delta.stop_reason, delta.token_ids) == (text, reason, [stop]), request_id


def test_log_probabilities_carry_bytes(bench: Bench, vocabulary: Vocabulary) -> None:
    bench.send("api0", submit("Hi", num_logprobs=2, num_prompt_logprobs=1))
    byte = vocabulary.token_bytes.index(b"\xe2")
    entry = TokenLogprobs(byte, -1.0, 2, [5, 10**6], [-0.1, -9.0])
    prompt_entry = TokenLogprobs(6, -2.0, 3, [7], [-0.2])
    bench.send("scheduler", outputs([byte], logprobs=[entry], prompt_logprobs=[prompt_entry]))
    delta = bench.delta()
    assert delta.logprobs[0].token == b"\xe2"
    assert delta.logprobs[0].top_tokens == (vocabulary.bytes_of(5), b"")
    assert delta.prompt_logprobs[0].token == vocabulary.bytes_of(6)
    assert delta.first_prompt_token == vocabulary.bytes_of(vocabulary.encode("Hi", True)[0])
    bench.send("scheduler", outputs([], prompt_logprobs=[prompt_entry, prompt_entry]))
    delta = bench.delta()
    assert (len(delta.prompt_logprobs), delta.first_prompt_token, delta.token_ids) == (2, b"", [])


def test_one_record_a_turn_and_api(bench: Bench) -> None:
    for index in range(6):
        bench.send("api0", submit("Hi", f"r{index}", api=f"api{index % 2}"))
    batch = [Output(f"r{index}", 0, [40]) for index in range(6)]
    bench.send("scheduler", Outputs(batch[:3]), Outputs(batch[3:]))
    for api in ("api0", "api1"):
        assert [delta.request_id for delta in bench.one(Deltas, api).deltas] == [
            f"r{i}" for i in range(6) if api.endswith(str(i % 2))
        ]


# --------------------------------------------------------------------------------------- attempts, epochs, slow readers


def test_replay_continues_byte_for_byte(bench: Bench, vocabulary: Vocabulary) -> None:
    """The tokenizer may have died at every place, including half characters and half stop strings."""
    token_ids = vocabulary.encode("é€𝄞 STO", False) + vocabulary.encode("P ST", False) + vocabulary.encode("O now STOP!", False)
    options: dict[str, Any] = {"stop": ["STOP!"], "min_tokens": 3}
    bench.send("api0", submit("Hi", **options))
    pieces = []
    for token_id in token_ids:
        bench.send("scheduler", outputs([token_id]))
        pieces.append(bench.delta().text)
    assert "".join(pieces) == "é€𝄞 STOP STO now "
    for place in range(1, len(token_ids)):
        resumed = submit("Hi", f"r{place}", attempt=1, resume_token_ids=int32(*token_ids[:place]), **options)
        bench.send("api0", resumed)
        bench.send("scheduler", outputs(token_ids[place:], request_id=f"r{place}", attempt=1))
        delta = bench.delta()
        assert delta.text == "".join(pieces[place:])
        assert (delta.finish_reason, delta.prompt_token_ids) == ("stop", b"")
    requests = [message for message in bench.received("scheduler") if isinstance(message, SequenceRequest)]
    assert requests[3].own.resume_token_ids == int32(*token_ids[:3])


def test_a_replay_that_is_over_ends_at_once(bench: Bench, vocabulary: Vocabulary) -> None:
    token_ids = vocabulary.encode("x STOP", False)
    bench.send("api0", submit("Hi", attempt=1, stop=["STOP"], resume_token_ids=int32(*token_ids)))
    delta = bench.delta()
    assert (delta.finish_reason, delta.stop_reason, delta.token_ids, delta.text) == ("stop", "STOP", [], "")
    assert bench.received("scheduler") == []


def test_other_attempts_are_dropped(bench: Bench) -> None:
    bench.send("api0", submit("Hi", attempt=1), submit("Hi", attempt=0), submit("Hi", attempt=1))
    assert bench.request().own.attempt == 1
    bench.send("scheduler", outputs([40], attempt=0), outputs([40], attempt=2), Rejected("r", 0, "api0", 400, "old"))
    assert bench.received() == []
    assert bench.count("messages_dropped_total") == 5
    bench.send("api0", submit("Hi", attempt=2))
    assert bench.request().own.attempt == 2
    bench.send("scheduler", outputs([40], attempt=1), outputs([41], attempt=2))
    assert bench.delta().token_ids == [41]


def test_abort_is_forwarded_and_ends_the_stream(bench: Bench) -> None:
    bench.send("api0", submit("Hi", attempt=3))
    bench.request()
    bench.send("api0", Abort("r", 2))
    assert bench.one(Abort, "scheduler") == Abort("r", 2)
    assert bench.count("open_streams") == 1
    bench.send("api0", Abort("r", 3, "timeout"))
    assert bench.one(Abort, "scheduler") == Abort("r", 3, "timeout")
    assert bench.count("open_streams") == 0
    bench.send("scheduler", outputs([40], "abort", attempt=3))
    assert bench.received() == []


def test_a_rejection_of_the_scheduler_follows_the_deltas(bench: Bench) -> None:
    bench.send("api0", submit("Hi"), submit("Hi", "s"))
    rejected = Rejected("r", 0, "api0", 429, "full", "too_many_requests", "", 2)
    bench.send("scheduler", outputs([40]), rejected, outputs([41], request_id="s"))
    first, second, third = bench.received()
    assert isinstance(first, Deltas)
    assert second == rejected
    assert isinstance(third, Deltas)
    assert bench.count("open_streams") == 1


def test_new_api_process_has_no_old_sequences(bench: Bench) -> None:
    bench.send("api0", submit("Hi", "old"), submit("Hi", "other", api="api1"))
    bench.received("scheduler")
    bench.begin_epoch("api0", 2)
    bench.send("api0", submit("Hi", "stale"), submit("Hi", "new", api_epoch=2))
    aborted, request = bench.received("scheduler")
    assert aborted == Abort("old", 0)
    assert isinstance(request, SequenceRequest)
    assert request.own.request_id == "new"
    bench.send("scheduler", outputs([40], request_id="old"), outputs([40], request_id="new"), outputs([40], request_id="other"))
    assert bench.delta().request_id == "new"
    assert bench.delta("api1").request_id == "other"
    bench.actor.on_peer("api1", 1)
    bench.actor.on_peer("scheduler", 2)
    assert bench.count("open_streams") == 2
    bench.begin_epoch("api1", 2)
    bench.actor.on_peer("api1", 2)
    bench.turn()
    assert bench.one(Abort, "scheduler") == Abort("other", 0)


def test_slow_api_gets_everything_and_delays_no_other(tmp_path: Path, vocabulary: Vocabulary) -> None:
    with Bench(tmp_path, ring_bytes=4096) as bench:
        bench.send("api0", submit("Hi"), submit("Hi", "s", api="api1"))
        text = "The quick brown fox " * 40
        token_ids = vocabulary.encode(text, False)
        for token_id in token_ids:
            bench.send("scheduler", outputs([token_id]), outputs([token_id], request_id="s"))
            assert bench.delta("api1").token_ids == [token_id]
        assert bench.actor.deadline_ns() > 0
        deltas: list[Delta] = []
        while batch := bench.received():
            deltas += [delta for message in batch if isinstance(message, Deltas) for delta in message.deltas]
            bench.turn()
        assert [token_id for delta in deltas for token_id in delta.token_ids] == token_ids
        assert "".join(delta.text for delta in deltas) == text
        assert bench.actor.deadline_ns() == 0


def test_too_long_output_is_refused(tmp_path: Path) -> None:
    with Bench(tmp_path, ring_bytes=4096) as bench:
        bench.send("api0", submit("Hi", num_prompt_logprobs=5), submit("Hi", "s"))
        bench.received("scheduler")
        prompt_logprobs = [TokenLogprobs(5, -1.0, 1)] * 20
        many = [[Output("r", 0, [40], prompt_logprobs=prompt_logprobs)] for _ in range(9)]
        bench.send("scheduler", *(Outputs(batch) for batch in many[:1]))
        bench.send("scheduler", outputs([41], request_id="s"))
        for batch in many[1:]:
            bench.actor.on_message("scheduler", Outputs(batch))
        bench.actor.on_message("scheduler", Outputs([Output("s", 0, [40] * 2000)]))
        bench.turn()
        messages = [message for _ in range(9) for message in (bench.received(), bench.turn())[0]]
        deltas = [delta for message in messages if isinstance(message, Deltas) for delta in message.deltas]
        assert len([delta for delta in deltas if delta.request_id == "r"]) == 9
        (rejected,) = [message for message in messages if isinstance(message, Rejected)]
        assert (rejected.request_id, rejected.status) == ("s", 400)
        assert "log-probabilities" in rejected.message
        assert bench.one(Abort, "scheduler") == Abort("s", 0)


def test_too_long_refusal_names_its_attempt(tmp_path: Path) -> None:
    """The api accepts only the present attempt."""
    with Bench(tmp_path, ring_bytes=4096) as bench:
        bench.send("api0", submit("Hi", "r", attempt=3))
        bench.actor.on_message("scheduler", Rejected("r", 3, "api0", 400, "x" * 5000))
        bench.turn()
        rejected = bench.one(Rejected)
        assert (rejected.request_id, rejected.attempt, rejected.status) == ("r", 3, 400)


# --------------------------------------------------------------------------------------------------- tokenize and back


def test_tokenize_and_detokenize(bench: Bench, vocabulary: Vocabulary) -> None:
    token_ids = vocabulary.encode("Größe <|im_end|>", True)
    bench.send("api0", Tokenize("c", "api0", TextPrompt("Größe <|im_end|>"), True))
    assert bench.one(Tokenized) == Tokenized("c", int32(*token_ids), MAX_MODEL_LEN, [vocabulary.bytes_of(i) for i in token_ids])
    bench.send("api1", Tokenize("d", "api1", chat({"role": "user", "content": "x " * 100})))
    assert len(bench.one(Tokenized, "api1").token_ids) > 4 * MAX_MODEL_LEN
    bench.send("api0", Detokenize("e", "api0", int32(*token_ids)))
    assert bench.one(Detokenized) == Detokenized("e", "Größe <|im_end|>")


def test_calls_fail_with_their_cause(bench: Bench) -> None:
    bench.send("api0", Tokenize("c", "api0", chat()), Detokenize("d", "api0", int32(5, 4096)))
    bench.send("api0", Tokenize("e", "api0", TextPrompt("1 2 3 " * 3000)))
    rejected = [message for message in bench.received() if isinstance(message, Rejected)]
    assert [(message.request_id, message.status) for message in rejected] == [("c", 400), ("d", 400), ("e", 400)]
    assert [message.param for message in rejected[:2]] == ["messages", "tokens"]


# ------------------------------------------------------------------------------------------------------- streams come first

SEARCH = "{% set a = 'a' * 30000000 %}{% set b = a[1:] ~ 'b' %}{{ a in [b] * 9999999 }}"  # one long call into C


def test_hostile_template_delays_no_other(bench: Bench) -> None:
    """Streams, texts and other conversations continue while it is rendered."""
    bench.send("api0", submit("Hi", "stream"))
    bench.request()
    hostile = [submit(chat({"role": "user", "content": "x"}, chat_template=SEARCH), f"bad{index}") for index in range(4)]
    bench.post("api0", *hostile, submit("text", "text"), submit(chat({"role": "user", "content": "x"}), "chat"))
    bench.post("scheduler", outputs([40], request_id="stream"))
    bench.turn()
    assert bench.delta().request_id == "stream"
    requests: list[Any] = []
    wait_until(lambda: (bench.turn(), requests.extend(bench.received("scheduler")), len(requests) == 2)[2], what="the others")
    assert {request.own.request_id for request in requests} == {"text", "chat"}
    assert not bench.actor.is_idle
    bench.send("api0", *(Abort(f"bad{index}", 0) for index in range(4)))  # their clients leave: their helpers end
    assert bench.received() == []
    assert bench.count("helper_jobs_cancelled_total") == 4


@pytest.mark.slow
def test_slow_template_fails_its_request(bench: Bench) -> None:
    bench.send("api0", submit(chat({"role": "user", "content": "x"}, chat_template=SEARCH)))
    rejected = bench.one(Rejected)
    assert (rejected.status, rejected.param) == (400, "chat_template")
    assert "CPU time" in rejected.message


def test_templates_of_requests_are_refused_by_default(tmp_path: Path) -> None:
    with Bench(tmp_path, trust_request_chat_template=False) as bench:
        bench.send("api0", submit(chat({"role": "user", "content": "x"}, chat_template="{{ 1 }}")))
        rejected = bench.one(Rejected)
        assert (rejected.status, rejected.param) == (400, "chat_template")
        assert "--trust-request-chat-template" in rejected.message


def test_long_replay_is_split(bench: Bench, vocabulary: Vocabulary) -> None:
    """Sequences that come back after a crash with long answers do not delay others' deltas."""
    bench.send("api0", submit("Hi", "stream"))
    bench.request()
    tokens = int32(*vocabulary.encode("a", False) * 300_000)
    bench.actor.on_record("api0", encode(submit(TokensPrompt(int32(5)), "long", 1, resume_token_ids=tokens)))
    bench.turn()
    bench.post("scheduler", outputs([40], request_id="stream"))
    bench.turn()
    assert bench.delta().request_id == "stream"
    assert not bench.actor.is_idle
    bench.actor.on_message("api0", Abort("long", 1))
    assert bench.actor.is_idle


def test_abandoned_call_is_not_answered(bench: Bench) -> None:
    text = TextPrompt("x")
    bench.post("api0", *(Tokenize(f"c{index}", "api0", text) for index in range(5)))
    bench.send("api0", *(Abort(f"c{index}", 0) for index in range(1, 5)))
    assert [message.call_id for message in bench.received() if isinstance(message, Tokenized)] == ["c0"]
    assert bench.received("scheduler") == []
    assert bench.count("helper_jobs_waiting") == 0


@pytest.mark.slow
def test_resubmitted_calls_take_no_new_place(bench: Bench) -> None:
    text = TextPrompt("x")
    calls = [Tokenize(f"c{index}", "api0", text) for index in range(MAX_CALLS + 1)]  # one has the helper
    again = [Tokenize("c1", "api0", text, attempt=1), Tokenize("again", "api0", text, attempt=1)]
    for message in (*calls, Tokenize("new", "api0", text), *again, Detokenize("back", "api0", int32(5), attempt=1)):
        bench.actor.on_record("api0", encode(message))
    wait_until(lambda: (bench.turn(), bench.actor.is_idle)[1], what="the helper done")
    answers = bench.received()
    refused = [(message.request_id, message.attempt, message.status) for message in answers if isinstance(message, Rejected)]
    assert refused == [("new", 0, 429)]
    answered = [message.call_id for message in answers if isinstance(message, (Tokenized, Detokenized))]
    assert sorted(answered) == sorted([*(call.call_id for call in calls), "again", "back"])  # "c1" once


def test_format_is_compiled_and_forwarded(bench: Bench, tmp_path: Path, vocabulary: Vocabulary) -> None:
    """A lane of its own compiles: an endless format delays no text. The vocabulary is written for the ranks first."""
    endless = {"allOf": [{"type": "string", "pattern": f".*a{index}.*"} for index in range(30)]}
    held = [submit("x", f"held{index}", format=json_format(endless), key=f"held{index}") for index in range(2)]
    bench.post("api0", *held, submit("text", "text"))
    sent: list[Message | SequenceRequest] = []

    def is_sent() -> bool:
        bench.turn()
        sent.extend(bench.received("scheduler"))
        return bool(sent)

    wait_until(is_sent, what="the text's request")
    assert [request.own.request_id for request in sent if isinstance(request, SequenceRequest)] == ["text"]
    bench.send("api0", *(Abort(f"held{index}", 0) for index in range(2)))
    assert bench.count("helper_jobs_cancelled_total") == 2
    assert all(isinstance(message, Abort) for message in bench.received("scheduler"))
    bench.send("api0", submit("x", "form", format=json_format({"type": "integer"}), ignore_eos=True))
    request = bench.request()
    assert request.sampling.grammar is not None
    assert '"integer"' in request.sampling.grammar.text
    assert EOS in request.sampling.stop_token_ids
    run = Run(bench.run_id, tmp_path)
    assert GrammarTokens.read(run.vocabulary_path).end_ids == [EOS]
    assert run.vocabulary_path in run.files()
    brace, *digits = (vocabulary.encode(character, False)[0] for character in "{-0123456789")
    for param, options in (
        ("allowed_token_ids", {"allowed_token_ids": [brace]}),
        ("bad_words", {"bad_words": [*"-0123456789"], "allowed_token_ids": digits}),
    ):
        bench.send("api0", submit("x", param, format=json_format({"type": "integer"}), **options))
        rejected = bench.one(Rejected)
        assert (rejected.request_id, rejected.status, rejected.param) == (param, 400, param)
    bench.send("api0", submit("x", "left", format=json_format({"type": "object"}), allowed_token_ids=[brace], bad_words=["x"]))
    assert bench.request().sampling.allowed_token_ids == [brace]
    bench.send("api0", submit("x", "wrong", format=json_format({"contains": True})))
    rejected = bench.one(Rejected)
    assert (rejected.request_id, rejected.status, rejected.param) == ("wrong", 400, "response_format")
    assert "contains" in rejected.message


def json_format(schema: dict[str, Any]) -> AnswerFormat:
    return AnswerFormat("json", json.dumps(schema), "response_format")


def test_impossible_token_ends_a_prediction(vocabulary: Vocabulary) -> None:
    """The embedding table has no row for such a token, and a prompt with it is refused. No more is encoded than can be used."""
    told = vocabulary.encode("one two three", False)
    rules = SamplingRules(vocabulary, vocab_size=max(told), eos_token_ids=(), max_model_len=64, max_positions=64)
    found = rules.resolve(SamplingParams(), TextOptions(prediction="one two three")).prediction_token_ids
    assert found == int32(*told[: told.index(max(told))])
    whole = SamplingRules(vocabulary, vocab_size=1 << 20, eos_token_ids=(), max_model_len=64, max_positions=64)
    assert len(whole.resolve(SamplingParams(), TextOptions(prediction="1" * 5_000_000)).prediction_token_ids) <= 4 * 64


class Panic(BaseException):
    """Panic like that of pyo3, which is no Exception."""


def test_a_panic_of_a_library_fails_its_request(vocabulary: Vocabulary, tmp_path: Path) -> None:
    def encode(text: str, add_special_tokens: bool) -> list[int]:
        raise Panic("called `Option::unwrap()` on a `None` value")

    broken = Vocabulary([None], vocabulary.rule, encode, frozenset(), {})
    templates = ChatTemplates({}, {}, 1000, trusts_requests=False)
    encoder = PromptEncoder(broken, templates, vocab_size=10, max_model_len=64)
    rules = SamplingRules(broken, vocab_size=10, eos_token_ids=(), max_model_len=64, max_positions=64)
    formats = AnswerFormats(lambda: GrammarTokens([], [], []), tmp_path / "vocabulary", 64)
    preparation = Preparation(broken, encoder, rules, formats, Parsers("none", "none", ()), 64)
    prepared = preparation.prepare(together([submit("x"), submit(TokensPrompt(int32(5)), "s")]))
    assert isinstance(prepared, Prepared)
    refusal, fine = prepared.prompts
    assert isinstance(refusal, Refusal)
    assert (refusal.status, "unwrap" in refusal.message) == (500, True)
    assert isinstance(fine, PreparedPrompt)
    assert isinstance(preparation.prepare(together([submit(TokensPrompt(int32(5)), bad_words=["a"])])), Refusal)


# --------------------------------------------------------------------------------------------------------- other models


def test_a_template_of_the_operator_replaces_the_models(tmp_path: Path, vocabulary: Vocabulary) -> None:
    with Bench(tmp_path, chat_template="Q: {{ messages[0].content }} A:") as bench:
        bench.send("api0", submit(chat({"role": "user", "content": "x"})))
        assert bench.request().prompt.token_ids == int32(*vocabulary.encode("Q: x A:", False))


def test_dummy_weights_need_no_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((MODEL / "config.json").read_text())
    with Bench(tmp_path, model=str(model), load_format="dummy") as bench:
        bench.send("api0", submit(TokensPrompt(int32(5, 6))), submit("text", "s"))
        assert bench.request().prompt.token_ids == int32(5, 6)
        assert bench.one(Rejected).request_id == "s"
        bench.send("scheduler", outputs([7, 8], "length"))
        assert (bench.delta()).token_ids == [7, 8]
    with pytest.raises(CheckpointError, match=f"{model} has none of tokenizer.json, tokenizer.model, tiktoken.model; copy it"):
        vocabulary_for(ModelRecord.read(model), "safetensors")


# --------------------------------------------------------------------------------------------------------------- pictures


def test_pictures_are_forwarded_as_items_and_units(tmp_path: Path) -> None:
    """The scheduler gets them with every sequence of the request, and so does a client that only counts tokens."""
    source = MediaSource("api0", (), "image")
    picture = MediaItem(source, "image", (1, 4, 6), (bytes(32),), 6)
    prompt = ChatPrompt(b'[{"role": "user", "content": [{"type": "image"}]}]')
    with Bench(tmp_path, model=str(GOLDEN / "qwen2_5_vl")) as bench:
        samples = [submit(prompt, f"k-{index}", key="k", media=[picture], sample_index=index) for index in range(2)]
        bench.send("api0", together(samples))
        for request in (found := bench.received("scheduler")):
            assert isinstance(request, SequenceRequest)
            assert (request.shared.media, request.shared.mask_bounds) == ([picture], b"")
            (unit,) = request.prompt.units
            assert (unit.num_tokens, unit.height, unit.width) == (6, 2, 3)
            assert array("i", request.prompt.token_ids)[unit.start : unit.start + 6].tolist() == [5] * 6
        assert len(found) == 2
        bench.send("api0", Tokenize("c", "api0", prompt, media=[picture]))
        assert bench.one(Tokenized).token_ids == request.prompt.token_ids
        bounds = int32(*[0, 9] * 10)
        bench.send("api0", submit(TokensPrompt(int32(*[7] * 10)), mask_bounds=bounds))
        assert bench.request().shared.mask_bounds == bounds
        bench.send("api0", submit(prompt, "bad"))
        assert "0 image items" in bench.one(Rejected).message
