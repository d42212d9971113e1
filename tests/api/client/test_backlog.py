"""The way to a tokenizer, on a real ring that the test reads."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from api.client.backlog import Backlog, EncodedRequest, Item, SequenceSubmit
from engine.errors import RequestError
from engine.messages import Abort, Message, Prompt, SequencePart, Submit, TextOptions, TextPrompt, Tokenize, decode, encode
from engine.process.outbox import Outbox
from engine.process.segments import rows_of, unlink_segments
from shm.counters import Counters
from shm.mailbox import Mailbox, MailboxSender
from tests.configurations import engine_config
from tests.requests import parts_of, submitted

RING_BYTES = 64 << 10


class Bench:
    def __init__(self) -> None:
        self._run_id = run_id = secrets.token_hex(4)
        self._mailbox = Mailbox.create(run_id, "tokenizer0", ("api0",), RING_BYTES)
        self._counters = Counters.create(run_id, ("api0",), rows_of)
        sent, full = (self._counters.counter(name, "api0") for name in ("messages_sent_total", "ring_full_total"))
        sender = MailboxSender.attach(run_id, "tokenizer0", "api0", 1)
        self.outbox = Outbox("tokenizer0", sender, sent, full)
        config = engine_config(model="", max_model_len=64, num_kv_blocks=4, run_id=run_id, run_dir="", max_waiting=3)
        self.stale: list[Item] = []
        self.backlog = Backlog(self.outbox, config, lambda item: any(item is stale for stale in self.stale))

    def send(self, *items: SequenceSubmit) -> None:
        """Push sequences of one request."""
        key = items[0].own.group_id
        self.backlog.check(items[0].request, key, [item.own for item in items])
        for item in items:
            self.backlog.push(key, item)
        self.backlog.flush()

    def received(self) -> list[Message]:
        """Return all messages that are in the ring now."""
        return [decode(payload) for _, payload in self._mailbox.receive()]

    def drained(self) -> list[Message]:
        messages = []
        while batch := self.received():
            messages += batch
            self.backlog.flush()
        return messages

    def close(self) -> None:
        self.outbox.close()
        self._counters.close()
        self._mailbox.close()
        unlink_segments(self._run_id)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def submits(key: str, num_sequences: int, *prompts: str, **fields: Any) -> list[SequenceSubmit]:
    """Return `num_sequences` sequences for each prompt."""
    shared, _ = parts_of(key, {"key": key, **fields})
    request = EncodedRequest.of(shared, [TextPrompt(prompt) for prompt in prompts or ("x",)])
    return [
        SequenceSubmit(request, SequencePart(f"{key}-{place}-{index}", key, place, index))
        for place in range(len(request.prompts))
        for index in range(num_sequences)
    ]


def taken(messages: list[Message]) -> list[tuple[str, Prompt]]:
    """Return the request id and the prompt of each submitted sequence."""
    return [
        (sequence.request_id, sequence.prompt)
        for message in messages
        if isinstance(message, Submit)
        for sequence in submitted(message)
    ]


def test_shared_fields_are_sent_once(bench: Bench) -> None:
    words = TextOptions(stop=["s" * 100] * 64, bad_words=["b" * 20] * 64)
    bench.send(*submits("k", 128, "prompt" * 50, text=words))
    messages = bench.drained()
    assert taken(messages) == [(f"k-0-{index}", TextPrompt("prompt" * 50)) for index in range(128)]
    assert len(messages) < 4


def test_shared_fields_count_for_each_message(bench: Bench) -> None:
    """Fields and prompts that fit a record each, but not all together, take several."""
    limit = bench.backlog.max_record_bytes
    words = TextOptions(stop=["s" * (7 * limit // 10)])
    prompts = [str(index) * (limit // 10) for index in range(9)]
    bench.send(*submits("k", 2, *prompts, text=words))
    assert [prompt for _, prompt in taken(bench.drained())] == [TextPrompt(prompt) for prompt in prompts for _ in range(2)]


def test_requests_take_turns(bench: Bench) -> None:
    bench.send(*submits("large", 1, *(str(index)[-1] * 10_000 for index in range(20))))
    bench.send(*submits("small", 1))
    bench.backlog.push("call", Tokenize("call", "api0", TextPrompt("x")))
    assert not any(name_of(message) == "small" for message in bench.received())
    bench.backlog.flush()
    names = [name_of(message) for message in bench.drained()]
    assert names.index("small") <= 2
    assert names.index("call") <= 3
    assert names[-1] == "large"


def name_of(message: Message) -> str:
    if isinstance(message, Submit):
        return message.shared.key
    assert isinstance(message, Tokenize)
    return message.call_id


def test_a_queue_of_many_requests_refuses_new_requests(bench: Bench) -> None:
    bench.send(*submits("0", 1, *["x" * 20_000] * 9))
    for index in range(1, 3):
        bench.send(*submits(str(index), 1, "x" * 20_000))
    with pytest.raises(RequestError) as caught:
        bench.send(*submits("3", 1))
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "queue_full", 1)
    assert len(bench.drained()) == 11
    bench.send(*submits("3", 1))
    assert len(bench.drained()) == 1


def test_busy_source_leaves_room_for_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.client.backlog.MAX_WAITING_BYTES", 100_000)
    for index in range(6):  # three wait, and one as the next record
        bench.send(*submits(f"many{index}", 1, "x" * 25_000, source="many"))
    with pytest.raises(RequestError):
        bench.send(*submits("one more", 1, source="many"))
    bench.send(*submits("few", 1, source="few"))
    with pytest.raises(RequestError):  # too many bytes together
        bench.send(*submits("large", 1, "x" * 60_000, source="few"))
    assert "few" in [name_of(message) for message in bench.drained()]


def test_aborted_requests_are_not_sent(bench: Bench) -> None:
    bench.send(*submits("0", 1, *["x" * 20_000] * 4))
    gone, kept = submits("1", 2)
    bench.send(gone, kept)
    bench.backlog.push("1", Abort("1-0-0", 0))
    bench.stale.append(gone)
    after = [message for message in bench.drained() if not isinstance(message, Submit) or message.shared.key == "1"]
    assert taken(after[:1]) == [(kept.own.request_id, TextPrompt("x"))]
    assert after[1:] == [Abort("1-0-0", 0)]


def test_too_long_prompt_is_refused(bench: Bench) -> None:
    with pytest.raises(RequestError) as caught:
        bench.send(*submits("k", 1, "x" * RING_BYTES))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", "prompt")


def test_prompts_are_encoded_once_for_all_messages(bench: Bench) -> None:
    first, second = submits("k", 1, "a", "b")
    again = msgspec.structs.replace(second.own, attempt=1)
    whole, alone = first.request.submit([first.own, second.own]), first.request.submit([again])
    assert all(isinstance(part, msgspec.Raw) for part in (whole.shared, *whole.prompts))
    assert (alone.shared, alone.prompts[0]) == (whole.shared, whole.prompts[1])
    assert taken([decode(encode(alone))]) == [("k-1-0", TextPrompt("b"))]
