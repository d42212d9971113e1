"""Checks of what an engine says to a router: numbers that no engine uses are refused, and others pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from engine.cluster.answer_check import check_outputs, check_refusal, check_reply, check_report, check_welcome
from engine.cluster.frames import PROTOCOL, Load, Report, Welcome, WrongFrameError
from engine.messages import Output, Rejected, Reply, TokenLogprobs, WeightsRecord, WeightsState

RECORD = WeightsRecord("/m", 1, 1, WeightsState.NORMAL, (("/m", 1),), {1: "digest"})
WELCOME = Welcome(PROTOCOL, "run", "namespace", "namespace", "facts", [RECORD], [], [])
LOAD = Load(True, 1, 0, 0, 0, 0, 4, 9, 9, 0, 0, 0)
REPORT = Report(3, 2, 1, [LOAD])
OUTPUT = Output("one", 0, [5], "length", logprobs=[TokenLogprobs(5, -0.5, 1, [5], [-0.5])])
REFUSAL = Rejected("one", 0, "api0", 429, "later")
LONG = "x" * 1000

WRONG: dict[str, Callable[[], None]] = {
    "no records": lambda: check_welcome(replace(WELCOME, records=[])),
    "unknown version": lambda: check_welcome(replace(WELCOME, records=[replace(RECORD, version=7)])),
    "large version": lambda: check_welcome(replace(WELCOME, records=[replace(RECORD, contents={1: "a", 1 << 63: "b"})])),
    "many contents": lambda: check_welcome(
        replace(WELCOME, records=[replace(RECORD, contents=dict.fromkeys(range(5000), "a"))])
    ),
    "long contents": lambda: check_welcome(replace(WELCOME, records=[replace(RECORD, contents={1: LONG})])),
    "long facts": lambda: check_welcome(replace(WELCOME, facts=LONG * 1000)),
    "large load": lambda: check_report(replace(REPORT, loads=[replace(LOAD, num_requests_running=1 << 63)]), 3),
    "negative load": lambda: check_report(replace(REPORT, loads=[replace(LOAD, num_free_kv_blocks=-1)]), 3),
    "frames that were not sent": lambda: check_report(REPORT, 2),
    "more taken than received": lambda: check_report(replace(REPORT, taken=4), 4),
    "negative token": lambda: check_outputs([replace(OUTPUT, token_ids=[-1])], 10),
    "token outside the vocabulary": lambda: check_outputs([OUTPUT], 5),
    "stop token": lambda: check_outputs([replace(OUTPUT, stop_token_id=10)], 10),
    "finish reason": lambda: check_outputs([replace(OUTPUT, finish_reason="tired")], 10),
    "long id": lambda: check_outputs([replace(OUTPUT, request_id=LONG)], 10),
    "half a number": lambda: check_outputs([replace(OUTPUT, pooled=b"123")], 10),
    "cached tokens": lambda: check_outputs([replace(OUTPUT, num_cached_tokens=-1)], 10),
    "log-probabilities": lambda: check_outputs([replace(OUTPUT, logprobs=[TokenLogprobs(5, -0.5, 1, [5], [])])], 10),
    "alternatives": lambda: check_outputs([replace(OUTPUT, prompt_logprobs=[TokenLogprobs(5, -0.5, 1, [10], [0.0])])], 10),
    "refusal that is none": lambda: check_refusal(replace(REFUSAL, status=200)),
    "negative pause": lambda: check_refusal(replace(REFUSAL, retry_after_s=-1)),
    "status": lambda: check_reply(Reply("id", 99999)),
}


def test_what_engines_say_passes() -> None:
    check_welcome(WELCOME)
    check_report(REPORT, 3)
    check_outputs([OUTPUT, Output("two", 1, []), Output("three", 0, [9], "stop", stop_token_id=9, pooled=bytes(8))], 10)
    check_refusal(REFUSAL)
    check_reply(Reply("id"))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers_are_refused(name: str) -> None:
    with pytest.raises(WrongFrameError):
        WRONG[name]()
