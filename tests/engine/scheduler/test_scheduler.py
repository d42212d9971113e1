"""The scheduler on real rings, with a rank that reveals every misplaced block in its tokens."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.config import SpeculativeConfig
from engine.messages import (
    AbortRequest,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Hello,
    PromptOptions,
    SamplingParams,
)
from tests.engine.scheduler.simulation import Simulation, Stream, expected_tokens, ints, simulate
from tests.requests import request_message
from tests.waiting import wait_until


@pytest.fixture
def simulation(directory: Path) -> Iterator[Simulation]:
    with simulate(directory) as running:
        yield running


def prompts(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(61) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def submit_all(simulation: Simulation, count: int = 16, seed: int = 1, max_tokens: int = 20, **options: Any) -> list[Stream]:
    return [
        simulation.submit(prompt, seed=index, max_tokens=max_tokens, **options)
        for index, prompt in enumerate(prompts(count, seed))
    ]


# ---------------------------------------------------------------------------------------------------- batches, chunks, ends


def test_one_request(simulation: Simulation) -> None:
    stream = simulation.submit([1, 2, 3, 4, 5], max_tokens=6)
    simulation.finish()
    simulation.check()
    simulation.check_idle()
    assert [output.num_prompt_tokens for output in stream.outputs] == [5] * 6
    assert {output.weight_version for output in stream.outputs} == {1}
    assert [entry.token_id for output in stream.outputs for entry in output.logprobs] == stream.token_ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"enable_prefix_caching": False},
        {"num_kv_blocks": 18},
        {"num_kv_blocks": 18, "max_num_batched_tokens": 7, "enable_prefix_caching": False},
        {"block_size": 1, "num_kv_blocks": 1000},
        {"block_size": 64, "num_kv_blocks": 4},
    ],
    ids=["together", "chunked", "one-by-one", "uncached", "preempted", "preempted-chunked", "block-1", "block-64"],
)
def test_the_same_tokens_in_every_condition(directory: Path, options: dict[str, Any]) -> None:
    with simulate(directory, **options) as simulation:
        submit_all(simulation)
        simulation.finish()
        submit_all(simulation)  # with a warm prefix cache
        simulation.finish()
        simulation.check()
        simulation.check_idle()
        is_small = options.get("num_kv_blocks") == 18
        assert (simulation.metric("num_preemptions_total") > 0) == is_small
        if not options:
            assert simulation.metric("prefix_cache_hits_total") > 0


def test_one_step_ahead(simulation: Simulation) -> None:
    """The next step is dispatched before the result is back, and no third."""
    simulation.submit([1, 2, 3], max_tokens=10)
    simulation.loop.turn()
    assert simulation.scheduler.dispatcher.num_in_flight == 2
    simulation.loop.turn()
    assert simulation.scheduler.dispatcher.num_in_flight == 2
    simulation.finish()
    simulation.check()


def test_tokens_after_a_stop_token_are_dropped(simulation: Simulation) -> None:
    undisturbed = expected_tokens([7, 8, 9], SamplingParams(max_tokens=20))
    stop = undisturbed[9]
    first = undisturbed.index(stop)
    stream = simulation.submit([7, 8, 9], max_tokens=20, stop_token_ids=[stop])
    later = simulation.submit([7, 8, 9], max_tokens=20, stop_token_ids=[stop], min_tokens=first + 1)
    simulation.finish()
    simulation.check()
    assert stream.token_ids == undisturbed[: first + 1]
    assert stream.outputs[-1].stop_token_id == stop
    assert len(later.token_ids) > len(stream.token_ids)
    simulation.run_until(lambda: simulation.scheduler.dispatcher.num_in_flight == 0, "no step in flight")
    simulation.check_idle()


def test_prompt_progress_is_sent_on_request(directory: Path) -> None:
    with simulate(directory, max_num_batched_tokens=16, num_kv_blocks=64) as simulation:
        asking = simulation.submit([3] * 50, max_tokens=4, options=PromptOptions(returns_progress=True))
        silent = simulation.submit([4] * 50, max_tokens=4)
        simulation.finish()
        simulation.check()
    told = [output.num_computed_tokens for output in asking.admissions]
    assert [num_tokens for num_tokens in told if num_tokens] == sorted({*told} - {0})
    assert told[-1] == 50
    assert len(told) > 3
    assert not any(output.num_computed_tokens for output in silent.admissions)


def test_steps_stay_within_the_length(simulation: Simulation) -> None:
    simulation.submit([1] * 10, max_tokens=3)
    simulation.finish()
    assert sum(step.is_sampling.count(1) for step in simulation.rank.steps) == 3


def test_zero_max_tokens_computes_the_prompt_only(simulation: Simulation) -> None:
    stream = simulation.submit([5] * 70, max_tokens=0, num_prompt_logprobs=0)
    simulation.finish()
    assert (stream.token_ids, stream.finish_reason) == ([], "length")
    assert len(stream.prompt_logprobs) == 69
    simulation.check_idle()


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 3}, {"num_kv_blocks": 24}], ids=["whole", "chunked", "small"]
)
def test_prompt_logprobs_are_complete_and_sent_once(directory: Path, options: dict[str, Any]) -> None:
    with simulate(directory, **options) as simulation:
        streams = [simulation.submit([3, 1, 4, 1, 5, 9, 2, 6] * 3, num_prompt_logprobs=0, max_tokens=30) for _ in range(4)]
        simulation.start(streams[0])
        simulation.restart_rank()
        simulation.finish()
        simulation.check()
        for stream in streams:
            assert [entry.token_id for entry in stream.prompt_logprobs] == ([3, 1, 4, 1, 5, 9, 2, 6] * 3)[1:]
            assert stream.prompt_logprobs == streams[0].prompt_logprobs
            first_token = next(index for index, output in enumerate(stream.outputs) if output.token_ids)
            assert not any(output.prompt_logprobs for output in stream.outputs[first_token:])


def test_long_prompt_logprobs_pass_a_small_ring(directory: Path) -> None:
    """Log-probabilities are sent chunk by chunk, in parts that fit a record; after a crash between two parts only the rest is
    requested."""
    with simulate(directory, ring_bytes=4096, max_num_batched_tokens=64) as simulation:
        prompt = [index % 61 for index in range(240)]
        whole, resumed = (simulation.submit(prompt, num_prompt_logprobs=0, max_tokens=4) for _ in range(2))
        simulation.run_until(lambda: len(resumed.prompt_logprobs) > 60, "the first parts")
        assert not resumed.token_ids
        simulation.resubmit(resumed)
        simulation.finish()
        simulation.check()
        assert [entry.token_id for entry in whole.prompt_logprobs] == prompt[1:]
        assert resumed.prompt_logprobs == whole.prompt_logprobs
        assert len([output for output in whole.outputs if output.prompt_logprobs]) > 4


def test_top_logprobs_are_sent_on_request(simulation: Simulation) -> None:
    plain = simulation.submit([1, 2], max_tokens=2)
    wanted = simulation.submit([1, 2], max_tokens=2, num_logprobs=1)
    simulation.finish()
    assert all(not entry.top_token_ids for output in plain.outputs for entry in output.logprobs)
    assert all(entry.top_token_ids == [entry.token_id] for output in wanted.outputs for entry in output.logprobs)


# ---------------------------------------------------------------------------------------------------------------- admission


def test_request_that_never_fits_is_a_400(simulation: Simulation) -> None:
    """The request neither hangs nor blocks others."""
    too_long = simulation.submit([1] * 250, max_tokens=7)
    empty = simulation.submit([])
    fits = simulation.submit([1] * 249, max_tokens=7)
    simulation.finish()
    simulation.check(fits)
    assert too_long.rejected is not None
    assert too_long.rejected.status == 400
    for word in ("250", "257", "256", "--max-model-len"):
        assert word in too_long.rejected.message
    assert empty.rejected is not None
    assert empty.rejected.status == 400
    assert simulation.metric("requests_rejected_total") == 2


def test_a_small_arena_is_named(directory: Path) -> None:
    with simulate(directory, num_kv_blocks=10) as simulation:
        stream = simulation.submit([1] * 40, max_tokens=1)
        fits = simulation.submit([1] * 39, max_tokens=1)
        simulation.finish()
        assert stream.rejected is not None
        for word in ("10 KV blocks of 4", "--num-kv-blocks"):
            assert word in stream.rejected.message
        simulation.check(fits)


def test_oversized_parameters_are_refused(directory: Path) -> None:
    with simulate(directory, broadcast_bytes=1 << 16) as simulation:
        refused = simulation.submit([1], allowed_token_ids=[100_000] * 8000)
        fits = simulation.submit([1], allowed_token_ids=[100_000] * 4000)
        simulation.finish()
        simulation.check(fits)
        assert refused.rejected is not None
        assert refused.rejected.status == 400
        assert "allowed_token_ids" in refused.rejected.message


def test_a_full_queue_is_a_429(directory: Path) -> None:
    with simulate(directory, max_waiting=3, max_num_seqs=2) as simulation:
        streams = [simulation.submit([1, 2, 3], max_tokens=30) for _ in range(8)]
        simulation.finish()
        refused = [stream for stream in streams if stream.rejected is not None]
        assert refused
        for stream in refused:
            assert stream.rejected is not None
            assert (stream.rejected.status, stream.rejected.retry_after_s) == (429, 1)
        simulation.check(*(stream for stream in streams if stream.rejected is None))


def test_busy_source_leaves_room_for_others(directory: Path) -> None:
    with simulate(directory, max_waiting=6, max_num_seqs=1) as simulation:
        running = simulation.submit([1], max_tokens=200, source="many")
        simulation.start(running)
        many = [simulation.submit([1, 2], max_tokens=4, source="many") for _ in range(9)]
        simulation.turn()
        few = [simulation.submit([3], max_tokens=4, source="few") for _ in range(3)]
        simulation.finish()
        assert [stream.rejected is not None for stream in many] == [False] * 6 + [True] * 3
        for stream in many[6:]:
            assert stream.rejected is not None
            assert "6 of them yours" in stream.rejected.message
        simulation.check(running, *many[:6], *few)


def test_begun_requests_are_accepted_after_a_restart(directory: Path) -> None:
    with simulate(directory, max_waiting=3, max_num_seqs=2) as simulation:
        streams = []
        for _ in range(5):
            streams.append(simulation.submit([1, 2, 3], max_tokens=200))
            simulation.turn()
        simulation.restart_scheduler()
        simulation.finish()
        simulation.check()


def test_counts_of_waiting_and_running(directory: Path) -> None:
    with simulate(directory, max_num_seqs=3) as simulation:
        streams = [simulation.submit([index], max_tokens=100) for index in range(7)]
        simulation.start(*streams[:3], num_tokens=3)
        assert simulation.metric("num_requests_running") == 3
        assert simulation.metric("num_requests_waiting") == 4
        simulation.finish()
        simulation.check_idle()


def test_priorities(directory: Path) -> None:
    with simulate(directory, max_num_seqs=1) as simulation:
        running = simulation.submit([1], max_tokens=20)
        simulation.start(running)
        low, high, middle = (simulation.submit([2], priority=priority) for priority in (5, -5, 0))
        ended = []

        def note() -> bool:
            ended.extend(stream for stream in (low, high, middle) if stream.is_over and stream not in ended)
            return len(ended) == 3

        simulation.run_until(note, "all ended")
        assert ended == [high, middle, low]


def test_better_priorities_starve_no_request(directory: Path) -> None:
    """Each arrives 1 ns after the one before; a priority moves a request by less than 10 ns."""
    with simulate(directory, max_num_seqs=1, max_priority_wait_s=2e-8) as simulation:
        victim = simulation.submit([1], max_tokens=1, priority=9)
        rivals = [simulation.submit([2], max_tokens=1, priority=-9) for _ in range(60)]
        simulation.run_until(lambda: victim.is_over, "the victim's end")
        assert 0 < sum(rival.is_over for rival in rivals) < 21
        simulation.finish()


def test_siblings_share_their_prompt(simulation: Simulation) -> None:
    prompt = list(range(40))
    streams = [
        simulation.submit(prompt, f"http-{index}", group_id="http", seed=9, sample_index=index, max_tokens=5)
        for index in range(4)
    ]
    simulation.finish()
    simulation.check()
    assert [stream.outputs[-1].num_cached_tokens for stream in streams] == [0, 36, 36, 36]
    simulation.check_idle()


def test_rank_loses_its_cache(directory: Path) -> None:
    """Lost blocks are not found any more, and running sequences are recomputed with the same tokens."""
    with simulate(directory) as simulation:
        prompt = list(range(40))
        simulation.submit(prompt, max_tokens=2)
        simulation.finish()
        for outlives, num_cached in ((True, 36), (False, 0)):
            simulation.caches_outlive_ranks = outlives
            stream = simulation.submit(prompt[::-1], max_tokens=30)
            simulation.start(stream, num_tokens=9)
            simulation.restart_rank()
            later = simulation.submit(prompt, max_tokens=2)
            simulation.finish()
            simulation.check()
            assert later.outputs[-1].num_cached_tokens == num_cached
        simulation.check_idle()


def test_deadlines(simulation: Simulation) -> None:
    overdue = simulation.submit([1], deadline_ns=1)
    simulation.finish(overdue)
    assert (overdue.finish_reason, overdue.token_ids) == ("timeout", [])
    in_time = simulation.submit([1], max_tokens=40, deadline_ns=time.monotonic_ns() + 3_600_000_000_000)
    simulation.finish(in_time)
    simulation.check(in_time)
    timed = simulation.submit([3], max_tokens=40, deadline_ns=time.monotonic_ns() + 3_600_000_000_000)
    simulation.loop.turn()
    assert simulation.scheduler.deadline_ns() == timed.request.shared.deadline_ns
    late = simulation.submit([2], deadline_ns=time.monotonic_ns() + 30_000_000)
    wait_until(lambda: simulation.loop.turn() + simulation.collect() and late.is_over, what="it expires, though its rank hangs")
    assert late.finish_reason == "timeout"
    simulation.run_until(lambda: simulation.scheduler.dispatcher.num_in_flight == 0, "no step in flight")
    simulation.finish(timed)
    simulation.check(timed)
    simulation.turn()
    simulation.check_idle()


# ------------------------------------------------------------------------------------------------------------------- aborts


def test_an_abort_frees_within_two_steps(simulation: Simulation) -> None:
    stays, goes = simulation.submit([1] * 20, max_tokens=60), simulation.submit([2] * 20, max_tokens=60)
    simulation.start(stays, goes, num_tokens=3)
    num_free = simulation.scheduler.batch.pool.num_free
    steps = len(simulation.rank.steps)
    simulation.abort(goes)
    simulation.run_until(lambda: simulation.scheduler.batch.pool.num_free > num_free + 3, "blocks are free")
    assert len(simulation.rank.steps) - steps <= 3
    simulation.finish(stays)
    simulation.check(stays)
    simulation.check_idle()
    assert simulation.metric("requests_aborted_total") == 1


def test_abort_of_an_older_attempt_is_ignored(simulation: Simulation) -> None:
    stream = simulation.submit([1, 2, 3], max_tokens=40)
    simulation.start(stream)
    older = Stream(stream.request)
    simulation.resubmit(stream)
    simulation.abort(older)
    simulation.finish()
    simulation.check()


def test_aborts_by_http_request_id(simulation: Simulation) -> None:
    streams = [simulation.submit([1], name, max_tokens=200) for name in ("x-0", "x-1", "x-y-0")]
    simulation.start(*streams)
    reply = simulation.ask(AbortRequest("x"))
    assert (reply.status, reply.details["num_aborted"]) == (200, 2)
    simulation.finish()
    assert [stream.finish_reason for stream in streams] == ["abort", "abort", "length"]
    assert simulation.ask(AbortRequest("x")).status == 404


def test_abort_affects_no_other_request(simulation: Simulation) -> None:
    """Ids are those that `api/submission.py` makes from the ones that clients choose."""
    streams = [
        simulation.submit([1], name, max_tokens=60) for name in ("job-1~aa", "job-1-2~bb", "job-1~cc-0", "job-1~dd~p0-1")
    ]
    simulation.start(*streams)
    for request_id in ("job", "", "1~aa", "job-1~d"):
        assert simulation.ask(AbortRequest(request_id)).status == 404
    assert simulation.ask(AbortRequest("job-1~cc")).details["num_aborted"] == 1
    assert simulation.ask(AbortRequest("job-1")).details["num_aborted"] == 2
    simulation.finish()
    assert [stream.finish_reason for stream in streams] == ["abort", "length", "abort", "abort"]


def test_a_dead_api_takes_its_requests_along(simulation: Simulation) -> None:
    stays, goes = simulation.submit([1], max_tokens=250), simulation.submit([2], max_tokens=250, api="api1")
    simulation.start(stays, goes)
    simulation.begin_epoch("api1", 2)
    simulation.run_until(lambda: goes.request.own.request_id not in simulation.scheduler.batch.sequences, "it is gone")
    orphan = simulation.submit([3], api="api1")  # of the old epoch, on its way when its api died
    simulation.finish(stays)
    simulation.check(stays)
    assert not orphan.outputs
    simulation.check_idle()


# -------------------------------------------------------------------------------------------------------- crashes around it


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_blocks": 18}, {"max_num_batched_tokens": 5}], ids=["wide", "small", "chunked"]
)
def test_streams_survive_rank_restarts(directory: Path, options: dict[str, Any]) -> None:
    """Steps are idempotent and dispatched again."""
    with simulate(directory, **options) as simulation:
        streams = submit_all(simulation, count=12, max_tokens=30)
        for round_number in range(6):
            simulation.run_until(partial(has_tokens, streams, 12 * round_number), "some tokens")
            simulation.loop.turn()
            simulation.restart_rank(answers=round_number % 2 == 0)
        simulation.finish()
        simulation.check()
        simulation.check_idle()
        assert simulation.metric("steps_dispatched_again_total") > 0


def has_tokens(streams: list[Stream], num_tokens: int) -> bool:
    return sum(len(stream.token_ids) for stream in streams) >= num_tokens or all(stream.is_over for stream in streams)


def test_streams_survive_scheduler_restarts(simulation: Simulation) -> None:
    streams = submit_all(simulation, count=12, max_tokens=30)
    for round_number in range(5):
        simulation.run_until(partial(has_tokens, streams, 24 * round_number), "some tokens")
        simulation.loop.turn()
        simulation.restart_scheduler()
    simulation.finish()
    simulation.check()
    simulation.check_idle()


def test_streams_survive_a_tokenizer_restart(simulation: Simulation) -> None:
    """Sequences of the tokenizer are dropped at once and continue as another attempt."""
    streams = submit_all(simulation, count=6, max_tokens=60)
    simulation.start(streams[0], num_tokens=5)
    simulation.begin_epoch("tokenizer0", 2)
    simulation.run_until(lambda: not simulation.scheduler.batch.sequences, "all are dropped")
    for stream in streams:
        if not stream.is_over:
            simulation.resubmit(stream)
    simulation.finish()
    simulation.check()
    assert simulation.metric("requests_aborted_total") == 0


@pytest.mark.parametrize("is_dropped_first", [True, False])
def test_own_prompt_is_uncached_for_a_later_attempt(simulation: Simulation, is_dropped_first: bool) -> None:
    """Whichever is noticed first: the death of the tokenizer, or the resubmission."""
    prompt = list(range(1, 41))
    simulation.submit(prompt[:9], max_tokens=1)
    simulation.finish()
    stream = simulation.submit(prompt, max_tokens=30)
    simulation.start(stream, num_tokens=3)
    (first,) = stream.admissions
    assert (first.num_prompt_tokens, first.num_cached_tokens) == (40, 8)
    if is_dropped_first:
        simulation.begin_epoch("tokenizer0", 2)
        wait_until(lambda: (simulation.turn(rank_records=0), not simulation.scheduler.batch.sequences)[1], what="dropped")
    stream.token_ids.clear()  # nothing had reached the api
    stream.outputs.clear()
    simulation.resubmit(stream)
    simulation.finish()
    simulation.check()
    assert {output.num_cached_tokens for output in (*stream.admissions, *stream.outputs)} == {8}


def test_a_newer_attempt_replaces_the_older(simulation: Simulation) -> None:
    stream = simulation.submit([4, 5, 6], max_tokens=50, num_prompt_logprobs=0)
    simulation.start(stream, num_tokens=7)
    old = stream.request
    simulation.resubmit(stream)
    simulation.send("tokenizer0", request_message(old))  # late, and of no use
    simulation.finish()
    simulation.check()
    assert len(stream.prompt_logprobs) == 2
    assert simulation.metric("messages_dropped_total") >= 1


def test_an_end_that_was_lost_is_told_again(simulation: Simulation) -> None:
    stream = simulation.submit([4, 5, 6], max_tokens=5)
    simulation.finish()
    stream.finish_reason = ""
    simulation.resubmit(stream)
    simulation.finish()
    assert stream.finish_reason == "length"
    simulation.check()
    simulation.check_idle()


def test_slow_tokenizer_delays_only_its_streams(directory: Path) -> None:
    with simulate(directory, ring_bytes=4096, tokenizer_processes=2, max_model_len=120) as simulation:
        simulation.is_reading["tokenizer1"] = False
        slow = [simulation.submit([index], tokenizer="tokenizer1", max_tokens=100) for index in range(4)]
        fast = [simulation.submit([index], max_tokens=100) for index in range(4)]
        simulation.finish(*fast)
        simulation.check(*fast)
        assert simulation.metric("slow_streams") == 4
        assert simulation.scheduler.deadline_ns() > 0
        simulation.is_reading["tokenizer1"] = True
        simulation.finish()
        simulation.check(*slow)
        assert simulation.metric("slow_streams") == 0
        simulation.check_idle()


def test_gauges_are_updated_before_outputs(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with its answer does not see its sequence running."""
    batch, flush = simulation.scheduler.batch, simulation.scheduler.delivery.flush
    seen: list[tuple[float, int]] = []

    def look_and_flush() -> int:
        seen.append((simulation.metric("num_requests_running"), len(batch.running)))
        return flush()

    monkeypatch.setattr(simulation.scheduler.delivery, "flush", look_and_flush)
    simulation.submit([4, 5, 6], max_tokens=3)
    simulation.finish()
    assert set(seen) == {(0, 0), (1, 1)}


