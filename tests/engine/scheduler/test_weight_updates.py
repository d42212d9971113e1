"""Commands about weights at the scheduler on real rings: each mode, each state, each failure."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.messages import (
    ClearWeights,
    DropWeights,
    ListActors,
    LoadWeights,
    Order,
    Pause,
    ReloadWeights,
    ResetPrefixCache,
    Resume,
    ReturnToWeights,
    SamplingParams,
    WeightsState,
    encode,
)
from engine.process.run_directory import WeightsRecord
from engine.scheduler.queues import WaitingQueue
from shm.broadcast import BroadcastWriter
from tests.engine.scheduler.sequences import make_sample
from tests.engine.scheduler.simulation import MODEL, Simulation, Stream, expected_tokens, ints, simulate
from tests.engine.scheduler.test_scheduler import submit_all
from tests.waiting import wait_until

OTHER = "/weights/b"
MODES = ["abort", "wait", "requeue", "keep"]


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with tempfile.TemporaryDirectory(prefix="tokamak-test-") as directory, simulate(Path(directory), max_num_seqs=4) as running:
        yield running


def running_streams(simulation: Simulation, max_tokens: int = 40) -> list[Stream]:
    """Return four running and four waiting streams."""
    streams = submit_all(simulation, count=8, max_tokens=max_tokens)
    simulation.start(*streams[:4], num_tokens=4)
    return streams


def state_of(simulation: Simulation) -> WeightsState:
    simulation.turn()
    return WeightsState(int(simulation.metric("engine_state")))


def counts(simulation: Simulation) -> tuple[float, float]:
    simulation.turn()
    return simulation.metric("num_requests_running"), simulation.metric("num_requests_waiting")


@pytest.mark.parametrize(("mode", "left"), [("abort", (0, 0)), ("wait", (0, 0)), ("requeue", (0, 8)), ("keep", (4, 4))])
def test_pause_and_resume(simulation: Simulation, mode: str, left: tuple[int, int]) -> None:
    """The answer comes when nothing runs; new requests are held and then served; nothing else is lost."""
    streams = running_streams(simulation)
    reply = simulation.ask(Pause(mode))
    assert (reply.status, reply.details["state"]) == (200, "PAUSED")
    assert simulation.scheduler.dispatcher.num_in_flight == 0
    assert counts(simulation) == left
    new_request = simulation.submit([1, 2, 3])
    assert counts(simulation) == (left[0], left[1] + 1)
    assert not new_request.outputs
    again = simulation.ask(Pause(mode))
    assert (again.status, "PAUSED" in again.message) == (409, True)
    assert simulation.ask(Resume()).status == 200
    assert state_of(simulation) is WeightsState.NORMAL
    simulation.finish()
    if mode == "abort":
        assert {stream.finish_reason for stream in streams} == {"abort"}
        simulation.check(new_request)
    else:
        simulation.check()
    simulation.check_idle()


def test_new_requests_are_held_in_mode_wait(simulation: Simulation) -> None:
    streams = running_streams(simulation)
    command_id = simulation.order(Pause("wait"))
    new_request = simulation.submit([1], priority=-9)
    simulation.run_until(lambda: command_id in simulation.replies, "the pause")
    simulation.check(*streams)
    assert not new_request.outputs
    assert counts(simulation) == (0, 1)
    simulation.ask(Resume())
    simulation.finish()
    simulation.check()


@pytest.mark.parametrize("mode", MODES)
def test_reload(simulation: Simulation, mode: str) -> None:
    """No mode but "abort" ends streams; requests after the answer get the new weights; versions identify the weights of each
    token."""
    streams = running_streams(simulation)
    reply = simulation.ask(ReloadWeights(OTHER, mode))
    assert (reply.status, reply.details["weight_version"], reply.details["path"]) == (200, 2, OTHER)
    assert simulation.run.weights() == WeightsRecord(OTHER, 2, 2, WeightsState.NORMAL, ((OTHER, 2),))
    later = submit_all(simulation, count=4, seed=77)
    simulation.finish()
    simulation.check(*later, path=OTHER)
    assert {output.weight_version for stream in later for output in stream.outputs} == {2}
    match mode:
        case "abort":
            assert {stream.finish_reason for stream in streams} == {"abort"}
        case "wait":
            simulation.check(*streams)
        case "requeue":
            for stream in streams:
                check_requeued(stream)
        case "keep":
            assert all(len(stream.token_ids) == 40 and stream.finish_reason == "length" for stream in streams)
    simulation.check_idle()


def check_requeued(stream: Stream) -> None:
    """Check that tokens up to the reload are of the old weights, and later ones of the new weights with all earlier tokens as
    the prompt."""
    num_old = sum(output.weight_version == 1 for output in stream.outputs)
    prompt, sampling = ints(stream.request.prompt.token_ids), stream.request.sampling
    assert stream.token_ids[:num_old] == expected_tokens(prompt, sampling)[:num_old]
    rest = SamplingParams(seed=sampling.seed, max_tokens=sampling.max_tokens - num_old)
    assert stream.token_ids[num_old:] == expected_tokens(prompt + stream.token_ids[:num_old], rest, OTHER)


def test_kept_sequences_share_no_blocks_of_two_weights(simulation: Simulation) -> None:
    """KV of the old weights never serves a request of the new ones."""
    prompt = list(range(30))
    kept = simulation.submit(prompt, max_tokens=60)
    simulation.start(kept, num_tokens=20)
    simulation.ask(ReloadWeights(OTHER, "keep"))
    simulation.finish(kept)
    later = simulation.submit(prompt + kept.token_ids, max_tokens=20)
    simulation.finish(later)
    simulation.check(later, path=OTHER)
    assert later.outputs[0].num_cached_tokens == 0


@pytest.mark.parametrize("path", ["", MODEL])
def test_reloading_the_same_path_is_a_new_version(simulation: Simulation, path: str) -> None:
    assert simulation.ask(ReloadWeights(path)).details == {"state": "NORMAL", "weight_version": 2, "path": MODEL}
    assert simulation.metric("engine_weight_version") == 2


def test_a_reload_leaves_a_pause_in_place(simulation: Simulation) -> None:
    simulation.ask(Pause())
    assert simulation.ask(ReloadWeights(OTHER, "wait")).details["state"] == "PAUSED"
    stream = simulation.submit([1, 2])
    simulation.ask(Resume())
    simulation.finish()
    simulation.check(stream, path=OTHER)


@pytest.mark.parametrize("drop", [Pause("requeue", "sleep"), DropWeights("requeue")])
@pytest.mark.parametrize("raise_", [Resume(), ReloadWeights(OTHER)])
def test_cleared_and_back(simulation: Simulation, drop: Order, raise_: Order) -> None:
    streams = running_streams(simulation)
    assert simulation.ask(drop).details["state"] == "CLEARED"
    assert state_of(simulation) is WeightsState.CLEARED
    assert simulation.metric("engine_weight_version") == 0
    assert counts(simulation) == (0, 8)
    for order in (Pause(), Pause("abort", "sleep"), DropWeights()):
        reply = simulation.ask(order)
        assert (reply.status, "CLEARED" in reply.message) == (409, True)
    later = simulation.submit([9, 9, 9])
    reply = simulation.ask(raise_)
    assert (reply.status, reply.details["state"]) == (200, "NORMAL")
    is_new = isinstance(raise_, ReloadWeights)
    assert reply.details["weight_version"] == (2 if is_new else 1)
    simulation.finish()
    simulation.check(later, path=OTHER if is_new else MODEL)
    if not is_new:
        simulation.check(*streams)


def test_sleep_from_a_pause(simulation: Simulation) -> None:
    simulation.ask(Pause())
    assert simulation.ask(Pause("abort", "sleep")).details["state"] == "CLEARED"


def test_one_command_at_a_time(simulation: Simulation) -> None:
    running_streams(simulation)
    simulation.rank.hangs_on_loads = True
    command_id = simulation.order(ReloadWeights(OTHER))
    simulation.run_until(lambda: simulation.rank.pending, "it is told to load")
    for order in (Pause(), Resume(), ReloadWeights(MODEL), DropWeights()):
        reply = simulation.ask(order)
        assert (reply.status, "LOADING" in reply.message) == (409, True)
    simulation.rank.hangs_on_loads = False
    simulation.run_until(lambda: command_id in simulation.replies, "the reload")
    assert simulation.replies[command_id].status == 200


@pytest.mark.parametrize(
    ("order", "status", "word"),
    [
        (Resume(), 409, "NORMAL"),
        (Pause("maybe"), 400, "requeue"),
        (Pause("abort", "coma"), 400, "sleep"),
        (DropWeights("maybe"), 400, "requeue"),
        (ReloadWeights(OTHER, "maybe"), 400, "requeue"),
        (ReloadWeights(OTHER, ranks=[0, 7]), 400, "rank 7"),
        (ListActors(), 400, "ListActors"),
    ],
)
def test_invalid_commands_change_nothing(simulation: Simulation, order: Order, status: int, word: str) -> None:
    streams = running_streams(simulation)
    reply = simulation.ask(order)
    assert (reply.status, word in reply.message) == (status, True)
    simulation.finish()
    simulation.check(*streams)


def test_one_rank_of_one_is_the_whole_engine(simulation: Simulation) -> None:
    assert simulation.ask(ReloadWeights(OTHER, ranks=[0])).details["weight_version"] == 2
    stream = simulation.submit([1, 2, 3])
    simulation.finish()
    simulation.check(stream, path=OTHER)


@pytest.mark.parametrize("before", [WeightsState.NORMAL, WeightsState.PAUSED, WeightsState.CLEARED])
def test_broken_checkpoint_changes_nothing(simulation: Simulation, before: WeightsState) -> None:
    streams = running_streams(simulation)
    if before is not WeightsState.NORMAL:
        simulation.ask(Pause("requeue", "pause" if before is WeightsState.PAUSED else "sleep"))
    simulation.rank.refuses_loads = "model.norm.weight is missing"
    reply = simulation.ask(ReloadWeights(OTHER))
    assert (reply.status, "model.norm.weight is missing" in reply.message) == (400, True)
    assert state_of(simulation) is before
    assert simulation.run.weights().ranks == ((MODEL, 1),)
    simulation.rank.refuses_loads = ""
    if before is not WeightsState.NORMAL:
        assert simulation.ask(Resume()).status == 200
    simulation.finish()
    simulation.check(*streams)


@pytest.mark.parametrize("before", [WeightsState.NORMAL, WeightsState.CLEARED])
def test_a_rank_that_dies_while_loading(simulation: Simulation, before: WeightsState) -> None:
    streams = running_streams(simulation)
    if before is WeightsState.CLEARED:
        simulation.ask(DropWeights("requeue"))
    simulation.rank.hangs_on_loads = True
    command_id = simulation.order(ReloadWeights(OTHER))
    simulation.run_until(lambda: simulation.rank.pending, "it is told to load")
    simulation.kill_rank()
    simulation.revive_rank()
    simulation.run_until(lambda: command_id in simulation.replies, "the answer")
    assert (simulation.replies[command_id].status, OTHER in simulation.replies[command_id].message) == (503, True)
    simulation.run_until(lambda: simulation.turn() == 0, "rest")
    assert state_of(simulation) is before
    if before is WeightsState.CLEARED:
        assert simulation.rank.version == 0
        assert simulation.ask(Resume()).status == 200
    simulation.finish()
    simulation.check(*streams)


def test_rank_restarted_while_cleared_is_cleared_again(simulation: Simulation) -> None:
    simulation.ask(DropWeights())
    simulation.restart_rank()
    simulation.run_until(lambda: simulation.rank.version == 0, "cleared again")
    assert state_of(simulation) is WeightsState.CLEARED
    assert simulation.ask(Resume()).status == 200


def test_rank_with_other_weights_loads_those_in_use(simulation: Simulation) -> None:
    """The weights in use were not available for a moment when it started."""
    streams = running_streams(simulation)
    simulation.ask(ReloadWeights(OTHER, "requeue"))
    simulation.restart_rank(weights=(MODEL, 1))
    assert simulation.rank.version == 1
    later = submit_all(simulation, count=4, seed=9)
    simulation.finish()
    assert (simulation.rank.path, simulation.rank.version) == (OTHER, 2)
    simulation.check(*later, path=OTHER)
    assert not any(stream.rejected for stream in streams)


def test_weights_in_use_are_gone(simulation: Simulation) -> None:
    """No request is served, above all not with other weights of the rank, and this is reported, until it gets some."""
    simulation.ask(ReloadWeights(OTHER))
    simulation.restart_rank(weights=(MODEL, 1))
    simulation.rank.refuses_loads = "gone"
    stream = simulation.submit([1, 2, 3])
    simulation.run_until(lambda: simulation.rank.version == 0, "without weights")
    assert state_of(simulation) is WeightsState.CLEARED
    assert simulation.run.weights() == WeightsRecord(OTHER, 2, 2, WeightsState.CLEARED, ((OTHER, 2),))
    assert simulation.rank.steps == []
    simulation.rank.refuses_loads = ""
    assert simulation.ask(ReloadWeights("/weights/c")).details["state"] == "NORMAL"
    simulation.finish()
    simulation.check(stream, path="/weights/c")
    assert any("cannot be reloaded: worker0: gone" in entry.text for entry in simulation.segments.counters.errors.entries())


def test_weights_in_use_are_gone_for_one_rank(tmp_path: Path) -> None:
    """The other one releases them too: ranks compute together."""
    with simulate(tmp_path, tensor_parallel_size=2) as simulation:
        simulation.ask(ReloadWeights(OTHER))
        simulation.kill_rank(1)
        simulation.revive_rank(1, weights=("", 0))
        simulation.ranks[1].refuses_loads = "gone"
        simulation.run_until(lambda: simulation.ranks[0].version == 0, "without weights")
        assert state_of(simulation) is WeightsState.CLEARED
        simulation.ranks[1].refuses_loads = ""
        assert simulation.ask(ReloadWeights("/weights/c")).details["state"] == "NORMAL"
        stream = simulation.submit([1, 2, 3])
        simulation.finish()
        simulation.check(stream, path="/weights/c")


def test_command_of_a_dead_scheduler(simulation: Simulation) -> None:
    """The rank carries out the old load, then learns the weights in use from the new scheduler; no token is of the wrong
    weights."""
    streams = running_streams(simulation)
    stale = BroadcastWriter.attach(simulation.config.run_id, "scheduler", simulation.scheduler_epoch)
    stale.try_send(encode(LoadWeights("of-the-dead", OTHER, 2, [])))
    stale.close()
    simulation.restart_scheduler()
    simulation.finish()
    simulation.check(*streams)
    assert (simulation.rank.path, simulation.rank.version) == (MODEL, 1)


def test_step_after_clearing_by_a_dead_scheduler(simulation: Simulation) -> None:
    """The rank answers that it has no weights, gets them, and the step is dispatched again."""
    streams = running_streams(simulation)
    stale = BroadcastWriter.attach(simulation.config.run_id, "scheduler", simulation.scheduler_epoch)
    stale.try_send(encode(ClearWeights("of-the-dead")))
    stale.close()
    simulation.restart_scheduler()
    simulation.loop.turn()
    assert simulation.scheduler.dispatcher.num_in_flight
    simulation.finish()
    simulation.check(*streams)
    assert (simulation.rank.path, simulation.rank.version) == (MODEL, 1)


def test_rank_without_weights_gets_those_in_use(simulation: Simulation) -> None:
    """Even if it did not report it."""
    streams = running_streams(simulation)
    simulation.rank.version = 0
    simulation.finish()
    simulation.check(*streams)
    assert simulation.rank.version == 1


def test_no_weights_exist(simulation: Simulation) -> None:
    """The engine waits without any, and accepts others."""
    simulation.ask(DropWeights())
    simulation.run.write_weights(WeightsRecord.of_start(simulation.config))
    simulation.rank.refuses_loads = "gone"
    simulation.restart_scheduler()
    simulation.run_until(lambda: simulation.turn() == 0 and state_of(simulation) is WeightsState.CLEARED, "without weights")
    simulation.rank.refuses_loads = ""
    assert simulation.ask(ReloadWeights(OTHER)).details["state"] == "NORMAL"


@pytest.mark.parametrize("order", [Pause("requeue"), DropWeights("requeue"), ReloadWeights(OTHER)])
def test_command_that_cannot_be_recorded(simulation: Simulation, order: Order) -> None:
    """The command is refused, or given up if it had begun; nothing has changed."""
    streams = running_streams(simulation)
    simulation.run.weights_path().unlink()
    simulation.run.weights_path().mkdir()
    reply = simulation.ask(order)
    assert (reply.status, "weights.json: Is a directory" in reply.message) == (503, True)
    assert reply.details.get("state", "NORMAL") == "NORMAL"
    simulation.finish()
    simulation.check(*streams)
    assert simulation.rank.version == 1


class TestWaitForATokenizer:
    """Mode "wait" lets running sequences end with the weights that they began with, also across a death of their tokenizer."""

    def dies(self, simulation: Simulation) -> tuple[list[Stream], str]:
        """Return running streams, and a reload that waits for them."""
        streams = running_streams(simulation)
        command_id = simulation.order(ReloadWeights(OTHER, "wait"))
        simulation.turn()
        simulation.submit([1, 2])
        simulation.turn()
        simulation.begin_epoch("tokenizer0", 2)
        wait_until(lambda: simulation.loop.turn() >= 0 and not simulation.scheduler.batch.sequences, what="all are dropped")
        for _ in range(20):
            simulation.turn()
        assert (command_id in simulation.replies, simulation.rank.version) == (False, 1)
        return streams, command_id

    def test_streams_come_back_first(self, simulation: Simulation) -> None:
        streams, command_id = self.dies(simulation)
        simulation.resubmit_open()
        simulation.finish()
        simulation.check(*streams)
        simulation.run_until(lambda: command_id in simulation.replies, "the reload")
        assert simulation.replies[command_id].details["weight_version"] == 2

    def test_their_clients_left(self, simulation: Simulation) -> None:
        streams, command_id = self.dies(simulation)
        for stream in streams[1:]:
            simulation.abort(stream)
        simulation.resubmit(streams[0])
        simulation.finish(streams[0])
        simulation.check(streams[0])
        simulation.run_until(lambda: command_id in simulation.replies, "the reload")

    def test_their_api_died(self, simulation: Simulation) -> None:
        _, command_id = self.dies(simulation)
        simulation.begin_epoch("api0", 2)
        simulation.run_until(lambda: command_id in simulation.replies, "the reload")

    def test_not_for_ever(self) -> None:
        queue = WaitingQueue()
        queue.hold()
        queue.expect_back(make_sample("a", [1]), deadline_ns=1000)
        assert queue.is_expecting(999)
        assert not queue.is_expecting(1000)


@pytest.mark.parametrize("order", [Pause("requeue"), DropWeights("requeue")])
def test_a_pause_outlasts_the_scheduler(simulation: Simulation, order: Order) -> None:
    streams = running_streams(simulation)
    simulation.ask(order)
    state = state_of(simulation)
    simulation.restart_scheduler()
    assert state_of(simulation) is state
    assert counts(simulation) == (0, 8)
    assert simulation.ask(Resume()).status == 200
    simulation.finish()
    simulation.check(*streams)


def test_reset_prefix_cache(simulation: Simulation) -> None:
    first = simulation.submit(list(range(20)), max_tokens=30)
    simulation.start(first)
    assert simulation.metric("num_cached_kv_blocks") > 0
    assert simulation.ask(ResetPrefixCache()).status == 200
    simulation.turn()
    assert simulation.metric("num_cached_kv_blocks") == 0
    simulation.finish()
    again = simulation.submit(list(range(20)), max_tokens=30)
    simulation.finish()
    simulation.check()
    assert again.outputs[0].num_cached_tokens == 0


def test_overwritten_checkpoint_gets_a_new_version(simulation: Simulation) -> None:
    """A rank dies and its weights exist nowhere any more: the new contents get a version of their own, without cached
    blocks."""
    simulation.restart_rank(files="a")
    streams = running_streams(simulation)
    assert simulation.run.weights().contents == {1: "a"}
    simulation.restart_rank(files="b")
    simulation.run_until(lambda: simulation.rank.version == 2, "a number of its own")
    simulation.finish()
    assert simulation.run.weights() == WeightsRecord(MODEL, 2, 2, WeightsState.NORMAL, ((MODEL, 2),), {2: "b"})
    simulation.check(*streams)
    assert {output.weight_version for stream in streams for output in stream.outputs} == {1, 2}
    assert any("was overwritten while in use" in entry.text for entry in simulation.segments.counters.errors.entries())
    simulation.restart_rank(files="b")
    simulation.finish(*submit_all(simulation, count=2, seed=3))
    assert simulation.run.weights().version == 2


def test_overwritten_checkpoint_has_no_cached_blocks(simulation: Simulation) -> None:
    """Keys and values of its old contents serve no later request."""
    simulation.restart_rank(files="a")
    prompt = list(range(40))
    simulation.finish(simulation.submit(prompt))
    simulation.restart_rank(files="b")
    simulation.run_until(lambda: simulation.rank.version == 2, "a number of its own")
    later = simulation.submit(prompt)
    simulation.finish(later)
    assert later.outputs[0].num_cached_tokens == 0
    assert later.outputs[0].weight_version == 2


def test_ranks_with_different_contents(tmp_path: Path) -> None:
    """The checkpoint was overwritten between the two starts: the version means the first rank's contents; all load the new
    ones."""
    with simulate(tmp_path, tensor_parallel_size=2) as simulation:
        for index, files in enumerate("ab"):
            simulation.kill_rank(index)
            simulation.revive_rank(index, files=files)
        simulation.ranks[0].files = "b"
        simulation.run_until(lambda: [rank.version for rank in simulation.ranks] == [2, 2], "one version")
        stream = simulation.submit([1, 2, 3])
        simulation.finish()
        simulation.check(stream)
        assert simulation.run.weights().contents == {2: "b"}


def test_nothing_runs_until_contents_are_recorded(simulation: Simulation) -> None:
    """A rank came with unknown contents, and weights.json cannot be written: all wait, and the error is reported."""
    simulation.run.weights_path().unlink()
    simulation.run.weights_path().mkdir()
    simulation.restart_rank(weights=(MODEL, 1), files="a")
    streams = submit_all(simulation, count=4)
    simulation.run_until(lambda: simulation.metric("is_record_unwritten") == 1, "it is noticed")
    for _ in range(20):
        simulation.turn()
    assert simulation.rank.steps == []
    texts = [entry.text for entry in simulation.segments.counters.errors.entries()]
    assert [("weights.json: Is a directory" in text) for text in texts] == [True]
    simulation.run.weights_path().rmdir()
    simulation.finish()
    simulation.check(*streams)
    assert simulation.metric("is_record_unwritten") == 0
    assert simulation.run.weights().contents == {1: "a"}


def test_unrecordable_loss_of_weights_is_repaired(simulation: Simulation) -> None:
    """The repair continues nevertheless."""
    simulation.ask(ReloadWeights(OTHER))
    simulation.run.weights_path().unlink()
    simulation.run.weights_path().mkdir()
    simulation.restart_rank(weights=("", 0))
    simulation.rank.refuses_loads = "gone"
    simulation.run_until(lambda: state_of(simulation) is WeightsState.CLEARED, "without weights")


def test_checkpoint_overwritten_while_unloaded(simulation: Simulation) -> None:
    simulation.restart_rank(files="a")
    simulation.run_until(lambda: simulation.run.weights().contents == {1: "a"}, "its contents are known")
    simulation.ask(DropWeights())
    simulation.rank.files = "b"
    reply = simulation.ask(Resume())
    assert (reply.status, "overwritten" in reply.message, state_of(simulation)) == (400, True, WeightsState.CLEARED)
    assert simulation.ask(ReloadWeights()).status == 200
    assert simulation.run.weights().contents == {2: "b"}


def test_overwritten_checkpoint_does_not_end_sleep(simulation: Simulation) -> None:
    """A rank that comes back with other contents while the engine sleeps has to release them."""
    simulation.restart_rank(files="a")
    simulation.run_until(lambda: simulation.run.weights().contents == {1: "a"}, "its contents are known")
    simulation.ask(DropWeights())
    simulation.restart_rank(files="b")
    simulation.run_until(lambda: simulation.rank.version == 0, "cleared again")
    simulation.run_until(lambda: simulation.turn() == 0, "rest")
    assert state_of(simulation) is WeightsState.CLEARED
    assert simulation.run.weights().last_version == 1


def test_unused_checkpoint_may_be_overwritten(simulation: Simulation) -> None:
    """A rank that comes back with it instead of the weights in use has to load those."""
    simulation.restart_rank(files="a")
    simulation.run_until(lambda: simulation.run.weights().contents == {1: "a"}, "its contents are known")
    simulation.rank.files = "b"
    simulation.ask(ReloadWeights(OTHER))
    simulation.restart_rank(weights=(MODEL, 1), files="c")
    simulation.rank.files = "b"
    simulation.run_until(lambda: simulation.rank.version == 2, "what is in use")
    record = simulation.run.weights()
    assert (record.path, record.version, record.last_version, record.ranks) == (OTHER, 2, 2, ((OTHER, 2),))


@pytest.mark.parametrize("before", [WeightsState.NORMAL, WeightsState.PAUSED, WeightsState.CLEARED])
@pytest.mark.parametrize("order", [Pause("keep"), Resume(), DropWeights("keep"), ReloadWeights(OTHER)], ids=str)
def test_command_is_undone(simulation: Simulation, before: WeightsState, order: Order) -> None:
    """Everything is as before, except for the used version number, since another replica failed."""
    running_streams(simulation)
    if before is not WeightsState.NORMAL:
        simulation.ask(Pause("keep", "pause" if before is WeightsState.PAUSED else "sleep"))
    record = simulation.run.weights()
    if simulation.ask(order).status == 409:
        return  # then there is nothing to take back
    last_version = simulation.run.weights().last_version
    assert simulation.ask(ReturnToWeights(record)).status == 200
    assert simulation.run.weights() == msgspec.structs.replace(record, last_version=last_version)
    assert state_of(simulation) is before
    assert simulation.rank.version == (0 if before is WeightsState.CLEARED else 1)
    if before is not WeightsState.NORMAL:
        simulation.ask(Resume())
    later = submit_all(simulation, count=4, seed=9)
    simulation.finish()
    simulation.check(*later)
    assert simulation.ask(ReloadWeights(OTHER)).details["weight_version"] == last_version + 1


def test_undoing_waits_for_the_present_command(simulation: Simulation) -> None:
    record = simulation.run.weights()
    simulation.ask(ReloadWeights(OTHER))
    simulation.rank.hangs_on_loads = True
    reload = simulation.order(ReloadWeights(OTHER))
    simulation.run_until(lambda: state_of(simulation) is WeightsState.LOADING, "the next reload begins")
    back = simulation.order(ReturnToWeights(record))
    simulation.turn()
    assert back not in simulation.replies
    simulation.rank.hangs_on_loads = False
    simulation.run_until(lambda: back in simulation.replies, "it is taken back")
    assert (simulation.replies[reload].status, simulation.replies[back].status) == (200, 200)
    assert (simulation.rank.path, simulation.rank.version) == (MODEL, 1)


def test_replica_loads_the_version_of_another(simulation: Simulation) -> None:
    """The replica uses that version, and only if it finds the same contents."""
    simulation.rank.files = "b"
    reply = simulation.ask(ReloadWeights(OTHER, version=7, contents="a"))
    assert (reply.status, simulation.run.weights().version, simulation.run.weights().last_version) == (400, 1, 7)
    assert simulation.ask(ReloadWeights(OTHER, version=9, contents="b")).details["weight_version"] == 9
    assert simulation.rank.version == 9
