"""`tokamak serve` and `tokamak router`: makes a configuration from the options, a run from the configuration, starts the
supervisor, and prints the ready lines.

Called by `tools/serving.py` and `tools/router.py`. Exit codes: 0 asked to stop, 1 failed, 2 bad options or a checkpoint that
cannot be served.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from engine.checkpoint.record import ModelRecord
from engine.config import EngineConfig
from engine.errors import MissingExtraError, OptionError, StartError, TokamakError, exit_code_of
from engine.installation import command, program, relative
from engine.keys import hide_arguments, without_secrets
from engine.messages import AdaptersRecord
from engine.options.read import read_options
from engine.options.resolve import ChooseKernels, as_built, resolve
from engine.process.run_directory import Manifest, Run, WeightsRecord
from engine.process.segments import RunSegments
from engine.process.topology import SCHEDULER, SUPERVISOR, ActorPlan, actors_of, default_plan, names_of
from engine.supervisor.line_writer import LineWriter
from engine.supervisor.log_relay import LogRelay
from engine.supervisor.port import reserve_port
from engine.supervisor.progress import Progress, terminal_progress
from engine.supervisor.reaper import create_run, remove_run
from engine.supervisor.signals import SignalCatcher
from engine.supervisor.supervisor import Supervisor
from engine.supervisor.unix_socket import unix_socket

STDOUT = 1


def main(
    arguments: list[str], embedded_models: Mapping[str, str] | None = None, choose_kernels: ChooseKernels = as_built
) -> int:
    """Serve until asked to stop; return the exit code. `embedded_models`: the models of --demo, if none is named."""
    start_s = time.monotonic()
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        options = read_options(arguments, os.environ, embedded_models)
        hide_arguments()
        if options.values["end_with"] is not None:
            from engine.supervisor.companion import end_with

            end_with(options.values["end_with"])
        config, model = resolve(options, choose_kernels=choose_kernels)
    except OptionError as error:
        if isinstance(error, MissingExtraError) and (script := os.environ.pop("TOKAMAK_SERVE_SCRIPT", "")):
            os.execve(script, [script, *arguments], {**os.environ, "TOKAMAK_ADDED_EXTRA": error.extra})
        print(f"tokamak serve: error: {error}", file=sys.stderr)
        return exit_code_of(error)
    except StartError as error:
        print(f"tokamak: error: {error}", file=sys.stderr)
        return exit_code_of(error)
    except KeyboardInterrupt:  # while a model is downloaded
        print("stopping: SIGINT", file=sys.stderr)
        return 0
    progress = terminal_progress(config.log_format)
    for note in options.notes:
        progress.note(f"note: {note}")
    return serve(config, model, default_plan(config), progress, start_s)


def route(arguments: list[str]) -> int:
    """Serve the model of other engines until asked to stop; return the exit code."""
    from engine.cluster.handover import ask_engines
    from engine.cluster.key import read_key_file
    from engine.cluster.membership import membership_of
    from engine.options.resolve_router import resolve_router
    from engine.options.router import read_router_options

    start_s = time.monotonic()
    try:
        options = read_router_options(arguments, os.environ)
        hide_arguments()
        values = options.values
        if values["end_with"] is not None:
            from engine.supervisor.companion import end_with

            end_with(values["end_with"])
        keys = read_key_file(values["cluster_key_file"]) if values["cluster_key_file"] else None
        progress = terminal_progress(values["log_format"])
        if not values["uds"]:
            _check_port(values["host"], values["port"])
        found = ask_engines(membership_of(values["engines"]), keys, lambda text: progress.note(f"note: {text}"))
        config = resolve_router(options, found)
    except OptionError as error:
        print(f"tokamak router: error: {error}", file=sys.stderr)
        return exit_code_of(error)
    except KeyboardInterrupt:  # while it waits for an engine
        print("stopping: SIGINT", file=sys.stderr)
        return 0
    for note in options.notes:
        progress.note(f"note: {note}")
    adapters = tuple(msgspec.structs.replace(each, number=index + 1, slot=index) for index, each in enumerate(found.adapters))
    return serve(config, found.model, default_plan(config), progress, start_s, AdaptersRecord(len(adapters), adapters))


def _check_port(host: str, port: int) -> None:
    """Raise OptionError for an address that cannot be had: a router may wait long for an engine before it takes it."""
    try:
        reserve_port(host, port).close()
    except StartError as error:
        raise OptionError(str(error)) from error


def serve(
    config: EngineConfig,
    model: ModelRecord,
    plan: Sequence[ActorPlan],
    progress: Progress,
    start_s: float,
    adapters: AdaptersRecord | None = None,
) -> int:
    """Run an engine of `plan`: create everything it needs, supervise it, and remove everything. Return the exit code.
    `adapters`: of the engines of a router."""
    with SignalCatcher() as signals, contextlib.ExitStack() as open_until_end:
        open_until_end.callback(progress.close)
        try:
            listener = None if config.uds else open_until_end.enter_context(reserve_port(config.host, config.port))
            port = listener.getsockname()[1] if listener else 0
            groups = [open_until_end.enter_context(reserve_port("127.0.0.1", 0)) for _ in range(config.num_groups)]
            group_ports = tuple(group.getsockname()[1] for group in groups)
            config = msgspec.structs.replace(config, port=port, group_ports=group_ports)
            run, lock = _open_run(config, model, plan, adapters or AdaptersRecord(), open_until_end)
            listener = listener or open_until_end.enter_context(unix_socket(config.uds))  # it may be in the run's directory
            experts = model.config.experts
            shape = (experts.sparse_layers, experts.num_experts) if experts is not None else ((), 0)
            segments = RunSegments.of(config, _rows_of(config, plan), *shape)
            open_until_end.callback(segments.close)
            if config.device_arena_library:
                from engine.supervisor.device_arenas import device_arenas, weight_shelves  # only for engines on devices

                sizes = config.num_ranks, config.kv_cache_bytes
                on_cards = device_arenas(config.device_arena_library, *sizes, lambda text: progress.note(f"note: {text}"))
                segments.device_arenas = open_until_end.enter_context(on_cards)
                segments.weight_shelves = open_until_end.enter_context(weight_shelves(segments.device_arenas))
            stdout = LineWriter(STDOUT, lambda num_dropped: "")
            open_until_end.callback(stdout.close)
            announce = functools.partial(_announce, config, segments, start_s, stdout)
            inherited = listener.fileno() if config.uds else -1
            relay = open_until_end.enter_context(_relayed(run, plan, config.log_format))
            return Supervisor(run, lock, config, plan, segments, progress, announce, inherited, relay).live(signals)
        except TokamakError as error:
            progress.end()
            progress.note(f"tokamak: error: {error}")
            return exit_code_of(error)


@contextlib.contextmanager
def _relayed(run: Run, plan: Sequence[ActorPlan], log_format: str) -> Iterator[LogRelay | None]:
    """Relay the actors' logs to stderr, unless stderr is a terminal or missing."""
    try:
        descriptor = -1 if sys.stderr.isatty() else sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # a process without stderr
        descriptor = -1
    relay = LogRelay(run, [actor.name for actor in plan], descriptor, log_format) if descriptor >= 0 else None
    try:
        yield relay
    finally:
        if relay is not None:
            relay.close()


