"""Drafts in the scheduler: rows with several tokens, their number unknown until the result. The rank of the simulation has some
drafts right and some wrong, and computes both.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.config import SpeculativeConfig
from engine.messages import BlocksStored, PromptOptions
from engine.scheduler.actor import MIN_RESULT_BYTES, RESULT_BYTES
from tests.engine.scheduler.simulation import MODEL, Simulation, Stream, expected_tokens, expected_values, ints, mix, simulate

K = 5
DRAFTS = {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=16)}

LAYERS = {"speculative_config": SpeculativeConfig(method="mtp", num_speculative_tokens=16)}


def submit_all(simulation: Simulation, count: int = 12, seed: int = 1, longest: int = 40, **options: Any) -> list[Stream]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(61) for _ in range(rng.randrange(1, longest))] for _ in range(count)]
    return [simulation.submit(prompt, seed=index, **({"max_tokens": 30} | options)) for index, prompt in enumerate(prompts)]


def most_tokens(stream: Stream) -> int:
    """Return the most tokens in one output."""
    return max(len(output.token_ids) for output in stream.outputs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"enable_prefix_caching": False},
        {"num_kv_blocks": 24},
        {"num_kv_blocks": 24, "max_num_batched_tokens": 11, "enable_prefix_caching": False},
        {"block_size": 1, "num_kv_blocks": 1000},
        {"block_size": 64, "num_kv_blocks": 5},
        {"tensor_parallel_size": 2, "threads": 1},
        {"block_size": 1, "num_kv_blocks": 200, "max_num_batched_tokens": 7, **LAYERS},
        {"num_kv_blocks": 24, **LAYERS},
    ],
    ids=[
        *("together", "chunked", "uncached", "preempted", "preempted-chunked", "block-1", "block-64", "two-ranks"),
        *("one-position-early", "one-position-early-preempted"),
    ],
)
def test_the_same_tokens_in_every_condition(directory: Path, options: dict[str, Any]) -> None:
    with simulate(directory, **(DRAFTS | options)) as simulation:
        simulation.num_wanted_drafts = K
        for _ in range(2):  # then with a warm prefix cache
            streams = submit_all(simulation)
            simulation.finish()
        simulation.check()
        simulation.check_idle()
        assert max(map(most_tokens, streams)) > 1, "drafts were granted and accepted"
        if not options:
            assert simulation.metric("prefix_cache_hits_total") > 0


def test_sequence_ends_inside_accepted_drafts(directory: Path) -> None:
    """Stop tokens, lengths and `min_tokens` end a sequence at the same token, with the same details."""
    with simulate(directory, **DRAFTS, num_kv_blocks=512) as simulation:
        simulation.num_wanted_drafts = K
        for max_tokens in range(1, 12):
            submit_all(simulation, 3, max_tokens, max_tokens=max_tokens, num_logprobs=1)
        for seed in range(12):
            stops = [stop for stop in range(61) if stop % 4 == seed % 4]
            submit_all(simulation, 2, 40 + seed, max_tokens=40, stop_token_ids=stops, min_tokens=seed % 5)
        simulation.finish()
        simulation.check()
        simulation.check_idle()
        for stream in simulation.streams.values():
            entries = [entry for output in stream.outputs for entry in output.logprobs]
            assert [entry.token_id for entry in entries] == stream.token_ids
            if stream.request.sampling.num_logprobs > 0:
                assert [entry.top_token_ids for entry in entries] == [[token_id] for token_id in stream.token_ids]


def test_drafts_are_counted_by_position(directory: Path) -> None:
    """Verified ones, accepted ones, and those that became part of an answer."""
    with simulate(directory, **DRAFTS, num_kv_blocks=512) as simulation:
        simulation.num_wanted_drafts = simulation.scheduler.batch.num_wanted_by_new_requests = K
        streams = submit_all(simulation, 30, stop_token_ids=[9, 27, 40], max_tokens=60)
        simulation.finish()
        simulation.check()
        drafted, accepted, emitted = (
            [simulation.metric(f"spec_decode_num_{what}_tokens_per_pos_total", position=str(place)) for place in range(16)]
            for what in ("draft", "accepted", "emitted")
        )
        assert sum(drafted) == simulation.metric("spec_decode_num_draft_tokens_total")
        assert sum(accepted) == simulation.metric("spec_decode_num_accepted_tokens_total")
        assert drafted[0] == simulation.metric("spec_decode_num_drafts_total")
        for numbers in (drafted, accepted, emitted):
            assert numbers[0] > 0 == numbers[K]
            assert numbers == sorted(numbers, reverse=True)
        assert all(one >= two >= three for one, two, three in zip(drafted, accepted, emitted, strict=True))
        num_tokens = sum(len(stream.token_ids) for stream in streams)
        num_rows = simulation.metric("spec_decode_num_rows_total")
        assert sum(emitted) < sum(accepted), "some answers end within a row"
        assert num_rows + sum(accepted) >= num_tokens


def test_ranks_learn_of_completed_answers(directory: Path) -> None:
    """Ranks get each completed answer once, with its length, before its slot is reused; preempted ones are not reported."""
    with simulate(directory, **DRAFTS, num_kv_blocks=24) as simulation:
        simulation.num_wanted_drafts = K
        streams = submit_all(simulation, 12, longest=60)
        simulation.finish()
        assert simulation.metric("num_preemptions_total") > 0
        simulation.submit([1, 2, 3], max_tokens=2)
        simulation.finish()
        steps = simulation.rank.steps
        ended = [pair for step in steps for pair in zip(ints(step.ended)[::2], ints(step.ended)[1::2], strict=True)]
        lengths = [len(stream.token_ids) + len(stream.request.prompt.token_ids) // 4 for stream in streams]
        assert sorted(length for _, length in ended) == sorted(lengths)
        generation = steps[-1].generation
        simulation.scheduler.weight_updates.clear_prefix_cache()
        simulation.submit([1, 2, 3], max_tokens=2)
        simulation.finish()
        assert steps[-1].generation != generation


def test_ranks_do_not_learn_salted_answers(directory: Path) -> None:
    """Salted answers must not provide drafts for other requests."""
    with simulate(directory, **DRAFTS) as simulation:
        for number, salt in enumerate(("a", "", "b", "")):
            simulation.submit([1, 2, 3], max_tokens=2 + number, options=PromptOptions(cache_salt=salt))
        simulation.finish()
        simulation.submit([1, 2, 3], max_tokens=9)
        simulation.finish()
        ended = [length for step in simulation.rank.steps for length in ints(step.ended)[1::2]]
        assert sorted(ended) == [3 + 3, 3 + 5]


def test_drafts_stay_within_the_length(directory: Path) -> None:
    with simulate(directory, **DRAFTS) as simulation:
        simulation.num_wanted_drafts = K
        stream = simulation.submit([1, 2, 3], max_tokens=9)
        simulation.finish()
        simulation.check()
        (start,) = (start for step in simulation.rank.steps for start in step.starts)
        assert start.max_total_tokens == 12
        assert len(stream.token_ids) == 9


def test_prompts_take_precedence_over_drafts(directory: Path) -> None:
    """A step's tokens go to drafts only where no prompt wants them."""
    with simulate(directory, **DRAFTS, max_num_batched_tokens=16) as simulation:
        simulation.num_wanted_drafts = K
        streams = submit_all(simulation, 3, max_tokens=60)
        simulation.start(*streams, num_tokens=8)
        first = len(simulation.rank.steps)
        simulation.submit(list(range(50)), max_tokens=2)
        simulation.finish()
        chunks = [step for step in simulation.rank.steps[first:] if max(ints(step.num_tokens)) > 1]
        assert [max(ints(step.num_tokens)) for step in chunks[:3]] == [13, 13, 13], "all that three running ones leave"
        assert not any(step.num_drafts for step in chunks[:3])
        assert any(step.num_drafts for step in simulation.rank.steps)
        simulation.check()


