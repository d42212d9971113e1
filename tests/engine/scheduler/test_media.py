"""Pictures and video in the scheduler, on real rings, with a rank that checks every row of features that it has to read."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.messages import BlocksStored, MediaItem, ReloadWeights, ResetEncoderCache
from engine.process.topology import media_of
from shm.counters import State
from tests.engine.scheduler.echo_media import causal, picture, prompt_of
from tests.engine.scheduler.simulation import Simulation, Stream, ints, simulate

VISION: dict[str, Any] = {
    "media_processes": 1,
    "encoder_cache_size": 64,
    "encoder_depth": 4,
    "encoder_passes": 5,
    "max_num_batched_encoder_embeds": 16,
}
CAT, DOG = picture("cat", 6), picture("dog", 6)


@pytest.fixture
def simulation(directory: Path) -> Iterator[Simulation]:
    with simulate(directory, **VISION) as running:
        yield running


def show(simulation: Simulation, *parts: list[int] | MediaItem, **options: Any) -> Stream:
    prompt, media = prompt_of(*parts)
    return simulation.submit(prompt, **media, **options)


def finish(simulation: Simulation, *streams: Stream) -> None:
    """Finish all streams with the expected tokens, and check that nothing is held."""
    simulation.finish()
    simulation.run_until(lambda: not simulation.scheduler.dispatcher.num_in_flight, "no step in flight")
    simulation.run_until(lambda: simulation.turn() == 0, "what is given back has arrived")
    simulation.check(*streams)
    simulation.check_idle()


def parts(simulation: Simulation) -> list[tuple[int, int, int]]:
    """Return each step's part of a call: units, first and last part."""
    return [(len(call.units), call.first_part, call.last_part) for call in simulation.rank.encoder.calls]


def unit(item: MediaItem) -> bytes:
    return item.unit_hashes[0]


# ---------------------------------------------------------------------------------------------------------------- calls


def test_picture_is_encoded_once_for_all_requests(simulation: Simulation) -> None:
    """Each distinct hash is encoded once, also across requests; later ones find it."""
    for index in range(5):
        show(simulation, [index, 7], CAT, [8, 9, index])
    finish(simulation)
    assert parts(simulation) == [(1, 0, 5)]
    show(simulation, [11, 12, 13, 14, 15], CAT, [1])
    finish(simulation)
    assert parts(simulation) == [(1, 0, 5)]
    assert simulation.media[0].num_asked == {unit(CAT): 1}
    found = [simulation.metric(f"{name}_total") for name in ("mm_cache_queries", "mm_cache_hits", "encoder_calls")]
    assert found == [6, 5, 1]
    assert [simulation.metric(f"encoder_{name}_total") for name in ("units", "rows", "evictions")] == [1, 6, 0]


def test_missing_units_are_one_call_in_prompt_order(simulation: Simulation) -> None:
    show(simulation, CAT, DOG, CAT, [1])
    show(simulation, [2], DOG, picture("bird", 3), [3])
    finish(simulation)
    (call,) = simulation.rank.encoder.calls
    assert [encode.unit_hash for encode in call.units] == [unit(CAT), unit(DOG), unit(picture("bird", 3))]


def test_calls_are_split_and_block_no_stream(directory: Path) -> None:
    with simulate(directory, **VISION | {"max_num_batched_encoder_embeds": 6}) as simulation:
        text = simulation.submit([1, 2, 3], max_tokens=40)
        simulation.start(text)
        first = len(simulation.rank.steps)
        show(simulation, picture("large", 20), [5])
        finish(simulation)
        assert parts(simulation) == [(1, 0, 2), (1, 2, 3), (1, 3, 4), (1, 4, 5)]
        steps = [step for step in simulation.rank.steps[first:] if step.encoder]
        assert all(ints(step.num_tokens) == [1] for step in steps), "the text stream has a token, and waits for no chunk"


def test_client_features_cost_no_encoding(directory: Path) -> None:
    with simulate(directory, **VISION | {"max_num_batched_encoder_embeds": 6}) as simulation:
        item = picture("large", 20)
        show(simulation, replace(item, source=replace(item.source, is_features=True)), [5])
        finish(simulation)
        assert parts(simulation) == [(1, 0, 5)]