def test_messages_to_a_new_tokenizer_are_not_lost(directory: Path) -> None:
    """The ring is still full of the old one's outputs when the first messages to the new one queue up."""
    with simulate(directory, ring_bytes=4096, max_model_len=120) as simulation:
        complete = simulation.submit([1], max_tokens=3)
        simulation.finish()
        simulation.is_reading["tokenizer0"] = False
        others = [simulation.submit([index], max_tokens=100) for index in range(4)]
        simulation.run_until(lambda: simulation.scheduler.delivery.deadline_ns() > 0, "a full ring")
        simulation.begin_epoch("tokenizer0", 2)
        complete.finish_reason = ""
        simulation.resubmit(complete)
        simulation.loop.turn()
        simulation.run_until(lambda: not simulation.scheduler.batch.sequences, "the old one's sequences are dropped")
        simulation.is_reading["tokenizer0"] = True
        simulation.finish(complete)
        for stream in others:
            simulation.resubmit(stream)
        simulation.finish()
        simulation.check()


def test_a_stop_string_is_no_abort(simulation: Simulation) -> None:
    stream = simulation.submit([1, 2, 3], max_tokens=200)
    simulation.start(stream)
    simulation.abort(stream, "stop")
    simulation.run_until(lambda: not simulation.scheduler.batch.sequences, "it is over")
    simulation.run_until(lambda: simulation.scheduler.dispatcher.num_in_flight == 0, "no step in flight")
    simulation.turn()
    simulation.check_idle()
    assert simulation.metric("requests_aborted_total") == 0
    assert simulation.context.histogram("request_inference_time_seconds").count == 1


