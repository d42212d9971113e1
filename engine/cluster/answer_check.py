"""Checks of an engine's frames by the link of a router, before tokenizers, api processes and gauges see them.

A router's processes trust what schedulers of their own machine tell them. An engine is any program with the key, so every
number is checked again. A wrong one ends the session with that engine and has no other effect. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.cluster.frames import MAX_NAME_CHARACTERS, Report, Welcome, WrongFrameError
from engine.messages import Output, Rejected, Reply, TokenLogprobs

MAX_NUMBER = 1 << 60  # two of them can be added
MAX_CONTENTS = 4096  # weights that a replica names
MAX_FACTS_CHARACTERS = 1 << 16
_REASONS = ("", "stop", "length", "abort", "timeout")
_COUNTS = ("attempt", "num_prompt_tokens", "num_cached_tokens", "weight_version", "num_computed_tokens")


def check_welcome(welcome: Welcome) -> None:
    """Raise WrongFrameError if an engine does not say which weights it has, or with numbers that no engine uses."""
    texts = [welcome.namespace, welcome.namespace_without_kernels, *welcome.orders]
    for record in welcome.records:
        if not 0 < len(record.contents) <= MAX_CONTENTS or record.version not in record.contents:
            raise WrongFrameError("it does not say which weights it has")
        _check_numbers("version", [*record.contents, record.last_version])
        texts += record.contents.values()
    if not welcome.records or max(map(len, texts)) > MAX_NAME_CHARACTERS or len(welcome.facts) > MAX_FACTS_CHARACTERS:
        raise WrongFrameError("it does not say which weights it has, or in too long words")


def check_report(report: Report, num_sent: int) -> None:
    """Raise WrongFrameError for a report of frames that were not sent, or with impossible gauges."""
    if not 0 <= report.taken <= report.received <= num_sent:
        raise WrongFrameError(f"it took {report.taken} and received {report.received} of {num_sent} frames")
    for load in report.loads:
        _check_numbers("load", [value for name in load.__struct_fields__ if (value := getattr(load, name)) is not True])


def check_outputs(outputs: Sequence[Output], vocab_size: int) -> None:
    """Raise WrongFrameError for results that no scheduler sends. `vocab_size`: token ids are below it."""
    for output in outputs:
        if len(output.request_id) > MAX_NAME_CHARACTERS or output.finish_reason not in _REASONS or len(output.pooled) % 4:
            raise WrongFrameError("a result with a wrong text, or half a number")
        for name in _COUNTS:
            _check_numbers(name, [getattr(output, name)])
        _check_tokens(output.token_ids, vocab_size)
        if output.stop_token_id != -1:
            _check_tokens([output.stop_token_id], vocab_size)
        for row in (*output.logprobs, *output.prompt_logprobs):
            _check_logprobs(row, vocab_size)


def check_refusal(rejected: Rejected) -> None:
    """Raise WrongFrameError unless a refusal has a status that says so."""
    if not 400 <= rejected.status < 600:
        raise WrongFrameError(f"a refusal with status {rejected.status}")
    _check_numbers("refusal", [rejected.attempt, rejected.retry_after_s])


def check_reply(reply: Reply) -> None:
    """Raise WrongFrameError for a reply that is no HTTP answer."""
    if not 200 <= reply.status < 600 or len(reply.command_id) > MAX_NAME_CHARACTERS:
        raise WrongFrameError(f"a reply with status {reply.status}")


def _check_logprobs(row: TokenLogprobs, vocab_size: int) -> None:
    _check_tokens([row.token_id, *row.top_token_ids], vocab_size)
    _check_numbers("rank", [row.rank])
    if len(row.top_token_ids) != len(row.top_logprobs):
        raise WrongFrameError(f"{len(row.top_logprobs)} log-probabilities of {len(row.top_token_ids)} tokens")


def _check_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise WrongFrameError(f"token ids outside the vocabulary of {vocab_size} tokens")


def _check_numbers(name: str, values: Iterable[int]) -> None:
    for value in values:
        if not 0 <= value <= MAX_NUMBER:
            raise WrongFrameError(f"{name} is {value}, expected 0 to {MAX_NUMBER}")