def test_text_continues_without_pixels(simulation: Simulation) -> None:
    simulation.media[0].is_silent = True
    seen = show(simulation, CAT, [1, 2])
    simulation.finish(simulation.submit([1, 2, 3]), show(simulation, [3, 4, 5]))
    assert not seen.token_ids
    simulation.media[0].is_silent = False
    finish(simulation)


def test_text_before_a_picture_is_computed_meanwhile(simulation: Simulation) -> None:
    simulation.media[0].is_silent = True
    show(simulation, [1] * 10, CAT, [1, 2])
    simulation.run_until(lambda: simulation.rank.steps, "a step")
    assert ints(simulation.rank.steps[0].num_tokens) == [10]
    simulation.media[0].is_silent = False
    finish(simulation)


def test_sequence_with_a_slot_progresses_despite_the_first(directory: Path) -> None:
    """The first in line fills the cache and waits for a slot; the one with the slot needs rows."""
    with simulate(directory, **VISION | {"encoder_cache_size": 12}, max_num_seqs=1) as simulation:
        simulation.media[0].is_silent = True
        holder = show(simulation, [1] * 5, CAT, [2])
        simulation.run_until(lambda: simulation.rank.steps, "the text before its picture")
        first = show(simulation, picture("wide", 12), [3], priority=-100)
        simulation.run_until(partial(simulation.scheduler.batch.sequences.get, first.request.own.request_id), "the other")
        simulation.media[0].is_silent = False
        finish(simulation, holder, first)


def test_first_in_line_takes_rows_of_later_ones(directory: Path) -> None:
    """Both wait for the slot, and the features of the second are there already."""
    with simulate(directory, **VISION | {"encoder_cache_size": 12}, max_num_seqs=1) as simulation:
        text = simulation.submit([1], max_tokens=100)
        simulation.start(text)
        second = show(simulation, picture("wide", 12), [3])
        simulation.run_until(lambda: simulation.metric("num_encoder_cache_units"), "features ahead of their turn")
        first = show(simulation, CAT, [2], priority=-100)
        simulation.run_until(lambda: first.is_over, "the first")
        assert not second.token_ids
        finish(simulation)


def test_pixels_yield_to_earlier_ones(directory: Path) -> None:
    """A lost unit waits for room in the media process, which a later one fills, and that one waits for rows: the free ones are
    fragmented until the lost unit is read."""
    with simulate(directory, **VISION | {"encoder_cache_size": 16, "max_num_batched_tokens": 4}) as simulation:
        low, kept, lost, late = picture("low", 6), picture("kept", 3), picture("lost", 5), picture("late", 8)
        for item in (low, kept):
            show(simulation, item, [1], max_tokens=1)
            finish(simulation)
        simulation.media[0].capacity = 1
        simulation.media[0].waits_for_room = True
        show(simulation, lost, kept, late, [1])
        while not any(unit_hash == unit(late) for _, unit_hash in simulation.media[0].held.values()):
            simulation.rank.turn(1)
            simulation.loop.turn()
            simulation.media[0].turn()
        simulation.features.damage(unit(lost))
        finish(simulation)
        assert simulation.metric("encoder_losses_total") == 1


def test_ranks_learn_new_feature_rows(directory: Path) -> None:
    """Features are dropped in the middle of a picture, and then encoded into other rows."""
    with simulate(directory, **VISION | {"max_num_batched_tokens": 4}) as simulation:
        text = simulation.submit([1], max_tokens=200)
        simulation.start(text)
        show(simulation, picture("long", 20), [1])
        while not simulation.rank.encoder.calls:
            simulation.turn(rank_records=1)
        simulation.media[0].is_silent = True
        simulation.ask(ResetEncoderCache())
        before = show(simulation, DOG, [2], priority=-100)
        simulation.run_until(
            partial(simulation.scheduler.batch.sequences.get, before.request.own.request_id), "another before it"
        )
        simulation.media[0].is_silent = False
        finish(simulation)


def test_waits_for_a_media_process_that_is_there(simulation: Simulation) -> None:
    simulation.restart_media()
    show(simulation, CAT, [1])
    finish(simulation)


def conversation(simulation: Simulation, seed: int, max_tokens: int = 6) -> Stream:
    """Return a random request: text, pictures, video."""
    rng = random.Random(seed)
    parts: list[list[int] | MediaItem] = [[rng.randrange(60) for _ in range(rng.randrange(4))]]
    for _ in range(rng.randrange(4)):
        parts.append(picture(f"p{rng.randrange(6)}", rng.choice([1, 3, 8, 12]), rng.choice([1, 1, 3])))
        parts.append([rng.randrange(60) for _ in range(rng.randrange(5))])
    parts.append([rng.randrange(60)])
    return show(simulation, *parts, max_tokens=max_tokens, seed=seed % 3)


