"""Order of work: shares, new requests, large files, and no endless wait."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.media.work_queue import WorkQueue


class Requests:
    """Requests with files of given numbers of pixels, decoded one after the other."""

    def __init__(self) -> None:
        self.turns: WorkQueue[tuple[str, int], int] = WorkQueue()
        self.num_added: Counter[str] = Counter()
        self.done: list[str] = []

    def ask(self, request: str, *sizes: int) -> None:
        for size in sizes:
            self.num_added[request] += 1
            self.turns.add(request, (request, self.num_added[request]), size)

    def work(self, num_turns: int = 1) -> str:
        """Return the requests that had these turns."""
        for _ in range(num_turns):
            turn = self.turns.next(lambda size: True)
            assert turn is not None
            (request, number), size = turn
            self.turns.worked((request, number), size)
            self.turns.remove((request, number))
            self.done.append(request)
        return " ".join(self.done[-num_turns:])


@pytest.fixture
def requests() -> Requests:
    return Requests()


def test_requests_of_equal_files_take_turns(requests: Requests) -> None:
    requests.ask("a", 5, 5, 5)
    requests.ask("b", 5, 5, 5)
    requests.ask("c", 5)
    assert requests.work(7) == "a b c a b a b"
    assert requests.turns.next(lambda size: True) is None


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
        turn = requests.turns.next(lambda size: True)
        assert turn is not None
        (name, _), size = turn
        requests.turns.worked(turn[0], size)
        requests.turns.remove(turn[0])
        work[name] += size
        assert max(work[name] for name in names) - min(work[name] for name in names) <= 2 * largest


def test_blocked_file_lets_others_pass(requests: Requests) -> None:
    requests.ask("video", 70, 7)
    requests.ask("picture", 3)
    turn = requests.turns.next(lambda size: size != 70)
    assert turn == (("video", 2), 7)
    assert requests.turns.next(lambda size: size == 3) == (("picture", 1), 3)
    assert requests.turns.next(lambda size: False) is None


def test_removed_file_leaves_nothing(requests: Requests) -> None:
    requests.ask("a", 5, 6)
    requests.ask("b", 7)
    assert requests.turns.remove(("a", 1)) == 5
    assert requests.turns.remove(("a", 1)) is None
    assert requests.work(2) == "a b"
    assert (len(requests.turns), requests.turns._lines) == (0, {})


def test_repeated_request_is_done_once(requests: Requests) -> None:
    requests.turns.add("a", ("a", 1), 5)
    requests.turns.add("a", ("a", 1), 5)
    assert len(requests.turns) == 1
    assert requests.work() == "a"
    assert requests.turns.next(lambda size: True) is None
