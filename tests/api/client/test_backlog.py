"""The way to a tokenizer, on a real ring that the test reads."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from api.client.backlog import Backlog, Item
from engine.errors import RequestError
from engine.messages import Abort, Message, SamplingParams, Submission, Submit, TextOptions, TextPrompt, Tokenize, decode
from engine.process.outbox import Outbox
from engine.process.segments import rows_of, unlink_segments
from shm.counters import Counters
from shm.mailbox import Mailbox, MailboxSender
from tests.configurations import engine_config

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

    def send(self, *items: Submit) -> None:
        self.backlog.check(items)
        for item in items:
            self.backlog.push(item.key, item)
        self.backlog.flush()

    def received(self) -> list[Message]:
        """All that the ring has now."""
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


def submits(key: str, num_samples: int, prompt: str = "x", text: TextOptions | None = None, source: str = "") -> list[Submit]:
    shared = TextPrompt(prompt)
    text = text or TextOptions()
    return [
        Submit(
            f"{key}-{index}",
            "api0",
            1,
            0,
            shared,
            SamplingParams(sample_index=index),
            text,
            group_id=key,
            key=key,
            source=source,
        )
        for index in range(num_samples)
    ]


def test_what_samples_share_travels_once(bench: Bench) -> None:
    words = TextOptions(stop=["s" * 100] * 64, bad_words=["b" * 20] * 64)
    sent = submits("k", 128, "prompt" * 50, words)
    bench.send(*sent)
    messages = bench.drained()
    assert [submit for message in messages if isinstance(message, Submission) for submit in message.submits()] == sent
    assert len(messages) < 4


def test_requests_take_turns(bench: Bench) -> None:
    prompts = [submits("large", 1, str(index) * 10_000)[0] for index in range(20)]
    bench.send(*prompts)
    bench.send(*submits("small", 1))
    bench.backlog.push("call", Tokenize("call", "api0", TextPrompt("x")))
    assert not any(name_of(message) == "small" for message in bench.received())
    bench.backlog.flush()
    names = [name_of(message) for message in bench.drained()]
    assert names.index("small") <= 2
    assert names.index("call") <= 3
    assert names[-1] == "large"


def name_of(message: Message) -> str:
    if isinstance(message, Submission):
        return message.key
    assert isinstance(message, Tokenize)
    return message.call_id


def test_a_queue_of_many_requests_refuses_new_requests(bench: Bench) -> None:
    bench.send(*(submits("0", 1, "x" * 20_000)[0] for _ in range(9)))
    for index in range(1, 3):
        bench.send(*submits(str(index), 1, "x" * 20_000))
    with pytest.raises(RequestError) as caught:
        bench.send(*submits("3", 1))
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "queue_full", 1)
    assert len(bench.drained()) == 11
    bench.send(*submits("3", 1))
    assert len(bench.drained()) == 1


def test_who_fills_the_queue_leaves_room_for_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.client.backlog.MAX_WAITING_BYTES", 100_000)
    for index in range(6):  # three wait, and one as the next record
        bench.send(*submits(f"many{index}", 1, "x" * 25_000, source="many"))
    with pytest.raises(RequestError):
        bench.send(*submits("one more", 1, source="many"))
    bench.send(*submits("few", 1, source="few"))
    with pytest.raises(RequestError):  # too many bytes together
        bench.send(*submits("large", 1, "x" * 60_000, source="few"))
    assert "few" in [name_of(message) for message in bench.drained()]


def test_what_nobody_waits_for_is_not_sent(bench: Bench) -> None:
    bench.send(*(submits("0", 1, "x" * 20_000)[0] for _ in range(4)))
    gone, kept = submits("1", 2)
    bench.send(gone, kept)
    bench.backlog.push("1", Abort("1-0", 0))
    bench.stale.append(gone)
    after = [message for message in bench.drained() if not isinstance(message, Submission) or message.key == "1"]
    assert isinstance(after[0], Submission)
    assert after[0].submits() == [kept]
    assert after[1:] == [Abort("1-0", 0)]


def test_what_no_record_can_hold(bench: Bench) -> None:
    with pytest.raises(RequestError) as caught:
        bench.send(*submits("k", 1, "x" * RING_BYTES))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", "prompt")