CONDITIONS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks-5": {"max_num_batched_tokens": 5},
    "chunks-1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "targets": {"mm_chunk_tokens": 9},
    "uncached": {"enable_prefix_caching": False},
    "one-unit": {"encoder_cache_size": 12, "max_num_batched_encoder_embeds": 3},
    "one-part": {"max_num_batched_encoder_embeds": 1},
    "preempted": {"num_kv_blocks": 35, "max_num_batched_tokens": 7},
    "whole": {"disable_chunked_mm_input": True, "max_num_batched_tokens": 13},
    "media-3": {"media_processes": 3},
}


@pytest.mark.parametrize("options", CONDITIONS.values(), ids=CONDITIONS)
def test_the_same_tokens_in_every_condition(directory: Path, options: dict[str, Any]) -> None:
    with simulate(directory, **VISION | options) as simulation:
        for _ in range(2):  # the second with warm caches
            for seed in range(12):
                conversation(simulation, seed)
            finish(simulation)
        if simulation.config.num_kv_blocks > 35:  # else what is cached may be evicted before it is found
            assert (simulation.metric("prefix_cache_hits_total") > 0) == simulation.config.enable_prefix_caching
        assert simulation.metric("encoder_evictions_total") > 0


# ---------------------------------------------------------------------------------------------------------------- keys


def test_same_tokens_with_another_picture_are_no_hit(simulation: Simulation) -> None:
    streams = [show(simulation, [1, 2, 3], item, [4] * 8) for item in (CAT, DOG)]
    finish(simulation)
    assert streams[0].token_ids != streams[1].token_ids
    again = show(simulation, [1, 2, 3], DOG, [4] * 8)
    finish(simulation)
    assert again.token_ids == streams[1].token_ids
    assert simulation.metric("prefix_cache_hits_total") == 16  # of the second and of all but its last block
    assert [len(call.units) for call in simulation.rank.encoder.calls] == [2]


def test_cached_prompt_needs_no_features(simulation: Simulation) -> None:
    show(simulation, CAT, [1] * 9)
    finish(simulation)
    simulation.ask(ResetEncoderCache())
    show(simulation, CAT, [1] * 9)
    finish(simulation)
    assert len(simulation.rank.encoder.calls) == 1


def test_events_name_units(simulation: Simulation) -> None:
    show(simulation, [1, 2, 3], CAT, [4] * 8)
    finish(simulation)
    (first, *_) = [message for message in simulation.cache_messages if isinstance(message, BlocksStored)]
    assert first.extra_keys[:3] == [((unit(CAT), 0),), ((unit(CAT), 1),), ((unit(CAT), 5),)]
    assert not any(first.extra_keys[3:])


# ---------------------------------------------------------------------------------------------------------------- cuts


def test_unchunked_pictures_are_never_cut(directory: Path) -> None:
    with simulate(directory, **VISION, disable_chunked_mm_input=True, max_num_batched_tokens=9) as simulation:
        for _ in range(2):
            show(simulation, [1, 2, 3], CAT, [4] * 3, DOG, [5])
            finish(simulation)
        cuts = {
            start
            for step in simulation.rank.steps
            for start, num_tokens in zip(ints(step.start), ints(step.num_tokens), strict=True)
            if num_tokens > 1
        }
        assert not any(3 < cut < 9 or 12 < cut < 18 for cut in cuts)
        refused = show(simulation, [1], picture("large", 10), [2])
        simulation.finish(refused)
        assert refused.rejected is not None
        assert refused.rejected.status == 400
        assert "10 tokens, the limit of a step is 9" in refused.rejected.message


def test_picture_larger_than_the_cache_is_refused(simulation: Simulation) -> None:
    refused = show(simulation, picture("huge", 65), [2])
    simulation.finish(refused)
    assert refused.rejected is not None
    assert "an image of 65 tokens does not fit into the encoder cache of 64" in refused.rejected.message