def test_no_step_is_dispatched_without_a_rank(simulation: Simulation) -> None:
    simulation.kill_rank()
    stream = simulation.submit([1, 2])
    simulation.begin_epoch("worker0", 2)  # started, but not there yet
    wait_until(lambda: simulation.loop.turn() == 0 and not simulation.scheduler.ranks.are_complete, what="its absence is seen")
    simulation.rank.epoch = 1
    simulation.revive_rank()
    simulation.finish()
    simulation.check(stream)


@pytest.mark.parametrize("options", [{}, {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=5)}])
def test_late_masks_change_no_token(directory: Path, options: dict[str, Any]) -> None:
    """A row without a token is sent again, alone."""
    with simulate(directory, num_kv_blocks=60, **options) as simulation:
        simulation.num_wanted_drafts, simulation.late_share = 5, 0.5
        submit_all(simulation, count=12, max_tokens=20)
        simulation.finish()
        simulation.check()
        simulation.check_idle()


@pytest.mark.parametrize("seed", range(10))
def test_random_deaths_and_aborts(directory: Path, seed: int) -> None:
    """Random deaths and aborts: the other streams end byte for byte; every other case has drafts."""
    rng = random.Random(seed)
    has_cache = rng.random() < 0.7
    options: dict[str, Any] = {"num_kv_blocks": 24, "max_num_batched_tokens": 11, "enable_prefix_caching": has_cache}
    if seed % 2:
        options["speculative_config"] = SpeculativeConfig(method="mtp" if seed % 4 == 1 else "ngram", num_speculative_tokens=5)
    with simulate(directory, **options) as simulation:
        simulation.num_wanted_drafts = 5
        simulation.late_share = 0.2 * (seed % 3)
        streams, aborted = submit_all(simulation, count=24, seed=3, max_tokens=30, priority=rng.randrange(3)), []
        while not all(stream.is_over or stream in aborted for stream in streams):
            for _ in range(rng.randrange(1, 20)):
                simulation.turn(rank_records=rng.randrange(3))
            open_streams = [stream for stream in streams if not stream.is_over and stream not in aborted]
            match rng.randrange(4):
                case 0:
                    simulation.restart_rank(answers=rng.random() < 0.5)
                case 1:
                    for stream in aborted:
                        stream.finish_reason = "abort"
                    simulation.restart_scheduler()
                case 2 if open_streams and len(aborted) < 6:
                    aborted.append(rng.choice(open_streams))
                    simulation.abort(aborted[-1])
                case _:
                    pass
        simulation.run_until(lambda: simulation.scheduler.dispatcher.num_in_flight == 0, "no step in flight")
        simulation.turn()
        simulation.check(*(stream for stream in streams if stream not in aborted))
        simulation.check_idle()