def test_step_with_drafts_keeps_the_token_budget(directory: Path) -> None:
    """Six rows, and eleven of the thirty draft tokens that they want."""
    with simulate(directory, **DRAFTS, max_num_batched_tokens=17) as simulation:
        simulation.num_wanted_drafts = K
        submit_all(simulation, 6, longest=10)
        simulation.finish()
        simulation.check()
        sizes = [sum(ints(step.num_tokens)) + sum(ints(step.num_drafts)) for step in simulation.rank.steps]
        assert max(sizes) == 17
        assert any(len(ints(step.slots)) == 6 and sum(ints(step.num_drafts)) == 11 for step in simulation.rank.steps)


@pytest.mark.parametrize("num_blocks", [12, 14, 16])
def test_drafts_preempt_no_sequence(directory: Path, num_blocks: int) -> None:
    """Four sequences fit as long as no block is kept for drafts: 3 blocks each at their end."""
    with simulate(directory, **DRAFTS, num_kv_blocks=num_blocks, max_num_seqs=4, enable_prefix_caching=False) as simulation:
        simulation.num_wanted_drafts = K
        for seed in range(4):
            simulation.submit([seed + 1], max_tokens=11, seed=seed)
        simulation.finish()
        simulation.check()
        simulation.check_idle()
        assert simulation.metric("num_preemptions_total") == 0