@pytest.mark.parametrize("budget", [7, 10, 32])
def test_masks_are_kept_by_chunks_hits_and_keys(directory: Path, budget: int) -> None:
    bounds = causal(30)
    for position in range(4, 10):
        bounds[2 * position + 1] = 9  # a picture's tokens see each other
    bounds[2 * 20 : 2 * 20 + 2] = [5, 22]
    with simulate(directory, **VISION | {"max_num_batched_tokens": budget}) as simulation:
        for last in (1, 1, 2):
            prompt, media = prompt_of([1, 2, 3, 4], CAT, [7] * 11, [last] * 9)
            simulation.submit(prompt, **media, mask_bounds=array("i", bounds).tobytes())
            simulation.submit(prompt, **media)
            finish(simulation)
        assert simulation.metric("prefix_cache_hits_total") > 0


def test_masks_of_a_text_model(directory: Path) -> None:
    bounds = causal(20)
    bounds[5 * 2 + 1] = 9
    with simulate(directory, max_num_batched_tokens=7) as simulation:
        for mask in (bounds, causal(20), bounds):
            simulation.submit([1, 2] * 10, mask_bounds=array("i", mask).tobytes())
            finish(simulation)
        simulation.submit([1, 2] * 10)
        finish(simulation)
        hits = simulation.metric("prefix_cache_hits_total")
        assert hits == 4 + 16 + 16, "the block before the mask; causal is one thing, said or not"


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (causal(3), "has 3 entries, but the prompt has 4 tokens"),
        ([0, 0, 0, 4, 0, 2, 0, 3], "attention_mask_offset[1] is [0, 4]"),
        ([0, 3, 2, 3, 0, 2, 0, 3], "attention_mask_offset[1] is [2, 3]"),
        ([0, 0, 0, 0, 0, 2, 0, 3], "attention_mask_offset[1] is [0, 0]"),
    ],
)
def test_wrong_masks_are_refused(simulation: Simulation, bounds: list[int], text: str) -> None:
    refused = simulation.submit([1, 2, 3, 4], mask_bounds=array("i", bounds).tobytes())
    simulation.finish(refused)
    assert refused.rejected is not None
    assert text in refused.rejected.message


def test_mask_too_large_for_a_step_is_refused(simulation: Simulation) -> None:
    bounds = causal(40)
    bounds[1] = 39
    refused = simulation.submit([1] * 40, mask_bounds=array("i", bounds).tobytes())
    simulation.finish(refused)
    assert refused.rejected is not None
    assert "40 tokens, the limit of a step is 32" in refused.rejected.message


# -------------------------------------------------------------------------------------------------------------- faults


def test_undecodable_item_fails_only_its_requests(simulation: Simulation) -> None:
    simulation.media[0].failures[unit(DOG)] = [(400, "the picture is truncated")]
    refused = [show(simulation, [3, 4], DOG, [index]) for index in range(2)]
    show(simulation, CAT, [1])
    finish(simulation, show(simulation, CAT, [2]))
    for stream in refused:
        assert stream.rejected is not None
        assert (stream.rejected.status, stream.rejected.code) == (400, "image_parse_error")


def test_a_want_of_room_is_no_failure(simulation: Simulation) -> None:
    simulation.media[0].capacity = 1
    simulation.media[0].failures[unit(DOG)] = [(503, "no room")] * 3
    show(simulation, CAT, DOG, picture("bird", 4), [1])
    finish(simulation)
    assert simulation.media[0].num_asked[unit(DOG)] >= 4


def test_tries_are_bounded(simulation: Simulation) -> None:
    simulation.media[0].failures[unit(DOG)] = [(503, "its bytes are gone")] * 100
    refused = show(simulation, DOG, [1])
    simulation.finish(refused)
    assert refused.rejected is not None
    assert refused.rejected.status == 503
    assert simulation.media[0].num_asked[unit(DOG)] == 6


def test_damaged_features_are_encoded_again(simulation: Simulation) -> None:
    show(simulation, CAT, [1, 2])
    finish(simulation)
    simulation.features.damage(unit(CAT))
    show(simulation, [9, 9], CAT, [1, 2])
    finish(simulation)
    assert parts(simulation) == [(1, 0, 5), (1, 0, 5)]


def test_losses_with_reads_between_fail_no_request(simulation: Simulation) -> None:
    """A request may need the unit for any time."""
    simulation.media[0].withheld = {unit(DOG)}
    waits = show(simulation, DOG, CAT, [1])
    for index in range(7):
        simulation.finish(show(simulation, [index, 9], CAT, [1, index]))
        simulation.features.damage(unit(CAT))
    assert simulation.metric("encoder_losses_total") >= 6
    simulation.media[0].withheld = set()
    finish(simulation, waits)


