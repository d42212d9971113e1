"""Corners of an open request that no client can reach on purpose: merged pieces, clients that never read."""

from __future__ import annotations

import asyncio

import pytest

from api.client.backlog import EncodedRequest
from api.client.generation import MAX_HELD_LOGPROBS, MAX_PENDING_DELTAS, STALLED_CLIENT_NS, ClientGone, Generation, OpenSequence
from engine.errors import RequestError
from engine.messages import DecodedLogprobs, Delta, TextPrompt
from tests.requests import parts_of

SHARED, OWN = parts_of("r", {})
REQUEST = EncodedRequest.of(SHARED, [TextPrompt("x")])


def generation(closed: list[Generation], cut: list[bool]) -> Generation:
    made = Generation(
        SHARED,
        REQUEST,
        sequences_per_prompt=1,
        is_streaming=True,
        abort_connection=lambda: cut.append(True),
        close=closed.append,
    )
    made.sequences = [OpenSequence(OWN, "tokenizer0", made)]
    made.num_unfinished = 1
    return made


def delta(*token_ids: int, **fields: object) -> Delta:
    logprobs = [DecodedLogprobs(token_id, -0.5, 1, b"") for token_id in token_ids]
    return Delta("r", 0, list(token_ids), "".join(map(chr, token_ids)), logprobs=logprobs, **fields)  # type: ignore[arg-type]


def test_waiting_deltas_are_merged() -> None:
    sample = generation([], []).sequences[0]
    sample.accept(delta(97, num_prompt_tokens=5, num_cached_tokens=4, weight_version=3))
    sample.accept(delta(98, 99, num_prompt_tokens=5, num_cached_tokens=5, weight_version=4))
    piece = sample.take()
    assert (piece.token_ids, piece.text, len(piece.logprobs)) == ([97, 98, 99], "abc", 3)
    assert not sample.is_finished
    sample.accept(delta(100, weight_version=4, finish_reason="stop", stop_reason="d"))
    assert sample.is_finished
    assert (sample.take().text, sample.take().token_ids) == ("d", [])
    assert (sample.num_prompt_tokens, sample.num_cached_tokens, sample.weight_version) == (5, 4, "3,4")
    assert (sample.delivered.tolist(), sample.cumulative_logprob) == ([97, 98, 99, 100], -2.0)


def test_deltas_that_wait_become_few() -> None:
    sample = generation([], []).sequences[0]
    for token_id in range(4 * MAX_PENDING_DELTAS):
        sample.accept(delta(token_id % 128))
    assert len(sample.pending) <= MAX_PENDING_DELTAS
    assert sample.num_pending == 8 * MAX_PENDING_DELTAS
    piece = sample.take()
    assert piece.token_ids == [token_id % 128 for token_id in range(4 * MAX_PENDING_DELTAS)]
    assert len(piece.logprobs) == len(piece.text) == 4 * MAX_PENDING_DELTAS
    assert sample.num_pending == 0


def test_prompt_logprobs_arrive_in_parts() -> None:
    """A part of them is no piece of the answer, and a resubmission asks for the rest."""
    sample = generation([], []).sequences[0]
    entries = delta(98, 99, 100).logprobs
    sample.accept(Delta("r", 0, [], "", prompt_logprobs=entries[:2], first_prompt_token=b"a"))
    assert not sample.pending
    assert sample.next_attempt().num_scored_prompt_tokens == 2
    sample.accept(Delta("r", 1, [101], "e", prompt_logprobs=entries[2:]))
    assert (sample.first_prompt_token, sample.prompt_logprobs, sample.take().text) == (b"a", entries, "e")


def test_resubmission_is_a_new_object() -> None:
    sample = generation([], []).sequences[0]
    first = sample.own
    sample.accept(delta(97))
    second = sample.next_attempt()
    assert (first.attempt, first.resume_token_ids) == (0, b"")
    assert (second.attempt, second.resume_token_ids) == (1, b"a\0\0\0")
    assert sample.own is second


def test_a_client_that_never_reads_is_cut() -> None:
    cut: list[bool] = []
    made = generation([], cut)
    made.drop_stalled_client(10 * STALLED_CLIENT_NS)
    made.writing_since_ns = 1
    made.drop_stalled_client(STALLED_CLIENT_NS)
    assert not cut
    made.drop_stalled_client(STALLED_CLIENT_NS + 2)
    assert cut == [True]


def test_held_logprobs_are_bounded() -> None:
    """A stream holds only the log-probabilities of its prompt."""
    entries = [DecodedLogprobs(97, -0.5, 1, b"", (97,), (-0.5,))] * (MAX_HELD_LOGPROBS // 4)

    async def run(is_streaming: bool, closed: list[Generation]) -> None:
        made = Generation(
            SHARED, REQUEST, sequences_per_prompt=1, is_streaming=is_streaming, abort_connection=print, close=closed.append
        )
        sample = OpenSequence(OWN, "tokenizer0", made)
        made.num_unfinished = 1
        sample.accept(Delta("r", 0, [97], "a", prompt_logprobs=entries))
        sample.accept(Delta("r", 0, [97], "a", logprobs=entries))
        made.check_held()
        assert not closed
        sample.accept(Delta("r", 0, [97], "a", logprobs=entries[:1]))
        made.check_held()
        if is_streaming:
            sample.accept(Delta("r", 0, [97], "a", prompt_logprobs=[*entries, *entries[:1]]))
            made.check_held()
        assert closed == [made]
        with pytest.raises(RequestError, match="send fewer prompts"):
            await made.wait()

    asyncio.run(run(False, []))
    asyncio.run(run(True, []))


def test_leaving_closes_once() -> None:
    async def run() -> None:
        closed: list[Generation] = []
        made = generation(closed, [])
        made.leave()
        made.leave()
        assert closed == [made]
        with pytest.raises(ClientGone):
            await made.wait()
        ended = generation(closed, [])
        ended.num_unfinished = 0
        ended.leave()
        assert closed == [made]

    asyncio.run(run())
