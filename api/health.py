"""`GET /health`, `/health/live`, `/load`, `/version`: what the counters file says, without asking any other actor.

Runs in the api process. `/health` is 503 with actor and reason whenever an actor is not ready or stuck, and while an operator
keeps the engine from serving (a balancer should then send what comes elsewhere); during a reload it stays 200.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from starlette.requests import Request
from starlette.responses import Response

from api.errors import json_response
from api.exchange import Exchange
from api.schemas.responses import Health, HealthProblem, Load, Version
from engine.messages import WeightsState
from engine.process.topology import SCHEDULER, role_of
from shm.counters import ActorSnapshot, Counters, State

STALE_HEARTBEAT_NS = 4_000_000_000  # a work loop beats every 100 ms, a hang is acted upon after hang_timeout_s
STALE_STEP_NS = 30_000_000_000  # a worker does not beat within a step, which may be long
_NOT_SERVING = {
    WeightsState.PAUSED: "is paused by an operator, what comes waits: resume it",
    WeightsState.CLEARED: "has no weights: they were cleared; reload them",
}


async def health(request: Request) -> Response:
    """The route."""
    counters = Exchange.of(request).services.context.counters
    found = problems(counters.actors(), engine_state(counters), time.monotonic_ns())
    if not found:
        return json_response(Health(status="ok"))
    first = found[0]
    return json_response(Health(status="unavailable", actor=first.actor, reason=first.reason, problems=found), 503)


def problems(actors: Iterable[ActorSnapshot], state: WeightsState, now_ns: int) -> list[HealthProblem]:
    """Why the engine cannot serve, one entry per actor that is not all right."""
    found = []
    for actor in actors:
        age_ns = now_ns - actor.heartbeat_ns
        if actor.state not in (State.READY, State.RUNNING):
            found.append(HealthProblem(actor.name, f"is {State(actor.state).name}, not READY or RUNNING"))
        elif age_ns > (STALE_STEP_NS if actor.role == "worker" else STALE_HEARTBEAT_NS):
            found.append(HealthProblem(actor.name, f"has not moved for {age_ns / 1e9:.1f} s"))
        elif actor.name == SCHEDULER and state in _NOT_SERVING:
            found.append(HealthProblem(actor.name, _NOT_SERVING[state]))
    return found


def engine_state(counters: Counters) -> WeightsState:
    return WeightsState(int(counters.counter("engine_state", SCHEDULER).value))


async def live(request: Request) -> Response:
    """The route: this process answers."""
    return json_response(Health(status="ok"))


async def load(request: Request) -> Response:
    """The route: samples that are open at the edge, in the batch, and waiting."""
    counters = Exchange.of(request).services.context.counters
    apis = [actor.name for actor in counters.actors() if role_of(actor.name) == "api"]
    return json_response(
        Load(
            server_load=int(sum(counters.counter("open_requests", api).value for api in apis)),
            running=int(counters.counter("num_requests_running", SCHEDULER).value),
            waiting=int(counters.counter("num_requests_waiting", SCHEDULER).value),
        )
    )


async def show_version(request: Request) -> Response:
    """The route."""
    return json_response(Version(package_version()))


def package_version() -> str:
    try:
        return version("tokamak")
    except PackageNotFoundError:
        return "0+uninstalled"  # run from a source tree
