"""Order of the lines: turns, what is under way, and work done (shares, new requests, large files, and no endless wait)."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.process.fair_queue import FairQueue


class Requests:
    """Requests with files of given numbers of pixels, decoded one after the other, as a media process does."""

    def __init__(self) -> None:
        self.queue: FairQueue[str, tuple[str, int]] = FairQueue()
        self.done: list[str] = []

    def ask(self, request: str, *sizes: int) -> None:
        for size in sizes:
            self.queue.push(request, (request, size))

    def turn(self) -> tuple[str, int]:
        """Return the request that had this turn, and the size of its file."""
        request, size = next(iter(self.queue))
        self.queue.charge(request, size, next_cost=size)
        self.queue.advance(size)
        assert self.queue.remove(request, (request, size))
        return request, size

    def work(self, num_turns: int = 1) -> str:
        """Return the requests that had these turns."""
        self.done += [self.turn()[0] for _ in range(num_turns)]
        return " ".join(self.done[-num_turns:])


@pytest.fixture
def requests() -> Requests:
    return Requests()


def test_requests_of_equal_files_take_turns(requests: Requests) -> None:
    requests.ask("a", 5, 5, 5)
    requests.ask("b", 5, 5, 5)
    requests.ask("c", 5)
    assert requests.work(7) == "a b c a b a b"
    assert not requests.queue


def test_small_files_precede_the_second_large_one(requests: Requests) -> None:
    requests.ask("large", *[1000] * 12)
    requests.ask("small", *[10] * 20)
    assert requests.work(1) == "large"
    assert Counter(requests.work(20).split()) == {"small": 20}
    assert requests.work(11) == " ".join(["large"] * 11)


def test_new_request_waits_only_for_work_in_progress(requests: Requests) -> None:
    """A new request is next even while earlier ones have a share."""
    requests.ask("large", *[1000] * 50)
    for number in range(40):
        requests.work()
        requests.ask(f"new request{number}", 1)
        assert requests.work() == f"new request{number}"
    requests.ask("one", 1)
    requests.ask("two", 1)
    assert sorted(requests.work(2).split()) == ["one", "two"]


def test_frequent_request_gets_only_its_share(requests: Requests) -> None:
    """One file at a time, as an api process asks for those of a request: earlier work is remembered."""
    requests.ask("patient", *[100] * 30)
    requests.ask("greedy", 1000)
    shares: Counter[str] = Counter()
    for _ in range(30):
        request = requests.work()
        shares[request] += 1000 if request == "greedy" else 100
        if request == "greedy":
            requests.ask("greedy", 1000)
    assert shares["patient"] >= shares["greedy"] - 1000


def test_endless_new_requests_starve_no_other(requests: Requests) -> None:
    requests.ask("large", 1000, 1000)
    assert requests.work() == "large"
    requests.ask("new request0", 100)
    for number in range(1, 100):
        requests.ask(f"new request{number}", 100)  # there is always one more
        if requests.work() == "large":
            break
    assert number <= 3 * 1000 // 100 + 3  # three lines at most share what is done meanwhile


def test_request_alone_builds_no_debt_or_credit(requests: Requests) -> None:
    """A request catches up while it is alone."""
    requests.ask("large", 1000)
    requests.ask("many", *[10] * 60)
    assert requests.work(3) == "large many many"
    requests.ask("late", *[10] * 20)
    assert Counter(requests.work(20).split())["late"] >= 9


def test_new_line_begins_with_an_equal_share(requests: Requests) -> None:
    for request in ("a", "b", "c", "d"):
        requests.ask(request, *[100] * 50)
    requests.work(40)
    requests.ask("late", *[100] * 50)
    assert Counter(requests.work(20).split()) == dict.fromkeys(("a", "b", "c", "d", "late"), 4)


@pytest.mark.parametrize("seed", range(20))
def test_shares_of_waiting_requests_are_equal(requests: Requests, seed: int) -> None:
    """No request is behind another by more than a file of each, whatever the sizes."""
    chance = random.Random(seed)
    names = [f"r{index}" for index in range(chance.randrange(2, 6))]
    largest = 500
    for name in names:
        requests.ask(name, *(chance.randrange(1, largest) for _ in range(200)))
    work: Counter[str] = Counter()
    for _ in range(150):
        name, size = requests.turn()
        work[name] += size
        assert max(work[name] for name in names) - min(work[name] for name in names) <= 2 * largest


def test_blocked_file_lets_others_pass(requests: Requests) -> None:
    requests.ask("video", 70, 7)
    requests.ask("picture", 3)
    assert list(requests.queue) == [("video", 70), ("video", 7), ("picture", 3)]


def test_removed_file_leaves_nothing(requests: Requests) -> None:
    requests.ask("a", 5, 6)
    requests.ask("b", 7)
    assert requests.queue.remove("a", ("a", 5))
    assert not requests.queue.remove("a", ("a", 5))
    assert requests.work(2) == "a b"
    assert (len(requests.queue), requests.queue._lines) == (0, {})


def test_lines_without_costs_take_turns() -> None:
    queue: FairQueue[str, str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "b2", "c1"):
        queue.push(item[0], item)
    assert [queue.pop() for _ in range(3)] == ["a1", "b1", "c1"]
    queue.push("c", "c2")  # its line was empty: it comes behind those that wait
    queue.push("b", "b3")
    assert list(queue) == ["a2", "a3", "b2", "b3", "c2"]
    assert (len(queue), queue.num_keys, queue.count("b"), queue.count("d")) == (5, 3, 2, 0)
    assert [queue.pop() for _ in range(5)] == ["a2", "b2", "c2", "a3", "b3"]


def test_turn_lasts_until_it_is_passed_on() -> None:
    queue: FairQueue[str, int] = FairQueue()
    for item in range(4):
        queue.push("a", item)
    queue.push("b", 9)
    front = queue.front()
    assert (front.popleft(), front.popleft()) == (0, 1)
    queue.push("c", 7)
    assert queue.front() is front
    queue.pass_on()
    assert list(queue) == [9, 7, 2, 3]
    queue.front().clear()
    queue.pass_on()
    assert ("a" in queue, "b" in queue) == (True, False)


def test_line_with_the_fewest_under_way_is_next() -> None:
    queue: FairQueue[str, int] = FairQueue()
    for item in range(4):
        queue.push("a", item)
        queue.charge("a", 1)  # as many are under way already
    queue.charge("b", 2)  # before it waits
    queue.push("b", 10)
    queue.push("c", 20)
    assert (queue.front_key, queue.cost("a"), queue.cost("b"), queue.cost("d")) == ("c", 4, 2, 0)
    queue.charge("c", 3)
    assert queue.front_key == "b"
    queue.charge("a", -4)
    assert queue.pop() == 0
    assert list(queue) == [1, 2, 3, 10, 20]  # the order of costs, whoever had the last turn
    for key, cost in (("b", -2), ("c", -3)):
        queue.charge(key, cost)
    assert list(queue) == [10, 20, 1, 2, 3]  # equals: by the last turn


def test_costs_of_absent_lines_are_kept_until_taken_back() -> None:
    queue: FairQueue[str, int] = FairQueue()
    queue.charge("a", 1)
    queue.push("a", 1)
    assert queue.pop() == 1
    assert ("a" in queue, queue.cost("a")) == (False, 1)
    queue.charge("a", -1)
    assert queue._lines == {}
