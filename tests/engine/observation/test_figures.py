"""Derived metrics from two snapshots: rates, shares, distributions."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from engine.observation.figures import History, figures, report
from engine.observation.snapshot import Histogram, Snapshot
from tests.tools.engines import SECOND_NS, busy, counter, histogram, snapshot
from tools.top.screen import render
from tools.top.work import RunTitle


def test_rates_are_over_the_interval() -> None:
    result = figures(busy(8.0), tick=busy(6.0), window=busy(4.0))
    assert (result.interval_s, result.window_s) == (2.0, 4.0)
    assert result.generation_tokens_per_s == pytest.approx(100)  # of both api processes
    assert result.prompt_tokens_per_s == pytest.approx(200)
    assert result.computed_tokens_per_s == pytest.approx(300)
    assert result.requests_per_s == pytest.approx(5)  # whatever ended them
    assert result.steps_per_s == pytest.approx(100)
    assert result.cpu_share["worker0"] == pytest.approx(0.5)
    assert result.ring_records_per_s["scheduler>worker0"] == pytest.approx(500)


def test_gauges() -> None:
    result = figures(busy(1.0))
    assert (result.num_running, result.num_waiting, result.weight_version) == (12, 3, "2")
    assert (result.num_kv_blocks, result.num_used_kv_blocks, result.num_cached_kv_blocks) == (1000, 600, 250)
    assert result.engine_state == "normal"
    assert figures(snapshot(1.0, [counter("engine_state", "scheduler", 3)])).engine_state == "loading"


def test_replicas_are_compared_and_not_added() -> None:
    rows = [counter("engine_state", f"scheduler{replica}", 1) for replica in range(2)]
    rows += [counter("engine_weight_version", f"scheduler{replica}", 4) for replica in range(2)]
    result = figures(snapshot(1.0, rows))
    assert (result.engine_state, result.weight_version) == ("paused", "4")
    rows += [counter("engine_state", "scheduler2", 3), counter("engine_weight_version", "scheduler2", 3)]
    result = figures(snapshot(1.0, rows))
    assert (result.engine_state, result.weight_version) == ("paused, loading", "3, 4")


def test_one_snapshot_has_no_rates() -> None:
    result = figures(busy(3.0))
    assert result.generation_tokens_per_s is None
    assert set(result.cpu_share.values()) == {None}
    assert set(result.ring_records_per_s.values()) == {None}
    assert result.prefix_hit_share == pytest.approx(0.45)
    assert result.rank_idle_share == pytest.approx(0.1)
    assert result.latency["itl"].count == 300
    assert not result.latency["itl"].is_recent


def test_the_step_is_split() -> None:
    result = figures(busy(8.0), tick=busy(7.0), window=busy(2.0))
    assert result.step_mean_s == pytest.approx(0.010)
    assert result.step["run"].share == pytest.approx(0.8)
    assert sum(part.share or 0 for part in result.step.values()) == pytest.approx(1)
    assert result.step["sample"].time.mean == pytest.approx(0.001)
    assert result.step["sample"].time.count == 600
    assert result.step["sample"].time.is_recent


def test_quiet_window_falls_back_to_the_whole_run() -> None:
    quiet = snapshot(20.0, busy(8.0).rows)
    result = figures(quiet, tick=snapshot(19.0, quiet.rows), window=snapshot(10.0, quiet.rows))
    assert result.latency["ttft"].count == 40
    assert not result.latency["ttft"].is_recent
    assert result.prefix_hit_share == pytest.approx(0.45)
    assert result.generation_tokens_per_s == 0
    assert result.rank_idle_share == pytest.approx(0.1)


def test_idle_of_each_worker() -> None:
    rows = [
        counter(f"worker_{name}_seconds_total", worker, value)
        for worker, idle, busy_s in (("worker0", 1.0, 9.0), ("worker1", 3.0, 3.0))
        for name, value in (("idle", idle), ("busy", busy_s))
    ]
    now = snapshot(10.0, rows)
    actors = [msgspec.structs.replace(now.actors[0], name=name) for name in ("api0", "worker0", "worker1", "worker2")]
    result = figures(msgspec.structs.replace(now, actors=actors))
    assert result.worker_idle_share == {"worker0": pytest.approx(0.1), "worker1": pytest.approx(0.5), "worker2": None}
    assert result.rank_idle_share == pytest.approx(0.25)


def test_empty_engine_has_no_values() -> None:
    result = figures(snapshot(1.0), tick=snapshot(0.0), window=snapshot(0.0))
    assert result.latency["ttft"].p50 is None
    assert result.step_mean_s is None
    assert result.step["run"].share is None
    assert result.prefix_hit_share is None
    assert result.num_kv_blocks == 0


def test_a_restarted_process_has_no_cpu_share() -> None:
    before, now = busy(1.0), busy(2.0)
    actors = [msgspec.structs.replace(actor, pid=999) if actor.name == "worker0" else actor for actor in now.actors]
    shares = figures(msgspec.structs.replace(now, actors=actors), tick=before).cpu_share
    assert shares["worker0"] is None
    assert shares["api0"] == pytest.approx(0.5)


def test_a_counter_that_went_back_counts_from_zero() -> None:
    before = snapshot(1.0, [counter("steps_total", "scheduler", 500)])
    now = snapshot(2.0, [counter("steps_total", "scheduler", 20)])
    assert figures(now, tick=before).steps_per_s == pytest.approx(20)


def test_history_keeps_its_window() -> None:
    history = History(window_ns=3 * SECOND_NS, num_rates=4)
    results = [history.add(busy(float(second))) for second in range(1, 9)]
    assert results[0].generation_tokens_per_s is None
    assert [result.window_s for result in results[1:]] == [1, 2, 3, 3, 3, 3, 3]
    assert {result.interval_s for result in results[1:]} == {1}
    assert list(history.generation_rates) == pytest.approx([100] * 4)


def test_report_has_rows_and_figures() -> None:
    now = busy(2.0)
    document = report({"run_id": "1a2b3c4d"}, now, figures(now))
    assert document["run"]["run_id"] == "1a2b3c4d"
    assert document["derived"]["num_running"] == 12
    assert document["derived"]["step"]["run"]["time"]["count"] == 200
    assert {"name": "engine_weight_version", "value": 2}.items() <= {**document["rows"][5], "help": ""}.items()
    assert len(document["actors"]) == 6
    assert document["errors"][0]["actor"] == "worker0"


class TestHistogram:
    def test_quantiles_are_linear_within_a_bucket(self) -> None:
        found = Histogram((1.0, 2.0, 4.0), (0, 10, 10, 0), 50.0)
        assert found.quantile(0.5) == 2.0
        assert found.quantile(0.25) == 1.5
        assert found.quantile(0.75) == 3.0
        assert found.quantile(1.0) == 4.0
        assert found.mean == 2.5

    def test_above_all_bounds(self) -> None:
        assert Histogram((1.0, 2.0), (1, 0, 99), 900.0).quantile(0.9) == 2.0

    def test_empty(self) -> None:
        assert Histogram((1.0,), (0, 0), 0.0).quantile(0.5) is None
        assert Histogram((1.0,), (0, 0), 0.0).mean is None

    def test_since(self) -> None:
        late = Histogram((1.0,), (5, 2), 12.0).since(Histogram((1.0,), (4, 0), 2.0))
        assert (late.buckets, late.sum) == ((1, 2), 10.0)

    def test_actors_are_summed(self) -> None:
        rows = [histogram("time_to_first_token_seconds", name, [0.03, 0.2]) for name in ("api0", "api1")]
        found = snapshot(rows=rows).histogram("time_to_first_token_seconds")
        assert found is not None
        assert found.count == 4
        assert found.sum == pytest.approx(0.46)
        assert snapshot().histogram("time_to_first_token_seconds") is None

    @given(st.lists(st.integers(0, 50), min_size=5, max_size=5), st.floats(0, 1), st.floats(0, 1))
    def test_quantiles_grow_with_their_share(self, buckets: list[int], one: float, other: float) -> None:
        found = Histogram((0.5, 1.0, 2.0, 8.0), tuple(buckets), 1.0)
        low, high = found.quantile(min(one, other)), found.quantile(max(one, other))
        if not sum(buckets):
            assert low is high is None
        else:
            assert low is not None
            assert high is not None
            assert 0 <= low <= high <= 8.0


def drafting(taken_s: float) -> Snapshot:
    """Return a snapshot with ten rows a second, eight of them with three drafts, and part of an eleventh row in each."""
    rows = [
        counter("spec_decode_num_rows_total", "scheduler", 10 * taken_s),
        counter("spec_decode_num_draft_tokens_total", "scheduler", 24 * taken_s),
        counter("spec_decode_num_accepted_tokens_total", "scheduler", 12 * taken_s),
        counter("spec_decode_num_resting", "scheduler", 2),
        counter("spec_decode_draft_seconds_total", "worker0", 0.1 * taken_s),
        counter("worker_busy_seconds_total", "worker0", 0.9 * taken_s),
        counter("spec_decode_num_draft_tokens_by_method_total", "worker0", 20 * taken_s, method="ngram"),
        counter("spec_decode_num_accepted_tokens_by_method_total", "worker0", 11 * taken_s, method="ngram"),
        counter("spec_decode_num_draft_tokens_by_method_total", "worker0", 4 * taken_s, method="suffix"),
        counter("spec_decode_num_accepted_tokens_by_method_total", "worker0", 1 * taken_s, method="suffix"),
    ]
    for place, accepted in enumerate((8, 3, 1)):
        rows.append(counter("spec_decode_num_draft_tokens_per_pos_total", "scheduler", 8 * taken_s, position=str(place)))
        rows.append(
            counter("spec_decode_num_accepted_tokens_per_pos_total", "scheduler", accepted * taken_s, position=str(place))
        )
    return snapshot(taken_s, rows)


def test_drafts() -> None:
    assert figures(busy(3.0)).drafts is None
    for window in (None, drafting(2.0), drafting(6.0)):
        drafts = figures(drafting(6.0), window=window).drafts
        assert drafts is not None
        assert drafts.methods == pytest.approx({"ngram": 0.55, "suffix": 0.25})
        assert drafts.accepted == pytest.approx([1.0, 0.375, 0.125])
        assert (drafts.tokens_per_row, drafts.num_resting) == (pytest.approx(2.2), 2)
        assert drafts.draft_share == pytest.approx(0.1)
    text = Console(width=160)
    with text.capture() as capture:
        text.print(render(RunTitle("r", "m", "u", 0.0), drafting(6.0), figures(drafting(6.0)), width=160, now=1.0))
    (line,) = [line for line in capture.get().split("\n") if line.startswith("drafts")]
    expected = "drafts 2.20 tokens a row 55% of ngram 25% of suffix 2 rest 10% of the time 100 38 12 % by position"
    assert " ".join(line.split()) == expected