def test_draft_blocks_are_returned_before_preemption(directory: Path) -> None:
    """Unused blocks for drafts serve a sequence that lacks one."""
    with simulate(
        directory, **DRAFTS, num_kv_blocks=10, max_num_seqs=3, enable_prefix_caching=False, block_size=2
    ) as simulation:
        simulation.num_wanted_drafts = 8
        first = simulation.submit([1, 2], max_tokens=6)
        simulation.start(first)
        simulation.num_wanted_drafts = 0  # so that it goes slowly, with the blocks that it has
        streams = [simulation.submit([3, 4, 5], max_tokens=3, seed=seed) for seed in (1, 2)]
        simulation.finish()
        simulation.check(first, *streams)
        simulation.check_idle()
        assert simulation.metric("num_preemptions_total") == 0


def test_new_requests_start_like_recent_ones(directory: Path) -> None:
    """If those of the last steps want no drafts, a new one is granted none, and its prompt is not prepared for any."""
    with simulate(directory, **DRAFTS) as simulation:
        for seed, (num_wanted, wants) in enumerate([(K, True), (0, True), (0, False), (K, False), (K, True)]):
            simulation.num_wanted_drafts = num_wanted
            first = len(simulation.rank.steps)
            simulation.submit([seed + 1, 2, 3], max_tokens=8, seed=seed)
            simulation.finish()
            steps = simulation.rank.steps[first:]
            assert any(steps[0].wants_drafts) == wants, "as the worker said of the one before"
            assert any(step.num_drafts for step in steps) == (wants or num_wanted > 0)
        simulation.check()


def test_results_fit_their_record(directory: Path) -> None:
    """The log-probabilities of a result limit the drafts of a step: 8 rows and 4 drafts, not 8 rows of 17 tokens."""
    least = RESULT_BYTES + 216 * (8 + 4) + MIN_RESULT_BYTES
    with simulate(directory, max_num_batched_tokens=256, num_kv_blocks=512, **DRAFTS) as simulation:
        assert simulation.scheduler.limits.max_drafts == 8 * 16
        simulation.scheduler.limits = replace(simulation.scheduler.limits, max_drafts=4)
        assert least < simulation.context.mailbox.max_record_bytes
        simulation.num_wanted_drafts = 16
        submit_all(simulation, 8)
        simulation.finish()
        simulation.check()
        drafted = [sum(ints(step.num_drafts)) for step in simulation.rank.steps]
        assert max(drafted) == 4