def _open_run(
    config: EngineConfig,
    model: ModelRecord,
    plan: Sequence[ActorPlan],
    adapters: AdaptersRecord,
    open_until_end: contextlib.ExitStack,
) -> tuple[Run, int]:
    """Create the run's directory with its lock (a descriptor) and documents; at the end remove it with all segments of the
    run."""
    Run(config.run_id, Path(config.run_dir)).check_path()
    run, lock = create_run(config.run_id, Path(config.run_dir))
    open_until_end.callback(os.close, lock)
    open_until_end.callback(remove_run, run)
    try:
        run.write(run.model_path, model.encode())
        for scheduler in actors_of(SCHEDULER, _rows_of(config, plan)) or (SCHEDULER,):
            run.write_weights(WeightsRecord.of_start(config), scheduler)
        if config.max_loras:
            run.write_adapters(adapters)
        run.write_manifest(Manifest(without_secrets(config), tuple(plan), os.getpid(), time.time()))
    except OSError as error:
        raise StartError(f"cannot write to {run.directory}: {error.strerror}; use another --run-dir") from error
    return run, lock


def _rows_of(config: EngineConfig, plan: Sequence[ActorPlan]) -> list[str]:
    """Return the names in the actor table: of all actors, and of a router's places."""
    return [*(actor.name for actor in plan), *(names_of(SCHEDULER, config.max_engines) if config.is_router else ())]


