"""Runs batches. Each api process looks for batches without an owner and takes one by its lock, which is released if the process
dies.

Requests are handled like all others, as those of one source, regardless of the batch's owner: the scheduler gives that source's
slots to sources with fewer, and their priority is the lowest. Requests that the engine has no room for are retried, and so are
those in progress when their process died.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from api.access import Given
from api.batches.batch import OPEN, Batch, BatchError, BatchErrors, Status, StoredBatch
from api.files.store import FileStore
from api.growing_waits import growing_waits
from engine.errors import RequestError
from engine.process.context import ActorContext

if TYPE_CHECKING:
    from api.batches.ledger import BatchLedger
    from api.batches.lines import Request

SOURCE = "batches"  # source of all requests of batches
PRIORITY = 1_000_000
LOOK_INTERVAL_NS = 500_000_000
_BUSY = (0, 429, 502, 503, 504)  # 0: no answer


class Answer(NamedTuple):
    status: int
    body: bytes
    request_id: str


Ask = Callable[[str, bytes, Given], Awaitable[Answer]]


class _Running:
    def __init__(self, stored: StoredBatch, lock: int) -> None:
        self.stored = stored
        self.lock = lock
        self.work: asyncio.Task[None] | None = None  # cancelled with the batch
        self.end: Status = "completed"
        self.has_changed = True


class BatchRunner:
    def __init__(self, context: ActorContext, files: FileStore) -> None:
        self.ask: Ask | None = None  # answers a request through the api: path, body, source
        self._context = context
        self._files = files
        files.reader_of = self.reader_of
        config = context.config
        self._given = Given(SOURCE, PRIORITY if config.request_priority else 0)
        num_slots = config.max_num_seqs * config.data_parallel_size // config.api_processes
        self._slots = asyncio.Semaphore(max(1, num_slots // 2))
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: set[str] = set()
        self._ticks: list[asyncio.Future[None]] = []
        self._looked_ns = 0
        self._is_stopping = False

    # ----------------------------------------------------------------------------------------------------- for routes

    def find(self, batch_id: str) -> StoredBatch | None:
        """Return a batch from its file, with later requests to cancel it."""
        if not self._files.is_id(batch_id, "batch_"):
            return None
        try:
            stored = msgspec.json.decode(self._path(batch_id).read_bytes(), type=StoredBatch)
        except (OSError, msgspec.DecodeError):
            return None
        if stored.batch.status in OPEN and self._cancel_path(batch_id).exists():
            stored.batch.status = "cancelling"
            stored.batch.cancelling_at = stored.batch.cancelling_at or int(time.time())
        return stored

    def of_source(self, source: str) -> list[Batch]:
        """Return the batches of a source, the oldest first."""
        found = [stored.batch for each in self._files.ids("batch_", source) if (stored := self.find(each)) is not None]
        return sorted(found, key=lambda batch: (batch.created_at, batch.id))

    def add(self, stored: StoredBatch) -> None:
        """Store a new batch. Raises OSError."""
        self._save(stored)
        self._looked_ns = 0

    def forget(self, batch_id: str) -> None:
        """Forget a finished batch; its files stay."""
        self._over.discard(batch_id)
        with contextlib.suppress(OSError):
            self._path(batch_id).unlink()

    def cancel(self, batch_id: str) -> None:
        """Request that a batch is cancelled. Raises OSError."""
        self._files.write(self._cancel_path(batch_id).name, b"")
        self._looked_ns = 0

    def reader_of(self, file_id: str) -> str | None:
        """Return the open batch that reads a file."""
        for batch_id in self._files.ids("batch_"):
            if batch_id not in self._over:
                stored = self.find(batch_id)
                if stored is not None and stored.batch.status in OPEN and stored.batch.input_file_id == file_id:
                    return batch_id
        return None

    # -------------------------------------------------------------------------------------------------- for the actor

    def on_tick(self, now_ns: int) -> None:
        """Look for batches to run. Called several times a second."""
        if now_ns - self._looked_ns < LOOK_INTERVAL_NS or self._is_stopping:
            return
        self._looked_ns = now_ns
        ticks, self._ticks = self._ticks, []
        for tick in ticks:
            if not tick.done():
                tick.set_result(None)
        for batch_id, running in self._running.items():
            self._look_after(batch_id, running)
        for batch_id in self._files.ids("batch_"):
            if batch_id not in self._running and batch_id not in self._over:
                self._take_over(batch_id)

    def stop(self) -> None:
        """Stop: the process ends, but the batches continue in another."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()

    # --------------------------------------------------------------------------------------------------------- inside

    def _look_after(self, batch_id: str, running: _Running) -> None:
        batch = running.stored.batch
        if running.work is not None and not running.work.done() and running.end == "completed":
            if self._cancel_path(batch_id).exists():
                running.end, batch.status = "cancelled", "cancelling"
                batch.cancelling_at = int(time.time())
                running.work.cancel()
            elif batch.expires_at <= time.time():
                running.end = "expired"
                running.work.cancel()
        if running.has_changed:
            running.has_changed = False
            with contextlib.suppress(OSError):  # the answers are in their files
                self._save(running.stored)

    def _take_over(self, batch_id: str) -> None:
        stored = self.find(batch_id)
        if stored is None:
            return
        if stored.batch.status not in OPEN:
            self._over.add(batch_id)
            return
        try:
            lock = os.open(self._files.directory / f".{batch_id}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return
        stored = self.find(batch_id) or stored  # the previous owner of the lock may have ended it since it was read
        if stored.batch.status not in OPEN:
            self._over.add(batch_id)
            os.close(lock)
            return
        running = self._running[batch_id] = _Running(stored, lock)
        task = asyncio.create_task(self._carry_out(batch_id, running))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, batch_id: str, running: _Running) -> None:
        from api.batches.ledger import BatchLedger  # only needed for batches

        batch = running.stored.batch
        ledger: BatchLedger | None = None
        try:
            ledger = await asyncio.to_thread(BatchLedger, self._files, running.stored)
            batch.status = "in_progress"
            batch.in_progress_at = batch.in_progress_at or int(time.time())
            running.work = asyncio.create_task(self._answer_all(running, ledger))
            try:
                await asyncio.wait({running.work})
            except asyncio.CancelledError:  # the process ends
                running.work.cancel()
                await asyncio.wait({running.work})
                raise
            if not running.work.cancelled() and (failure := running.work.exception()) is not None:
                raise failure
            await self._end(batch_id, running, ledger)
        except (OSError, ValueError) as error:
            self._context.log.warning("failed batch %s: %s", batch_id, error)
            batch.errors = BatchErrors(data=[BatchError(code="input_file_unreadable", message=str(error)[:300])])
            running.end = "failed"
            await self._end(batch_id, running, ledger)
        finally:
            if ledger is not None:
                ledger.close()
            del self._running[batch_id]
            os.close(running.lock)

    async def _end(self, batch_id: str, running: _Running, ledger: BatchLedger | None) -> None:
        """Write the end of a batch, with retries."""
        batch = running.stored.batch
        batch.finalizing_at = int(time.time())
        while True:
            try:
                if ledger is not None:
                    batch.output_file_id, batch.error_file_id = ledger.finish()
                    self._count(batch, ledger)
                batch.end(running.end)
                self._save(running.stored)
                break
            except OSError as error:
                self._context.log.warning("failed to write batch %s: %s", batch_id, error)
                await self._tick()
        self._over.add(batch_id)
        for path in (self._cancel_path(batch_id), self._files.directory / f".{batch_id}.lock"):
            with contextlib.suppress(OSError):
                path.unlink()

    async def _answer_all(self, running: _Running, ledger: BatchLedger) -> None:
        """Answer all requests that have no answer yet. Raises OSError if its file cannot be read."""
        from api.batches.lines import requests_in

        batch = running.stored.batch
        self._count(batch, ledger)
        asking: set[asyncio.Task[None]] = set()
        try:
            for request in requests_in(self._files.path(batch.input_file_id), self._context.config.max_body_bytes):
                await asyncio.sleep(0)  # the next line may take as long
                if request.answer_id in ledger.answer_ids:
                    continue
                await self._slots.acquire()
                task = asyncio.create_task(self._answer(request, running, ledger))
                asking.add(task)
                task.add_done_callback(lambda _: self._slots.release())
                for done in [each for each in asking if each.done()]:
                    asking.discard(done)
                    done.result()
            if asking:
                await asyncio.gather(*asking)
        finally:
            for task in asking:
                task.cancel()
            if asking:
                await asyncio.wait(asking)

    async def _answer(self, request: Request, running: _Running, ledger: BatchLedger) -> None:
        from api.batches.lines import answer_line

        assert self.ask is not None
        answer, waits = None, growing_waits()
        while request.error is None:
            answer = await self.ask(request.url, request.body, self._given)
            if answer.status not in _BUSY:
                break
            await asyncio.sleep(next(waits))
        line, is_well = answer_line(request, answer), answer is not None and answer.status == 200
        batch = running.stored.batch
        while True:
            try:
                ledger.take(line, is_well)
                break
            except RequestError as error:
                batch.errors = BatchErrors(data=[BatchError(code="no_room", message=f"waiting for room: {error.message}")])
                running.has_changed = True
                await self._tick()
        batch.errors = None
        self._count(batch, ledger)
        running.has_changed = True

    async def _tick(self) -> None:
        tick = asyncio.get_running_loop().create_future()
        self._ticks.append(tick)
        await tick

    def _count(self, batch: Batch, ledger: BatchLedger) -> None:
        batch.request_counts.completed, batch.request_counts.failed = ledger.num_well, ledger.num_failed

    def _save(self, stored: StoredBatch) -> None:
        self._files.write(self._path(stored.batch.id).name, msgspec.json.encode(stored))

    def _path(self, batch_id: str) -> Path:
        return self._files.directory / f"{batch_id}.json"

    def _cancel_path(self, batch_id: str) -> Path:
        return self._files.directory / f"{batch_id}.cancel"
