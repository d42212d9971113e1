"""`tokamak ctl`: shows and controls an engine from the shell.

`ps`, `counters`, `errors`, `rank-groups` and `experts` map the engine's shared memory read-only, so they work on an engine that
runs, hangs or is dead. All others send a command to the supervisor over the control socket, which replies when it is done. Exit
codes: 0 done, 1 not done, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from engine.checkpoint.hubs.hub import HUBS
from engine.checkpoint.locate import resolve_model
from engine.errors import ControlError, TokamakError
from engine.messages import (
    AbortRequest,
    DropWeights,
    LoadAdapter,
    Order,
    Pause,
    RebalanceExperts,
    ReloadWeights,
    ResetEncoderCache,
    ResetPrefixCache,
    RestartActor,
    Resume,
    Shutdown,
    UnloadAdapter,
)
from engine.messages.control import WEIGHT_MODES
from engine.observation.observer import Observer
from engine.observation.snapshot import Actor, Row
from engine.options.argument_parser import ArgumentParser
from engine.process.control_client import DEFAULT_TIMEOUT_S, ControlClient
from engine.process.rank_groups import FIGURES, rank_group_ranks
from engine.process.run_directory import Run, choose_run
from shm.counters import Counters
from shm.experts import ExpertTable
from tools import units

if TYPE_CHECKING:
    from engine.parallel.expert_view import LayerView

_MODES_HELP = (
    "what happens to open requests: abort them, wait for them, requeue them, or keep their state (default: %(default)s)"
)
_STOP_POLL_S = 0.02


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        run = choose_run(options.run, options.run_dir)
        code: int = options.act(run, options)
        return code
    except TokamakError as error:
        print(f"tokamak ctl: error: {error}", file=sys.stderr)
        return 1


# --------------------------------------------------------------------------------------------------------------- views


def show_actors(run: Run, options: argparse.Namespace) -> int:
    """Print a line per actor."""
    observer = Observer(run)
    snapshot = observer.snapshot()
    observer.close()
    if options.json:
        _print_json([_actor_fields(actor) for actor in snapshot.actors])
        return 0
    config = run.manifest().config
    state = "runs" if snapshot.is_alive else "is dead; last state:"
    print(f"engine {run.run_id} {state}  {config.served_model_name[0]}  {config.url}  {run.directory}")
    rows = [("ACTOR", "PID", "STATE", "EPOCH", "RESTARTS", "BEAT", "STEPS", "CPU", "MEMORY")]
    for actor in snapshot.actors:
        rows.append(
            (
                actor.name,
                str(actor.pid),
                _state(actor),
                str(actor.epoch),
                str(actor.restarts),
                units.seconds(actor.heartbeat_age_s),
                units.count(actor.step),
                units.seconds(actor.cpu_seconds),
                units.size(actor.resident_bytes),
            )
        )
    _print_table(rows)
    return 0


def _state(actor: Actor) -> str:
    if actor.is_alive or actor.state == "DEAD":
        return actor.state
    return f"DEAD ({actor.state})"  # no process was left to record it


def _actor_fields(actor: Actor) -> dict[str, Any]:
    return {name: getattr(actor, name) for name in actor.__struct_fields__}


def show_counters(run: Run, options: argparse.Namespace) -> int:
    """Print a line per row of the counters file."""
    observer = Observer(run)
    rows = observer.snapshot().rows
    observer.close()
    rows = [row for row in rows if options.pattern in row.name]
    if options.json:
        counters = Counters.attach_readonly(run.run_id)
        _print_json([metric for metric in counters.snapshot()["metrics"] if options.pattern in metric["name"]])
        counters.close()
        return 0
    _print_table([(_labelled(row), *_value(row)) for row in rows])
    return 0


def _labelled(row: Row) -> str:
    labels = ", ".join(f'{name}="{value}"' for name, value in row.labels.items())
    return f"{row.name}{{{labels}}}"


def _value(row: Row) -> tuple[str, str]:
    histogram = row.histogram
    if histogram is None:
        return f"{row.value:.12g}", row.unit
    if not histogram.count:
        return "0", "observations"
    quantiles = " ".join(f"p{share}={histogram.quantile(share / 100):.4g}" for share in (50, 90, 99))
    return f"{histogram.count}", f"observations  mean={histogram.mean:.4g} {quantiles} {row.unit}"


def show_rank_groups(run: Run, options: argparse.Namespace) -> int:
    """Print a line per rank with its epoch: the ranks of a rank group exchange tensors once all have the same."""
    observer = Observer(run)
    snapshot = observer.snapshot()
    observer.close()
    size = run.manifest().config.tensor_parallel_size
    values = {(row.labels["actor"], row.name): row.value for row in snapshot.rows}
    ranks = rank_group_ranks({actor.name: _state(actor) for actor in snapshot.actors}, values, size)
    if options.json:
        _print_json(ranks)
        return 0
    rows: list[tuple[str, ...]] = [("ACTOR", "REPLICA", "RANK", "STATE", "GROUP EPOCH", "COLLECTIVES", "WAITED")]
    for rank in ranks:
        epoch, num_calls, waited_s = (float(rank[name]) for name in FIGURES)
        shown = (f"{epoch:.0f}" if epoch else "-", units.count(int(num_calls)), units.seconds(waited_s))
        rows.append((*(str(rank[name]) for name in ("actor", "replica", "rank", "state")), *shown))
    _print_table(rows)
    return 0


def show_experts(run: Run, options: argparse.Namespace) -> int:
    """Print a line per layer: how its rows are distributed over the ranks, and its most used experts."""
    from engine.parallel.expert_view import expert_view  # numpy

    config = run.manifest().config
    if not config.enable_expert_parallel:
        raise ControlError("this engine has no expert parallelism; start it with --enable-expert-parallel")
    observer = Observer(run)
    num_rebalances = sum(row.value for row in observer.snapshot().rows if row.name == "eplb_rebalances_total")
    observer.close()
    table = ExpertTable.attach(run.run_id, is_readonly=True)
    view = expert_view(table, int(num_rebalances), time.monotonic_ns())
    table.close()
    if options.json:
        _print_json(view.as_json())
        return 0
    how = "rebalancing is on (--enable-eplb)" if config.enable_eplb else "rebalancing is off"
    print(f"expert placement {view.placement_version}, {view.num_rebalances} rebalances; {how}")
    _print_layers(view.layers)
    if view.recent_layers is not None:
        print(f"\nlast {units.seconds(view.recent_s)}:")
        _print_layers(view.recent_layers)
    return 0


def _print_layers(layers: Sequence[LayerView]) -> None:
    rows = [("LAYER", "ROWS", "MAX/MEAN", "ROWS OF RANKS", "HOTTEST EXPERTS (ROWS, RANKS)")]
    for layer in layers:
        loads = " ".join(units.count(round(load)) for load in layer.rank_rows)
        hottest = [f"{hot['expert']} ({units.count(hot['rows'])}, {'+'.join(map(str, hot['ranks']))})" for hot in layer.hottest]
        row = (str(layer.layer), units.count(layer.num_rows), f"{layer.imbalance:.2f}", loads, " ".join(hottest))
        rows.append(row)
    _print_table(rows)


def show_engines(run: Run, options: argparse.Namespace) -> int:
    """Print a line per engine of a router."""
    if not run.manifest().config.is_router:
        raise ControlError(f"run {run.run_id} is an engine; only a router has engines. Choose the router with --run")
    observer = Observer(run)
    engines = observer.snapshot().engines
    observer.close()
    if options.json:
        _print_json([{name: getattr(each, name) for name in each.__struct_fields__} for each in engines])
        return 0
    rows: list[tuple[str, ...]] = [
        ("ENGINE", "STATE", "REPLICAS", "RUNNING", "WAITING", "PREFIX HITS", "ROUTED", "RESENT", "TROUBLE")
    ]
    for each in engines:
        places = " ".join(map(str, each.replicas)) or "-"
        numbers = (each.num_running, each.num_waiting, units.share(each.hit_share), each.num_routed, each.num_resubmitted)
        rows.append((each.address, each.state, places, *map(str, numbers), each.trouble))
    _print_table(rows)
    return 0


def show_errors(run: Run, options: argparse.Namespace) -> int:
    """Print a line per distinct error, the latest first."""
    observer = Observer(run)
    errors = observer.snapshot().errors
    observer.close()
    if options.json:
        _print_json([{name: getattr(error, name) for name in error.__struct_fields__} for error in errors])
        return 0
    if not errors:
        print("no errors")
    _print_table([(error.actor, f"{error.count}x", f"{units.seconds(error.last_age_s)} ago", error.text) for error in errors])
    return 0


# ------------------------------------------------------------------------------------------------------------ commands


def _giving(make_order: Callable[[argparse.Namespace], Order]) -> Callable[[Run, argparse.Namespace], int]:
    """Return an action that sends the command and prints the answer."""

    def act(run: Run, options: argparse.Namespace) -> int:
        reply = ControlClient(run).ask(make_order(options), options.timeout)
        if reply.status >= 400:
            raise ControlError(f"{reply.message} (status {reply.status})")
        print(reply.message or "done")
        return 0

    return act


def reload(run: Run, options: argparse.Namespace) -> int:
    """Load other weights. The path is one of this machine; of a router's engines, one of theirs."""
    path = options.path
    if path and not run.manifest().config.is_router:
        path = str(resolve_model(path, options.hub))
    return _giving(lambda options: ReloadWeights(path, options.mode, options.rank))(run, options)


