"""Options of `tokamak router`: those of `tokamak serve` that concern HTTP, processes and the run, and its own.

What belongs to the model comes from the engines, so a router has no such option.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.config import MAX_REPLICAS
from engine.errors import OptionError
from engine.options.argument_parser import ArgumentParser
from engine.options.kinds import engines, flag, seconds, whole
from engine.options.read import ENVIRONMENT_PREFIX, add_argument, add_flags, take, take_environment, take_file
from engine.options.table import GROUPS, OPTIONS, Option, OptionValues
from engine.options.vllm import spelled
from engine.options.vllm_router_flags import ROUTER_FLAGS

_PROCESSES = (
    "api_processes",
    "tokenizer_processes",
    "restart_limit",
    "restart_window",
    "hang_timeout",
    "load_timeout",
    "stop_timeout",
)
_REQUESTS = ("data_parallel_routing", "max_waiting", "request_timeout", "request_priority", "trust_request_chat_template")
_NOT_OF_THE_RUN = ("kv_events_endpoint",)
_CLUSTER = (
    Option(
        "engines",
        engines(),
        None,
        "file with the address of each engine (its --cluster-listen), one host:port a line; or dns:NAME:PORT, all addresses "
        "that the name has",
    ),
    OPTIONS["cluster_key_file"],
    Option("max-engines", whole(1, MAX_REPLICAS), 32, "places for engines; one with several replicas takes as many"),
    Option("peer-silence", seconds(0.2, 3600), 1.0, "an engine that was silent for this long gets no new requests"),
    Option("peer-timeout", seconds(0.5, 3600), 3.0, "an engine that was silent for this long counts as dead"),
    Option(
        "drain-timeout",
        seconds(0, 86400),
        300.0,
        "time that streams get to end on an engine that left the list; then they continue on another",
    ),
    Option(
        "allow-mixed-kernels",
        flag(),
        False,
        "accept engines with other kernels, whose answers have other bytes; a stream moves between them only if it must",
    ),
)
ROUTER_GROUPS: dict[str, tuple[Option, ...]] = {
    "cluster": _CLUSTER,
    "requests": tuple(OPTIONS[key] for key in _REQUESTS),
    "processes": tuple(OPTIONS[key] for key in _PROCESSES),
    "HTTP": GROUPS["HTTP"],
    "run": tuple(option for option in GROUPS["run"] if option.key not in _NOT_OF_THE_RUN),
}
ROUTER_OPTIONS = {option.key: option for options in ROUTER_GROUPS.values() for option in options}


def read_router_options(arguments: Sequence[str], environment: Mapping[str, str]) -> OptionValues:
    """Return the option values, from the same three sources as an engine's. Raises OptionError."""
    found = OptionValues({option.key: option.default for option in ROUTER_OPTIONS.values()}, set())
    command_line = vars(_make_parser().parse_args(spelled(arguments)))
    config_path = command_line.pop("config", None) or environment.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    if config_path is not None:
        take_file(found, Path(config_path), ROUTER_OPTIONS, ROUTER_FLAGS)
    take_environment(found, environment, ROUTER_OPTIONS)
    for key, value in command_line.items():
        take(found, key, value, f"--{key.replace('_', '-')}", ROUTER_OPTIONS, ROUTER_FLAGS)
    if not found.values["engines"]:
        raise OptionError(
            "--engines is missing: a file with the address of each engine, one host:port a line, or dns:NAME:PORT"
        )
    if found.values["peer_silence"] > found.values["peer_timeout"]:
        raise OptionError(
            f"--peer-silence {found.values['peer_silence']:g} is longer than --peer-timeout "
            f"{found.values['peer_timeout']:g}; make it shorter"
        )
    return found


def _make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="tokamak router",
        usage="tokamak router --engines FILE [options]",
        description="Serve the model of many engines at one address. Needs no model and no weights.",
        epilog="Every option can also be set as TOKAMAK_<NAME> in the environment or by name in the --config file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON file with options")
    for title, options in ROUTER_GROUPS.items():
        group = parser.add_argument_group(title)
        for option in options:
            add_argument(group, option)
    add_flags(parser, "vllm-router", ROUTER_OPTIONS, ROUTER_FLAGS)
    return parser