def test_drafts_keep_no_block_from_a_prompt(directory: Path) -> None:
    """A prompt that fits beside the tokens of running sequences begins at once, whatever was kept for drafts."""
    with simulate(directory, **DRAFTS, num_kv_blocks=200, block_size=2, enable_prefix_caching=False) as simulation:
        simulation.num_wanted_drafts = 16
        streams = [simulation.submit([seed + 1] * 8, max_tokens=100, seed=seed) for seed in range(4)]
        simulation.start(*streams, num_tokens=10)
        simulation.num_wanted_drafts = 0
        running = simulation.scheduler.batch.running
        simulation.run_until(lambda: not any(each.num_ahead or each.num_wanted for each in running), "no drafts are under way")
        num_kept = sum(-(-each.num_tokens // 2) for each in running)
        assert sum(len(each.tables[0]) for each in running) > num_kept, "more is held than tokens need"
        late = simulation.submit([9] * (2 * (200 - num_kept - 8)), max_tokens=2, seed=9)
        for _ in range(3):
            simulation.turn()
        assert late.admissions
        simulation.finish()
        simulation.check()
        simulation.check_idle()


def test_resumed_sequence_begins_one_position_early(directory: Path) -> None:
    """Layers that draft need the hidden state before the next token: after a prefix-cache hit, and on a new worker."""

    def first_rows(simulation: Simulation) -> list[tuple[int, int]]:
        """Return the start of each sequence and its number of known tokens."""
        steps = [step for step in simulation.rank.steps if step.starts]
        return [(ints(step.start)[0], len(ints(step.starts[0].token_ids))) for step in steps]

    with simulate(directory, **LAYERS, num_kv_blocks=64, block_size=8) as simulation:
        simulation.num_wanted_drafts = K
        prompt = [index % 61 for index in range(30)]
        for tokens in (prompt, [*prompt[:24], 7, 8]):
            simulation.submit(tokens, max_tokens=6)
            simulation.finish()
        assert first_rows(simulation) == [(0, 30), (23, 26)]
        assert all(any(step.wants_drafts) for step in simulation.rank.steps)
        stream = simulation.submit(prompt[::-1], max_tokens=60)
        simulation.start(stream, num_tokens=9)
        simulation.restart_rank()
        simulation.finish()
        ((start, num_tokens),) = first_rows(simulation)
        assert num_tokens >= 30 + 9
        assert start == num_tokens - 2
        simulation.check()
        simulation.check_idle()


def test_rejected_drafts_never_reach_the_prefix_cache(directory: Path) -> None:
    """A findable block holds only the KV of its tokens, from the moment it is indexed: no step in flight writes a draft token
    to it."""
    with simulate(directory, **DRAFTS, num_kv_blocks=1024, block_size=4) as simulation:
        simulation.num_wanted_drafts = K
        submit_all(simulation, 10)
        ends, found, num_read = {b"": 0}, {}, 0
        while not all(stream.is_over for stream in simulation.streams.values()):
            simulation.turn()
            stored = [each for each in simulation.cache_messages[num_read:] if isinstance(each, BlocksStored)]
            num_read = len(simulation.cache_messages)
            for message in stored:
                kv, tokens = ends[message.parent_hash], ints(message.token_ids)
                for index, (key, block_id) in enumerate(zip(message.block_hashes, message.block_ids, strict=True)):
                    for place, token_id in enumerate(tokens[4 * index : 4 * index + 4]):
                        kv = found[0, block_id, place] = mix(kv, token_id, MODEL)
                    ends[key] = kv
            assert found.items() <= simulation.arena.items()
        assert len(ends) > 60, "of answers, too"
        simulation.check()
        assert simulation.metric("spec_decode_num_accepted_tokens_total") < simulation.metric(
            "spec_decode_num_draft_tokens_total"
        )


@pytest.mark.parametrize("num_blocks", [400, 120], ids=["room", "evicted"])
@pytest.mark.parametrize("drafts", [DRAFTS, LAYERS], ids=["ngram", "mtp"])
def test_prefixes_are_found_as_often(directory: Path, drafts: dict[str, Any], num_blocks: int) -> None:
    """Conversations with one beginning, one turn after the other, find at least 0.98 of the tokens that they find without
    drafts."""

    def share_found(**options: Any) -> float:
        with simulate(directory, num_kv_blocks=num_blocks, block_size=8, **options) as simulation:
            simulation.num_wanted_drafts = K if options else 0
            shared = [index % 61 for index in range(100)]
            prompts = [[*shared, number, *range(number)] for number in range(10)]
            for turn in range(3):
                streams = [simulation.submit(prompt, seed=turn, max_tokens=30) for prompt in prompts]
                simulation.finish()
                prompts = [[*prompt, *stream.token_ids, 7, 8, 9] for prompt, stream in zip(prompts, streams, strict=True)]
            simulation.check()
            return simulation.metric("prefix_cache_hits_total") / simulation.metric("prefix_cache_queries_total")

    without = share_found()
    assert without > 0.5
    assert share_found(**drafts) >= 0.98 * without


def test_aborts_inside_accepted_drafts(directory: Path) -> None:
    """The tokens sent are the beginning of the answer; other sequences continue, and nothing is held."""
    with simulate(directory, **DRAFTS, num_kv_blocks=60) as simulation:
        simulation.num_wanted_drafts = K
        streams = submit_all(simulation, 12, max_tokens=60)
        gone, others = streams[::2], streams[1::2]
        for number, stream in enumerate(gone):
            simulation.start(stream, num_tokens=1 + 5 * number)
            simulation.abort(stream)
        simulation.finish(*others)
        simulation.run_until(lambda: simulation.scheduler.dispatcher.num_in_flight == 0, "no step in flight")
        simulation.check(*others)
        simulation.check_idle()
        for stream in gone:
            whole = expected_tokens(expected_values(stream.request), stream.request.sampling)
            assert stream.token_ids == whole[: len(stream.token_ids)]
            assert len(stream.token_ids) < len(whole)
