"""`tokamak top`: live view of an engine on one screen of a terminal.

Runs in its own process; `main` is called by tools/cli.py. It maps the engine's shared memory read-only and sends no requests.
Reading order: engine/observation (data), screen.py (display).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.live import Live

from engine.errors import TokamakError
from engine.observation.figures import WINDOW_NS, Figures, History, report
from engine.observation.observer import Observer
from engine.observation.snapshot import Snapshot
from engine.options.argument_parser import ArgumentParser
from engine.process.run_directory import Manifest, Run, choose_run
from tools.top.screen import render
from tools.top.work import RunTitle


def _title(run: Run, manifest: Manifest) -> RunTitle:
    config = manifest.config
    model = config.served_model_name[0] if config.served_model_name else config.model
    return RunTitle(run.run_id, model, config.url, manifest.started_at, config.kernels_text, config.device)


def _about(run: Run, manifest: Manifest, title: RunTitle) -> dict[str, Any]:
    """Return the part of the JSON document about the run."""
    return {
        "run_id": run.run_id,
        "run_dir": str(run.directory),
        "model": manifest.config.model,
        "served_model_name": list(manifest.config.served_model_name),
        "url": title.url,
        "pid": manifest.pid,
        "started_at": manifest.started_at,
        "cpu_kernels": manifest.config.cpu_kernels,
    }


def _look(observer: Observer, history: History, interval_s: float) -> tuple[Snapshot, Figures]:
    """Take a snapshot with rates; for a live engine this takes two snapshots."""
    now = observer.snapshot()
    derived = history.add(now)
    if now.is_alive:
        time.sleep(interval_s)
        now = observer.snapshot()
        derived = history.add(now)
    return now, derived


def _live(observer: Observer, title: RunTitle, interval_s: float, console: Console) -> None:
    """Redraw until q is pressed."""
    history = History()
    footer = f"q: quit   refresh: {interval_s:g} s   times: last {WINDOW_NS / 1e9:g} s, dim: since the start"
    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            now = observer.snapshot()
            derived = history.add(now)
            rates = history.generation_rates
            width, height = console.size
            view = render(title, now, derived, rates, width=width, height=height, now=time.time(), footer=footer)
            live.update(view, refresh=True)
            if _is_quit(interval_s):
                return


def _is_quit(timeout_s: float) -> bool:
    """Wait for a key; return whether it is q or the terminal is gone. Any other key redraws at once."""
    is_pressed, _, _ = select.select([sys.stdin], [], [], timeout_s)
    if not is_pressed:
        return False
    keys = os.read(sys.stdin.fileno(), 64)
    return not keys or b"q" in keys.lower()


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Read keys as they are pressed, and restore the terminal, also on SIGTERM."""
    saved = termios.tcgetattr(sys.stdin)
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)
        signal.signal(signal.SIGTERM, previous)


def _interval(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.05 to 3600 seconds, got {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="tokamak top", description="Show what an engine is doing, also when it hangs or died.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--run",
        default="",
        metavar="ID",
        help="run id or its beginning; default: the running engine, otherwise the last one that died",
    )
    which.add_argument("--run-dir", type=Path, metavar="DIR", help="run directory of the engine")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print one screen and exit")
    how.add_argument("--json", action="store_true", help="print one snapshot with derived values as JSON")
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="S", help="seconds between updates; default: %(default)g"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit code 0: shown; 1: nothing to show; 2: bad options."""
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    try:
        run = choose_run(options.run, options.run_dir)
        manifest = run.manifest()
        config = manifest.config
        observer = Observer(run, shares_experts=config.enable_expert_parallel, has_adapters=bool(config.max_loras))
    except TokamakError as error:
        print(f"tokamak top: {error}", file=sys.stderr)
        return 1
    title = _title(run, manifest)
    with contextlib.closing(observer), contextlib.suppress(KeyboardInterrupt):
        if options.json:
            now, derived = _look(observer, History(), options.interval)
            print(orjson.dumps(report(_about(run, manifest, title), now, derived), option=orjson.OPT_INDENT_2).decode())
        elif options.once or not (console.is_terminal and sys.stdin.isatty()):
            history = History()
            now, derived = _look(observer, history, options.interval)
            rates = history.generation_rates
            console.print(render(title, now, derived, rates, width=console.width, now=time.time()))
        else:
            _live(observer, title, options.interval, console)
    return 0
