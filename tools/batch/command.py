"""`tokamak run-batch`: sends the requests in the lines of a file and writes the answers to another file; continues after a
kill.

Runs in its own process, as a client of a running server (`--url`) or of an engine that it starts with the options of `tokamak
serve` and ends with itself. `main` is called by tools/cli.py. Exit codes: 0 every line has an answer or an error; 1 some have
none; 2 bad arguments; 130 interrupted. The input is read twice, first to check it, then to send it; lines changed in between
are not sent.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from api.batches.lines import ROUTES, Request, answer_line, requests_in
from engine.errors import EXIT_BAD_OPTIONS, EXIT_FAILED, OptionError, TokamakError
from engine.options.argument_parser import ArgumentParser
from tokamak.asking import MAX_CONCURRENCY, Asker, InOrder, LostError
from tokamak.connection import Server
from tokamak.launched import EngineDeadError, LaunchedEngine
from tools.batch.ledger import Ledger
from tools.exits import INTERRUPTED
from tools.target import Target, error_text

DEFAULT_CONCURRENCY = 32
AHEAD = 1024  # requests sent ahead of the first one without an answer
SILENCE_LIMIT_S = 3600.0  # for servers started elsewhere
PATIENCE_S = 600.0  # without a response
SHOW_INTERVAL_S = 0.2


class Answer(NamedTuple):
    request: Request
    line: bytes


class ChangedError(TokamakError):
    """The input has changed since it was checked."""


class _Replica(msgspec.Struct):
    max_num_seqs: int


class _Load(msgspec.Struct):
    replicas: list[_Replica] = []


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    parser = _parser()
    options, of_serve = parser.parse_known_args(arguments)
    ledger, total = None, -1
    try:
        answer_ids = _check(options, of_serve)
        total = len(answer_ids)
        ledger = Ledger(options.output_file)
        ledger.go_on(requests_in(options.input_file))
        if ledger.num_answered < total:
            with _server(options, of_serve) as asker:
                _run(options, ledger, asker, answer_ids)
        _say(f"answered {total} lines, {ledger.num_failed} of them with errors: {options.output_file}")
    except OptionError as error:
        _say(f"tokamak run-batch: error: {error}")
        return EXIT_BAD_OPTIONS
    except (LostError, EngineDeadError, ChangedError, OSError) as error:
        _say(f"tokamak run-batch: error: {error}{_so_far(ledger)}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        _say(f"interrupted{_so_far(ledger)}")
        return INTERRUPTED
    finally:
        if ledger is not None:
            ledger.close(ledger.num_answered == total)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="tokamak run-batch",
        usage="tokamak run-batch -i IN -o OUT [--url URL | options of tokamak serve]",
        description=f"Answer the requests in a file in OpenAI's batch format. Supported routes: {', '.join(ROUTES)}.",
        epilog=(
            "Answers are written in the order of the requests. To continue an interrupted batch, run the same command again."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "-i",
        "--input-file",
        type=Path,
        required=True,
        metavar="IN",
        help="file with one JSON request per line: custom_id, method, url, body",
    )
    parser.add_argument(
        "-o", "--output-file", type=Path, required=True, metavar="OUT", help="file for the answers, one per line"
    )
    parser.add_argument("--url", "--base-url", default="", help="server to use; default: start an engine for this batch")
    parser.add_argument("--api-key", default="", metavar="KEY", help="API key for --url")
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help="number of concurrent requests; default: enough to fill the engine"
    )
    return parser


def _check(options: argparse.Namespace, of_serve: Sequence[str]) -> list[str]:
    """Check the input and return the `answer_id` of each request. OptionError for an error found before anything is sent."""
    if options.url and of_serve:
        raise OptionError(f"--url uses a running server, but {of_serve[0]} is an option for starting one; remove one of them")
    if options.api_key and not options.url:
        raise OptionError("--api-key is only used with --url; remove it, an engine that is started for the batch needs no key")
    if not (options.api_key.isascii() and options.api_key.isprintable()):
        raise OptionError(
            "--api-key contains characters that are not allowed in a header, such as a line break; pass only the key"
        )
    if options.concurrency is not None and not 1 <= options.concurrency <= MAX_CONCURRENCY:
        raise OptionError(f"--concurrency {options.concurrency}: expected 1 to {MAX_CONCURRENCY}")
    source, target = options.input_file, options.output_file
    if not source.is_file():
        raise OptionError(f"-i {source}: {'not a regular file' if source.exists() else 'file not found'}")
    if target.exists() and target.samefile(source):
        raise OptionError(f"-o {target} is the input file; choose another file")
    return _answer_ids(source)


def _answer_ids(source: Path) -> list[str]:
    """Return the custom_id of each request. Duplicates are an error."""
    seen: dict[bytes, int] = {}  # hashes: the ids may be long
    answer_ids = []
    try:
        for request in requests_in(source):
            answer_ids.append(request.answer_id)
            if request.custom_id is not None:
                key = hashlib.blake2b(request.custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
                first = seen.setdefault(key, request.number)
                if first != request.number:
                    where = f"lines {first} and {request.number}"
                    raise OptionError(
                        f"-i {source}: {where} have the same custom_id {request.custom_id[:100]!r}; ids must be unique"
                    )
    except OSError as error:
        raise OptionError(f"-i {source}: {error.strerror}") from error
    return answer_ids


def _unchanged(source: Path, answer_ids: Sequence[str]) -> Iterator[Request]:
    """Yield the checked requests; lines appended since are left to another run. ChangedError if the input differs now."""
    requests = requests_in(source)
    for index, answer_id in enumerate(answer_ids):
        request = next(requests, None)
        if request is None or request.answer_id != answer_id:
            what = "is missing" if request is None else f"(line {request.number}) is different"
            raise ChangedError(f"-i {source} changed while it was read: request {index + 1} of {len(answer_ids)} {what}")
        yield request


@contextlib.contextmanager
def _server(options: argparse.Namespace, of_serve: list[str]) -> Iterator[Asker]:
    """Provide the server; an engine started for this run ends with the block."""
    if options.url:
        Target.parse(options.url)  # raises an error with the cause
        yield Asker(Server(options.url, options.api_key, SILENCE_LIMIT_S), lambda: True, PATIENCE_S)
        return
    try:
        engine = LaunchedEngine({}, of_serve)
    except (TypeError, ValueError) as error:
        raise OptionError(str(error)) from None
    try:
        yield Asker(Server(engine.url, engine.key), engine.is_alive, PATIENCE_S)
    except LostError as error:
        if engine.is_alive():
            raise
        raise EngineDeadError(f"the engine stopped: {engine.cause_of_death()}") from error
    finally:
        engine.stop()


def _run(options: argparse.Namespace, ledger: Ledger, asker: Asker, answer_ids: Sequence[str]) -> None:
    first, total = ledger.num_answered, len(answer_ids)
    remaining = islice(_unchanged(options.input_file, answer_ids), first, None)

    def answer(request: Request) -> Answer:
        line = ledger.early.get(request.answer_id)
        if line is None:
            reply = None if request.error else asker.ask("POST", request.url, request.body)
            if reply is not None and reply.status in (401, 403):  # so it would answer all
                raise LostError(f"{asker.server.url} answers {reply.status}: {error_text(reply.body)}")
            line = answer_line(request, reply)
        request.body = b""  # many may wait, and bodies may hold pictures
        return Answer(request, line)

    concurrency = min(options.concurrency or _concurrency(asker), total - first)
    answers = InOrder(remaining, answer, concurrency, AHEAD, lambda index, found: ledger.take(first + index, *found))
    shown_s = time.monotonic()
    try:
        for _ in answers:
            now_s = time.monotonic()
            if sys.stderr.isatty() and now_s - shown_s > SHOW_INTERVAL_S:
                shown_s = now_s
                print(
                    f"{ledger.num_answered} of {total} answered, {ledger.num_failed} errors[K",
                    end="\r",
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        asker.cancel()


def _concurrency(asker: Asker) -> int:
    """Return the number of batch slots of a Tokamak engine, and a few more for requests in transit."""
    reply = asker.ask("GET", "/load")
    num_slots = 0
    with contextlib.suppress(msgspec.DecodeError):  # for other servers
        num_slots = sum(replica.max_num_seqs for replica in msgspec.json.decode(reply.body, type=_Load).replicas)
    return min(MAX_CONCURRENCY, num_slots + num_slots // 4 + 2) if num_slots else DEFAULT_CONCURRENCY


def _say(text: str) -> None:
    """Print to stderr; a closed stderr is no error."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _so_far(ledger: Ledger | None) -> str:
    return f"; {ledger.num_answered} lines are answered, run the same command again to continue" if ledger else ""
