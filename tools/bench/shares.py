"""Estimate of how a step's ops are shared among more threads than this machine has, from the measured time of each task.

Used by `tokamak bench step --on-paper`. The native ops split their work as for that many threads and run the tasks one after
another (`Tape.replay_alone`), so the split is the real one. Not modelled: contention for memory and caches, and the cost of
barriers.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from tools.bench.replays import Case, Jobs, Replays
from tools.units import seconds, share


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of an op, or of several one after another."""

    num_barriers: int  # jobs shared by threads, each with a barrier at its end
    num_tasks: int
    busy_s: float  # all tasks together
    finish_s: float  # end of the last thread

    def __add__(self, other: Shares) -> Shares:
        return Shares(
            self.num_barriers + other.num_barriers,
            self.num_tasks + other.num_tasks,
            self.busy_s + other.busy_s,
            self.finish_s + other.finish_s,
        )

    def efficiency(self, num_threads: int) -> float:
        """Return the share of the threads' time that is work."""
        return self.busy_s / (num_threads * self.finish_s) if self.finish_s else 1.0


def finish(tasks_s: Sequence[float], num_threads: int) -> float:
    """Return when the last task is done: a free thread takes the next task, as in the pool."""
    free_s = [0.0] * num_threads
    for task_s in tasks_s:
        heapq.heapreplace(free_s, free_s[0] + task_s)
    return max(free_s)


def shares(repetitions: Sequence[Jobs], num_threads: int) -> Shares:
    """Return the shares of one op from the median time of each task."""
    jobs = [[statistics.median(times) / 1e9 for times in zip(*same, strict=True)] for same in zip(*repetitions, strict=True)]
    return Shares(
        num_barriers=sum(len(tasks) > 1 for tasks in jobs),
        num_tasks=sum(map(len, jobs)),
        busy_s=sum(map(sum, jobs)),
        finish_s=sum(finish(tasks, num_threads) for tasks in jobs),
    )


Paper = dict[int, dict[str, Shares]]  # of each number of threads, by op


def on_paper(replays: Replays, case: Case, repeat: int, thread_counts: Sequence[int]) -> Paper:
    paper: Paper = {}
    for num_threads in thread_counts:
        found: dict[str, Shares] = {}
        for profile, repetitions in replays.time_alone(case, repeat, num_threads):
            found[profile.title] = found.get(profile.title, Shares(0, 0, 0.0, 0.0)) + shares(repetitions, num_threads)
        paper[num_threads] = found
    return paper


def _whole(found: dict[str, Shares]) -> Shares:
    return sum(found.values(), Shares(0, 0, 0.0, 0.0))


def render_shares(case: Case, paper: Paper) -> Table:
    """Return a table with each op and number of threads: tasks, end, and share of the threads' time spent working."""
    title = f"{case.title}, on paper"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("op", no_wrap=True)
    for num_threads in paper:
        for column in (f"tasks, {num_threads} threads", "done", "work"):
            table.add_column(column, justify="right")
    wholes = {num_threads: _whole(found) for num_threads, found in paper.items()}
    for op in next(iter(paper.values())):
        table.add_row(op, *(cell for num_threads, found in paper.items() for cell in _cells(found[op], num_threads)))
    table.add_section()
    table.add_row("replay", *(cell for num_threads, whole in wholes.items() for cell in _cells(whole, num_threads)))
    table.add_row("barriers", *(cell for whole in wholes.values() for cell in (str(whole.num_barriers), "", "")))
    return table


def _cells(found: Shares, num_threads: int) -> tuple[str, str, str]:
    return str(found.num_tasks), seconds(found.finish_s), share(found.efficiency(num_threads))


def shares_document(paper: Paper) -> list[dict[str, Any]]:
    """Return the shares for JSON output, in seconds."""
    return [
        {
            "threads": num_threads,
            "barriers": _whole(found).num_barriers,
            "replay_s": _whole(found).finish_s,
            "ops": [
                {
                    "op": op,
                    "barriers": one.num_barriers,
                    "tasks": one.num_tasks,
                    "seconds": one.finish_s,
                    "work_share": one.efficiency(num_threads),
                }
                for op, one in found.items()
            ],
        }
        for num_threads, found in paper.items()
    ]