def test_features_that_stay_missing_fail_requests(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(simulation.rank.encoder), "missing", lambda *_: "its rows cannot be read")
    refused = show(simulation, CAT, [1, 2])
    finish(simulation, simulation.submit([1, 2, 3]))
    assert refused.rejected is not None
    assert (refused.rejected.status, refused.rejected.message) == (503, "its rows cannot be read")


def test_a_rank_that_dies_between_parts_starts_anew(directory: Path) -> None:
    with simulate(directory, **VISION | {"max_num_batched_encoder_embeds": 6}) as simulation:
        show(simulation, CAT, [1])
        finish(simulation)
        show(simulation, [2], CAT, picture("large", 20), [5])
        simulation.run_until(lambda: len(simulation.rank.encoder.calls) == 3, "two steps of the second")
        simulation.restart_rank()
        finish(simulation)
        assert parts(simulation) == [(1, 0, 2), (1, 2, 3), (1, 3, 4), (1, 4, 5)]  # of the new one: confirmed units serve on
        assert simulation.metric("encoder_calls_total") == 3


def test_restarted_rank_runs_lost_parts_again(simulation: Simulation) -> None:
    show(simulation, CAT, [1])
    while not simulation.scheduler.encoder.cache.get(unit(CAT)):
        simulation.loop.turn()
        simulation.media[0].turn()
    assert not simulation.rank.encoder.calls
    simulation.kill_rank()
    simulation.revive_rank()
    finish(simulation)
    assert simulation.metric("encoder_calls_total") == 2


def test_new_weights_encode_anew(simulation: Simulation) -> None:
    stream = show(simulation, CAT, [1, 2], max_tokens=60)
    simulation.start(stream, num_tokens=3)
    simulation.ask(ReloadWeights("/weights/b"))
    finish(simulation, simulation.submit([1], max_tokens=0))
    assert len(simulation.rank.encoder.calls) == 2


def test_reset_while_it_is_read(directory: Path) -> None:
    with simulate(directory, **VISION | {"max_num_batched_tokens": 3}) as simulation:
        show(simulation, [1], CAT, [1, 2])
        for _ in range(20):
            simulation.turn(rank_records=1)
            simulation.ask(ResetEncoderCache())
        finish(simulation)
        assert simulation.metric("num_encoder_cache_units") <= 1


@pytest.mark.parametrize("has_pixels", [False, True])
def test_aborted_requests_leave_nothing(simulation: Simulation, has_pixels: bool) -> None:
    media = simulation.media[0]
    stream = show(simulation, CAT, [1, 2])
    while not (media.turn() if has_pixels else simulation.scheduler.batch.sequences):
        simulation.loop.turn()
    simulation.abort(stream)
    simulation.loop.turn()
    assert not simulation.scheduler.batch.sequences
    simulation.run_until(lambda: simulation.turn() == 0, "what is given back has arrived")
    simulation.check_idle()
    assert not simulation.rank.encoder.calls


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_deaths_and_damage(directory: Path, seed: int) -> None:
    """Random deaths, aborts and damage: the other streams end byte for byte, and nothing is held."""
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "media_processes": rng.choice([1, 2]),
        "encoder_cache_size": rng.choice([12, 24, 64]),
        "max_num_batched_encoder_embeds": rng.choice([2, 8, 40]),
        "max_num_batched_tokens": rng.choice([5, 14, 32]),
        "enable_prefix_caching": rng.random() < 0.7,
        "num_kv_blocks": rng.choice([35, 128]),
        "disable_chunked_mm_input": rng.random() < 0.3,
    }
    if options["disable_chunked_mm_input"]:
        options["max_num_batched_tokens"] = max(14, options["max_num_batched_tokens"])
    with simulate(directory, **VISION | options) as simulation:
        for media in simulation.media:
            media.capacity = rng.choice([1, 3, 100])
        streams, aborted = list[Stream](), list[Stream]()
        num_requests = 170
        while len(streams) < num_requests or not all(stream.is_over or stream in aborted for stream in streams):
            while len(streams) < num_requests and sum(not stream.is_over for stream in streams) < 12:
                streams.append(conversation(simulation, rng.randrange(1000), max_tokens=rng.randrange(9)))
            for _ in range(rng.randrange(1, 12)):
                simulation.turn(rank_records=rng.randrange(3))
            open_streams = [stream for stream in streams if not stream.is_over and stream not in aborted]
            match rng.randrange(14):
                case 0:
                    simulation.restart_rank(answers=rng.random() < 0.5)
                case 1:
                    for stream in aborted:
                        stream.finish_reason = "abort"
                    simulation.restart_scheduler()
                case 2:
                    index = rng.randrange(len(simulation.media))
                    capacity = simulation.media[index].capacity
                    simulation.restart_media(index)
                    simulation.media[index].capacity = capacity
                case 3:
                    known = {unit_hash for unit_hash, _, _ in simulation.features.rows.values()}
                    simulation.features.damage(rng.choice(sorted(known) or [b""]))
                case 4:
                    simulation.ask(ResetEncoderCache())
                case 5 | 6 | 7 | 8 if open_streams and len(aborted) < num_requests // 3:
                    aborted.append(rng.choice(open_streams))
                    simulation.abort(aborted[-1])
                case _:
                    pass
        simulation.run_until(lambda: simulation.scheduler.dispatcher.num_in_flight == 0, "no step in flight")
        simulation.run_until(lambda: simulation.turn() == 0, "what is given back has arrived")
        simulation.check(*(stream for stream in streams if stream not in aborted))
        simulation.check_idle()


