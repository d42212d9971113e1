"""The tokenizer's helper processes and their queues: a lane for each kind of work, so that slow work delays only its own kind.

Used by the tokenizer's loop, which checks often and never waits here.

    text    prompts of text                     chat    conversations, rendered with the model's own template
    calls   /tokenize and /detokenize           heavy   long texts, and templates sent with requests
    format  structured output                   huge    very long texts: encoding takes seconds
                                                    slow    formats that take long

Within a lane, sources take turns (API keys or addresses; single requests if the source is unknown), so that a source with many
requests delays only itself and leaves room for others (`shares.py`). While others wait, a format that does not compile quickly
is moved to the slow lane and starts again. A lane with a full queue rejects new requests (429), but accepts those that were
begun before a crash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from engine.errors import RequestError
from engine.messages import ChatPrompt, Detokenize, Prompt, SequencePart, Submit
from engine.process.fair_queue import FairQueue
from engine.process.shares import has_room
from engine.tokenizer.helper import Helper, HelperEnded
from engine.tokenizer.helper import Work as HelperWork
from engine.tokenizer.preparation import Answer, Refusal, Work, decode_answer
from engine.tokenizer.prompt_encoder import param_of

HEAVY_BYTES = 32 << 10  # a job of this size or more is not light
HUGE_BYTES = 256 << 10  # and one of this size would delay other heavy ones
MAX_CALLS = 64
MAX_HEAVY_JOBS = 64
MAX_IDLE_JOB_BYTES = 1 << 20  # a helper is not kept after a longer job
MAX_TRIES = 2
LOOK_NS = 500_000  # nothing wakes the loop when a helper is done
LONG_JOB_NS, LONG_LOOK_NS = 50_000_000, 5_000_000
FORMAT_NS, FIRST_FORMAT_NS = 300_000_000, 3_000_000_000  # of CPU time, while others wait; the second also loads a vocabulary
RETRY_AFTER_S = 1


class Job(msgspec.Struct, eq=False):
    """A message for a helper, and the sequences that wait for it."""

    work: Work
    record: bytes  # the message, undecoded
    sequences: dict[str, SequencePart] = {}  # by request id: those that are still wanted
    is_wanted: bool = True
    num_tries: int = 0
    begun_ns: int = 0

    @property
    def key(self) -> str:
        return self.work.shared.key if isinstance(self.work, Submit) else self.work.call_id

    @property
    def api(self) -> str:
        return self.work.shared.api if isinstance(self.work, Submit) else self.work.api

    @property
    def source(self) -> str:
        """The request's source; empty: unknown."""
        return self.work.shared.source if isinstance(self.work, Submit) else self.work.source

    @property
    def turn(self) -> str:
        """Key by which the job takes turns."""
        return self.source or self.key

    @property
    def ids(self) -> list[str]:
        """Ids of the requests, or of the call, that wait."""
        return list(self.sequences) if isinstance(self.work, Submit) else [self.work.call_id]

    @property
    def prompts(self) -> list[Prompt]:
        if isinstance(self.work, Submit):
            return list(self.work.prompts)
        return [] if isinstance(self.work, Detokenize) else [self.work.prompt]

    @property
    def param(self) -> str:
        """The field of the request that the work is about."""
        if isinstance(self.work, Submit) and self.work.shared.text.format is not None:
            return self.work.shared.text.format.param
        for prompt in self.prompts:
            if isinstance(prompt, ChatPrompt):
                return "chat_template" if prompt.chat_template else param_of(prompt)
        return "tokens" if isinstance(self.work, Detokenize) else "prompt"


class _Lane(msgspec.Struct):
    max_helpers: int
    max_waiting: int
    waiting: FairQueue[str, Job] = msgspec.field(default_factory=FairQueue)
    busy: dict[Helper, Job] = {}
    idle: list[Helper] = []


