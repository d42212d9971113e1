"""A child process: `python -m engine.process LIFE`, a `topology.ActorLife` as JSON.

Started by the supervisor with the actor's log as stdout and stderr. It makes itself end with the supervisor, makes hangs
inspectable, attaches to the run and runs the actor. Signals: SIGTERM ends the loop (or the process at once while it still
starts), SIGUSR1 writes all stacks to the log; SIGINT and SIGHUP are left to the supervisor.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

from engine.keys import with_secrets
from engine.process.actor import Actor, run
from engine.process.context import ActorContext
from engine.process.log import formatter_for
from engine.process.nodes import bind_to_node
from engine.process.run_directory import open_run
from engine.process.topology import ActorLife
from shm._native import set_parent_death_signal
from shm.counters import State
from shm.segment import hold_segments


def main(argv: list[str]) -> int:
    """Run the actor that the argument names; return the exit code."""
    life = msgspec.json.decode(argv[0], type=ActorLife)
    die_with_parent(life.parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    lent = (life.events_fd, life.listener_fd, life.device_arena_fd, *life.weight_shelf_fds)
    for descriptor in (*life.segments.values(), *life.media_fds.values(), *lent):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)  # programs that an actor starts do not inherit them
    hold_segments(life.segments)
    this_run = open_run(Path(life.run_dir))
    manifest = this_run.manifest()
    bind_to_node(life.actor, manifest.config)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter_for(manifest.config.log_format))
    logging.basicConfig(level=manifest.config.log_level.upper(), handlers=[handler])
    fds = (life.arena_fd, life.comm_fd, life.media_fds, life.events_fd, life.listener_fd, life.device_arena_fd)
    config = with_secrets(manifest.config, os.environ)
    context = ActorContext(this_run, config, life.actor, life.epoch, *fds, life.weight_shelf_fds)
    context.row.set_state(State.ATTACHED)
    _end_on_sigterm(context)
    if config.plugins:
        from engine.plugins import load_plugins

        load_plugins(config.plugins)
    target = next(plan.target for plan in manifest.actors if plan.name == life.actor)
    return run(context, lambda context: load_actor_class(target)(context))


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to send SIGKILL when the supervisor ends, and exit now if it has ended."""
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def load_actor_class(target: str) -> Callable[[ActorContext], Actor]:
    """Return the class that `module:class` names."""
    module_name, _, class_name = target.partition(":")
    actor_class: Callable[[ActorContext], Actor] = getattr(importlib.import_module(module_name), class_name)
    return actor_class


def _end_on_sigterm(context: ActorContext) -> None:
    def end(signal_number: int, frame: FrameType | None) -> None:
        context.request_stop()
        if context.row.state in (State.ATTACHED, State.LOADING):
            raise SystemExit(0)  # no client waits for an actor that is still starting

    signal.signal(signal.SIGTERM, end)