# ----------------------------------------------------------------------------------------------------- what the cache hears


def replay(messages: list[Any]) -> dict[bytes, tuple[bytes, list[int]]]:
    """Return the index as the cache actor must see it: key -> (parent, tokens)."""
    index: dict[bytes, tuple[bytes, list[int]]] = {}
    for message in messages:
        match message:
            case BlocksCleared():
                index.clear()
            case BlocksStored(block_hashes, parent_hash, token_ids, block_size):
                tokens = ints(token_ids)
                for position, key in enumerate(block_hashes):
                    index[key] = (parent_hash, tokens[position * block_size : (position + 1) * block_size])
                    parent_hash = key
            case BlocksRemoved(block_hashes):
                for key in block_hashes:
                    del index[key]
    return index


def test_the_messenger_sees_the_index(directory: Path) -> None:
    with simulate(directory, num_kv_blocks=30) as simulation:
        submit_all(simulation, count=20)
        simulation.finish()
        simulation.turn()
        assert isinstance(simulation.cache_messages[0], BlocksCleared)
        assert any(isinstance(message, BlocksRemoved) for message in simulation.cache_messages)
        index = {entry.key: (entry.parent, ints(entry.token_ids)) for entry in simulation.scheduler.batch.pool.prefix_cache}
        assert replay(simulation.cache_messages) == index
        simulation.cache_messages.clear()
        simulation.send("cache", Hello("cache", 2))  # it was started again
        simulation.run_until(lambda: replay(simulation.cache_messages) == index, "the whole index again")
        assert isinstance(simulation.cache_messages[0], BlocksCleared)