def _adapter_order(options: argparse.Namespace) -> LoadAdapter:
    return LoadAdapter(options.name, str(options.path.expanduser().absolute()), options.replace)


def stop(run: Run, options: argparse.Namespace) -> int:
    """Ask the engine to end, and wait for it."""
    owner = run.owner()  # the file that names it goes before the rest of the run does
    _giving(lambda _: Shutdown())(run, options)
    deadline_s = time.monotonic() + options.timeout
    while owner is not None and owner.is_alive():
        if time.monotonic() > deadline_s:
            raise ControlError(f"engine {run.run_id} did not stop within {options.timeout:g} s")
        time.sleep(_STOP_POLL_S)
    return 0


# -------------------------------------------------------------------------------------------------------- arguments


FORMER_NAMES = {"rank-groups": ["gangs"]}  # until the next release


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="tokamak ctl", description="Inspect and control an engine.", allow_abbrev=False)
    _add_which(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, act: Callable[[Run, argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help, allow_abbrev=False, aliases=FORMER_NAMES.get(name, ()))
        command.set_defaults(act=act)
        _add_which(command, default=argparse.SUPPRESS)  # also after the command; values given before it are kept
        return command

    _add_looks(add)
    _add_orders(add)
    return parser


def _add_which(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the options that select the engine."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--run",
        metavar="ID",
        help="run id or its beginning; default: the running engine, otherwise the last one that died",
        **{"default": ""} | defaults,
    )
    which.add_argument("--run-dir", type=Path, metavar="DIR", help="run directory of the engine", **defaults)
    parser.add_argument(
        "--timeout",
        type=_timeout,
        metavar="S",
        help=f"maximum time to wait for a reply (default: {DEFAULT_TIMEOUT_S:g})",
        **{"default": DEFAULT_TIMEOUT_S} | defaults,
    )


def _timeout(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text}")
    return value


_Add = Callable[[str, Callable[[Run, argparse.Namespace], int], str], argparse.ArgumentParser]


def _add_looks(add: _Add) -> None:
    actors = add("ps", show_actors, "list actors with pid, state, epoch, restarts and heartbeat; also for a dead engine")
    counters = add("counters", show_counters, "list all counters, gauges and histograms; also for a dead engine")
    counters.add_argument("pattern", nargs="?", default="", help="show only names that contain this text")
    errors = add("errors", show_errors, "list distinct errors with count and time; also for a dead engine")
    rank_groups = add("rank-groups", show_rank_groups, "list rank groups by replica; also for a dead engine")
    experts = add("experts", show_experts, "show expert load per rank and the busiest experts; also for a dead engine")
    engines = add("engines", show_engines, "list the engines of a router with their load; also for a dead router")
    for look in (actors, counters, errors, rank_groups, experts, engines):
        look.add_argument("--json", action="store_true", help="as JSON")


def _add_orders(add: _Add) -> None:
    restart = add("restart", _giving(lambda options: RestartActor(options.actor)), "restart an actor")
    restart.add_argument("actor", help="name of the actor, such as worker0 or scheduler")
    pause = add("pause", _giving(lambda options: Pause(options.mode)), "stop computing; the API stays available")
    pause.add_argument("--mode", choices=WEIGHT_MODES, default="abort", help=_MODES_HELP)
    sleep = add("sleep", _giving(lambda options: Pause(options.mode, "sleep")), "pause and release the memory of the weights")
    sleep.add_argument("--mode", choices=WEIGHT_MODES, default="abort", help=_MODES_HELP)
    add("resume", _giving(lambda _: Resume()), "continue after a pause")
    add("wake", _giving(lambda _: Resume()), "load the weights again after sleep, and continue")
    add("reset-encoder-cache", _giving(lambda _: ResetEncoderCache()), "clear the cached features of images and video")
    add("reset-prefix-cache", _giving(lambda _: ResetPrefixCache()), "clear the prefix cache")
    reload_ = add("reload", reload, "load other weights while the engine runs")
    reload_.add_argument("path", nargs="?", default="", help="checkpoint; default: the current one, read again")
    reload_.add_argument("--hub", choices=HUBS, default="huggingface", help="hub of a path owner/model (default: %(default)s)")
    reload_.add_argument("--mode", choices=WEIGHT_MODES, default="requeue", help=_MODES_HELP)
    reload_.add_argument("--rank", type=int, action="append", default=[], help="reload only this rank (may be repeated)")
    clear = add("clear-weights", _giving(lambda options: DropWeights(options.mode)), "release the memory of the weights")
    clear.add_argument("--mode", choices=WEIGHT_MODES, default="abort", help=_MODES_HELP)
    load = add("load-adapter", _giving(_adapter_order), "load a LoRA adapter and serve it as a model")
    load.add_argument("name", help="model name that requests use")
    load.add_argument("path", type=Path, help="directory of the adapter")
    load.add_argument("--replace", action="store_true", help="replace the adapter that has this name")
    unload = add(
        "unload-adapter",
        _giving(lambda options: UnloadAdapter(options.name)),
        "unload an adapter once its requests have finished",
    )
    unload.add_argument("name")
    rebalance = add(
        "rebalance", _giving(lambda options: RebalanceExperts(options.force)), "rebalance experts between ranks now"
    )
    rebalance.add_argument("--force", action="store_true", help="rebalance even if little is gained")
    abort = add("abort", _giving(lambda options: AbortRequest(options.request_id)), "abort a request")
    abort.add_argument("request_id", metavar="ID")
    add("stop", stop, "stop the engine")


# ------------------------------------------------------------------------------------------------------------ printing


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print columns as wide as their widest cell; the last one is not padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip())


def _print_json(value: Any) -> None:
    print(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())