class Lanes:
    def __init__(self, work: HelperWork, max_waiting: int, is_own_template: Callable[[str], bool]) -> None:
        """`is_own_template`: whether a name in a request means one of the model's templates."""
        self._work = work
        self._is_own_template = is_own_template
        self._failed: list[tuple[Job, Refusal]] = []  # failed before they began
        self._has_jobs = False  # updated at each check; the loop asks in every turn
        self._lanes = {
            "text": _Lane(1, max_waiting),
            "chat": _Lane(1, max_waiting),
            "calls": _Lane(1, MAX_CALLS),
            "heavy": _Lane(2, MAX_HEAVY_JOBS),
            "huge": _Lane(1, MAX_HEAVY_JOBS),
            "format": _Lane(2, max_waiting),
            "slow": _Lane(1, max_waiting),
        }

    @property
    def num_waiting(self) -> int:
        """Jobs that no helper has begun."""
        return sum(len(lane.waiting) for lane in self._lanes.values()) if self._has_jobs else 0

    @property
    def helpers(self) -> list[Helper]:
        return [helper for lane in self._lanes.values() for helper in (*lane.busy, *lane.idle)]

    @property
    def deadline_ns(self) -> int:
        """Return the time of the next check; 0: there are no jobs."""
        if not self._has_jobs:
            return 0
        begun = [job.begun_ns for lane in self._lanes.values() for job in lane.busy.values()]
        now_ns = time.monotonic_ns()
        if self._failed:
            return now_ns
        if not begun:
            return 0
        return now_ns + (LOOK_NS if now_ns - max(begun) < LONG_JOB_NS else LONG_LOOK_NS)

    def add(self, job: Job, is_new_request: bool) -> None:
        """Add a job. Raises RequestError 429 if too many wait."""
        name = self._lane_of(job)
        lane = self._lanes[name]
        is_format = name == "format"  # it may be moved to the slow lane: half of the places there are kept for that
        queues = [self._lanes[each].waiting for each in ((name, "slow") if is_format else (name,))]
        limit = max(1, lane.max_waiting // 2) if is_format else lane.max_waiting
        num_all = sum(map(len, queues))
        num_own = sum(queue.count(job.source) for queue in queues) if job.source else num_all
        if is_new_request and not has_room(num_own, num_all, limit):
            raise _too_many(
                f"the queue of the {name} helper is full: {num_all} requests are waiting, {num_own} of them yours, "
                f"limit {limit} without other users"
            )
        lane.waiting.push(job.turn, job)
        self._has_jobs = True
        self._begin(lane)

    def cancel(self, job: Job) -> None:
        """Cancel a job. A helper that has worked on it for long is ended."""
        job.is_wanted = False
        for lane in self._lanes.values():
            lane.waiting.remove(job.turn, job)
            self._end_unwanted(lane)
            self._begin(lane)

    def finished(self) -> Iterator[tuple[Job, Answer]]:
        """Yield the jobs that ended since the last call, with their answers."""
        if not self._has_jobs:
            return
        for lane in self._lanes.values():
            self._end_unwanted(lane)
            for helper, job in list(lane.busy.items()):
                try:
                    answer = helper.poll()
                except HelperEnded as error:
                    del lane.busy[helper]
                    if error.was_killed and job.num_tries < MAX_TRIES:
                        lane.waiting.push(job.turn, job)
                        continue
                    yield job, Refusal(f"{job.param} cannot be prepared: {error}; simplify it", param=job.param)
                else:
                    if answer is None:
                        continue
                    del lane.busy[helper]
                    if len(job.record) + len(answer) > MAX_IDLE_JOB_BYTES:
                        helper.end()
                    else:
                        lane.idle.append(helper)
                        helper.has_worked = True
                    yield job, decode_answer(answer)
            self._begin(lane)
        self._move_slow_format()
        failed, self._failed = self._failed, []
        yield from failed
        self._has_jobs = bool(self._failed) or any(lane.busy or lane.waiting for lane in self._lanes.values())

    def close(self) -> None:
        """End all helpers."""
        for helper in self.helpers:
            helper.end()
        for lane in self._lanes.values():
            lane.busy.clear()
            lane.idle.clear()

    def _end_unwanted(self, lane: _Lane) -> None:
        for helper, job in list(lane.busy.items()):
            if not job.is_wanted and time.monotonic_ns() - job.begun_ns > LONG_JOB_NS:
                del lane.busy[helper]
                helper.end()

    def _move_slow_format(self) -> None:
        """Move a slow format out of the lane if another one waits for its helper."""
        lane, slow = self._lanes["format"], self._lanes["slow"]
        for helper, job in list(lane.busy.items()) if lane.waiting else ():
            if helper.job_cpu_ns > (FORMAT_NS if helper.has_worked else FIRST_FORMAT_NS):
                del lane.busy[helper]
                helper.end()
                if len(slow.waiting) < slow.max_waiting:
                    slow.waiting.push(job.turn, job)
                else:
                    text = (
                        f"{job.param} is slow to compile, and {len(slow.waiting)} other slow requests are waiting; try again "
                        "later"
                    )
                    self._failed.append((job, Refusal(text, 429, "too_many_requests", job.param, RETRY_AFTER_S)))
                self._begin(lane)
        self._begin(slow)

    def _begin(self, lane: _Lane) -> None:
        while lane.waiting and len(lane.busy) < lane.max_helpers:
            job = lane.waiting.pop()
            job.begun_ns = time.monotonic_ns()
            job.num_tries += 1
            try:
                helper = self._idle_helper(lane) or Helper(self._work)
            except OSError as error:  # no process, no descriptor
                refusal = Refusal(f"the tokenizer cannot start a helper: {error}", 503, "unavailable", "", RETRY_AFTER_S)
                self._failed.append((job, refusal))
                continue
            helper.begin(job.record)
            lane.busy[helper] = job

    def _idle_helper(self, lane: _Lane) -> Helper | None:
        """Return a living idle helper: if others were killed meanwhile, no job was lost."""
        while lane.idle:
            helper = lane.idle.pop()
            if not helper.has_ended:
                return helper
            helper.end()
        return None

    def _lane_of(self, job: Job) -> str:
        chats = [prompt for prompt in job.prompts if isinstance(prompt, ChatPrompt)]
        has_foreign = any(chat.chat_template and not self._is_own_template(chat.chat_template) for chat in chats)
        if isinstance(job.work, Submit) and job.work.shared.text.is_bound:
            return "format"
        if len(job.record) >= HUGE_BYTES:
            return "huge"
        if has_foreign or len(job.record) >= HEAVY_BYTES:
            return "heavy"
        if not isinstance(job.work, Submit):
            return "calls"
        return "chat" if chats else "text"


def _too_many(what: str) -> RequestError:
    return RequestError(f"{what}; try again later", status=429, code="too_many_requests", retry_after_s=RETRY_AFTER_S)