# ---------------------------------------------------------------------------------------------------------------- turns


def test_pixel_requests_name_their_request(simulation: Simulation) -> None:
    simulation.media[0].is_silent = True
    show(simulation, [1], CAT, [2], group_id="first")
    show(simulation, [3], CAT, DOG, group_id="second")
    simulation.media[0].is_silent = False
    finish(simulation)
    assert simulation.media[0].requests == {unit(CAT): "first", unit(DOG): "second"}


def test_long_video_without_pixels_blocks_no_other(directory: Path) -> None:
    """A request asks for as many units as a call takes, although the arena would be full if all came."""
    with simulate(directory, **VISION | {"max_num_batched_encoder_embeds": 4}) as simulation:
        video = picture("video", 8, num_units=8)  # all of the arena's 64 rows
        simulation.media[0].withheld = {*video.unit_hashes}
        show(simulation, video, [1])
        seen = show(simulation, [2], CAT, [3])
        simulation.run_until(lambda: seen.is_over, "the picture seen")
        assert [*simulation.media[0].requests] == [*video.unit_hashes[:2], unit(CAT)]
        simulation.media[0].withheld = set()
        finish(simulation)


def test_request_uses_one_media_process(directory: Path) -> None:
    with simulate(directory, **VISION | {"media_processes": 3}) as simulation:
        names = [f"media{index}" for index in range(3)]
        for index in range(6):
            show(simulation, picture(f"{index}a", 2), [1], picture(f"{index}b", 2), group_id=f"g{index}")
        finish(simulation)
        asked = {request: media.name for media in simulation.media for request in media.requests.values()}
        assert asked == {f"g{index}": media_of(f"g{index}", names) for index in range(6)}
        assert len({*asked.values()}) == 3


def test_other_media_processes_replace_only_an_unready_one(directory: Path) -> None:
    with simulate(directory, **VISION | {"media_processes": 3}) as simulation:
        names = [f"media{index}" for index in range(3)]
        simulation.segments.counters.actor("media1").set_state(State.LOADING)
        for index in range(12):
            show(simulation, picture(f"{index}", 2), [1], group_id=f"g{index}")
        finish(simulation)
        asked = {request: media.name for media in simulation.media for request in media.requests.values()}
        own = {f"g{index}": media_of(f"g{index}", names) for index in range(12)}
        assert "media1" in own.values()
        assert "media1" not in asked.values()
        assert {group: name for group, name in asked.items() if own[group] != "media1"} == {
            group: name for group, name in own.items() if name != "media1"
        }


def test_usage_counts_rows_that_hold_features(directory: Path) -> None:
    with simulate(directory, **VISION | {"encoder_cache_size": 64}) as simulation:
        assert simulation.metric("encoder_cache_usage_perc") == 0
        show(simulation, picture("p", 8), [1])
        finish(simulation)
        assert simulation.metric("encoder_cache_usage_perc") == 8 / 64
        show(simulation, picture("q", 12), [1])
        finish(simulation)
        assert simulation.metric("encoder_cache_usage_perc") == 20 / 64