def test_slow_cache_actor_gets_the_index_later(directory: Path) -> None:
    with simulate(directory, num_kv_blocks=16, ring_bytes=4096, max_model_len=60) as simulation:
        simulation.is_reading["cache"] = False
        for seed in range(30):
            submit_all(simulation, count=4, seed=seed, max_tokens=8)
            simulation.finish()
        simulation.is_reading["cache"] = True
        index = {entry.key: (entry.parent, ints(entry.token_ids)) for entry in simulation.scheduler.batch.pool.prefix_cache}
        simulation.run_until(lambda: simulation.turn() == 0, "nothing is left to say")
        assert replay(simulation.cache_messages) == index


def test_load_is_shown(simulation: Simulation) -> None:
    """Tokenizers choose replicas by it: prompt tokens still to be computed, without cached ones."""
    size = simulation.config.block_size
    prompt = list(range(3, 3 + 4 * size))
    simulation.finish(simulation.submit(prompt))
    simulation.turn()
    num_slots = simulation.config.max_num_seqs
    assert (simulation.metric("num_tokens_to_compute"), simulation.metric("num_free_slots")) == (0, num_slots)
    streams = [simulation.submit([*prompt, number]) for number in range(num_slots)]
    others = [simulation.submit([*prompt[:size], *range(50, 60)]), simulation.submit(list(range(90, 100)))]
    simulation.loop.turn()
    assert simulation.metric("num_free_slots") == 0
    assert simulation.metric("num_tokens_to_compute") == 10 + 10  # what runs has nothing left of its prompt to dispatch
    simulation.finish(*streams, *others)
    simulation.turn()
    assert (simulation.metric("num_tokens_to_compute"), simulation.metric("num_free_slots")) == (0, num_slots)