# Examples: path and body, and the method and arguments of the openai client if it has the route
_TRIALS = {
    "generate": (
        "/v1/chat/completions",
        '"messages": [{"role": "user", "content": "What are you?"}]',
        "chat.completions.create",
        "messages=[dict(role='user', content='What are you?')]).choices[0].message.content",
    ),
    "embed": ("/v1/embeddings", '"input": "What are you?"', "embeddings.create", "input='What are you?').data[0].embedding"),
    "classify": ("/v1/rerank", '"query": "What are you?", "documents": ["A cat.", "An engine."]', "", ""),
}


def _announce(config: EngineConfig, segments: RunSegments, start_s: float, stdout: LineWriter) -> None:
    """Print the ready line and examples on stdout. Tools wait for exactly this first line."""
    seconds = time.monotonic() - start_s
    segments.counters.counter("start_seconds", SUPERVISOR).set(seconds)
    name = config.served_model_name[0]
    lines = [
        f"ready {config.url_of(config.host)}",
        f"  model {name} on {config.device}, up to {config.max_model_len} tokens, tool calls {config.tool_call_parser}, "
        f"reasoning {config.reasoning_parser}, draft tokens {config.speculative_config.method or 'none'}, "
        f"ready after {seconds:.1f} s; try:",
        *(f"    {line}" for line in _examples(config, name)),
        *_places(config),
    ]
    if config.print_client != "none":
        from engine.supervisor.clients import client_settings  # only if requested

        lines += ["", *client_settings(config.print_client, config)]
    stdout.write("\n".join([*lines, ""]))


def _examples(config: EngineConfig, name: str) -> tuple[str, ...]:
    """Return examples for curl, the openai client and the monitor; for the embedded vision model, which knows little else, its
    own image."""
    url, monitor = config.url, f"{command('top')} --run {config.run_id}"
    picture = Path(config.model).parent / "shapes.png"
    if config.encoder_depth and picture.is_file():
        options = f"--url {url}{' --api-key KEY' if config.api_key else ''} --image {relative(picture)}"
        return f'{command("chat")} {options} "How many red shapes are there?"', monitor
    key = " -H 'Authorization: Bearer KEY'" if config.api_key else ""
    task = config.pooling.task if config.pooling else "generate"
    path, content, call, part = _TRIALS[task]
    place = f"--unix-socket {config.uds} http://localhost" if config.uds else url
    curl = f"curl {place}{path}{key} -H 'Content-Type: application/json' -d '{{\"model\": \"{name}\", {content}}}'"
    if not call or config.uds or importlib.util.find_spec("openai") is None:
        return curl, monitor
    client = f"OpenAI(base_url='{url}/v1', api_key='{'KEY' if key else '-'}')"
    python = f"{program('python')} -c \"from openai import OpenAI; print({client}.{call}(model='{name}', {part})\""
    return curl, python, monitor


def _places(config: EngineConfig) -> list[str]:
    """Return the addresses at which to chat with the model, or to watch one that does not chat."""
    page = "" if config.uds else f"{config.url}/"
    if config.pooling:
        return [f"  dashboard in a browser: {page}"] if page else []
    chat = f"{command('chat')} --url {config.url}{' --api-key KEY' if config.api_key else ''}"
    return [f"  chat in a terminal: {chat}", *([f"  chat in a browser: {page}"] if page else [])]
