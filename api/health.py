"""`GET /health`, `/health/live`, `/load`, `/metrics`, `/version`: answered from the counters file, without involving other
actors.

Runs in the api process. `/health` is 503 with actor and reason if an actor is stuck or not ready, and while an operator keeps
the engine from serving (a load balancer should then use other servers); during a reload it stays 200.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from api.errors import json_response
from api.prometheus import OPEN_METRICS, OPEN_METRICS_TYPE, TEXT_TYPE
from api.request_context import RequestContext
from api.schemas.responses import Health, HealthProblem, Load, ReplicaLoad, RouterEngine, Version
from engine.installation import package_version
from engine.messages import WeightsState
from engine.process.context import ActorContext
from engine.process.topology import LINK, SCHEDULER, SUPERVISOR, actors_of, index_of, places_of
from shm.counters import ActorSnapshot, Counters, ErrorSnapshot, State

# a work loop writes its heartbeat every 100 ms; a worker after each op of a step, which may be long
MAX_STALE_NS = 4_000_000_000
_NOT_SERVING = {
    WeightsState.PAUSED: "is paused by an operator and holds new requests; resume it",
    WeightsState.CLEARED: (
        "is asleep; wake it with POST /wake_up or `tokamak ctl wake`; if the weights are lost (see the errors), reload others"
    ),
}


async def health(request: Request) -> Response:
    """Handle `GET /health`."""
    context = RequestContext.of(request).services.context
    counters = context.counters
    errors = counters.errors.entries()
    actors, halted = counters.actors(), halts(counters, errors)
    if context.config.is_router:
        actors, halted = of_router(actors, halted)
    engines = _engines(context)
    found = problems(actors, errors, halted, time.monotonic_ns(), context.config.hang_timeout_s)
    if not found and counters.counter("is_run_incomplete", SUPERVISOR).value:
        # it still serves, so load balancers should keep it; operators should see this before an actor dies
        return json_response(
            Health(status="ok", problems=[HealthProblem(SUPERVISOR, _last_error(SUPERVISOR, errors))], engines=engines)
        )
    if not found:
        return json_response(Health(status="ok", engines=engines))
    first = found[0]
    return json_response(
        Health(status="unavailable", actor=first.actor, reason=first.reason, problems=found, engines=engines), 503
    )


def _engines(context: ActorContext) -> list[RouterEngine] | UnsetType:
    """Return the engines of a router, as its link wrote them last."""
    if not context.config.is_router:
        return UNSET
    return [RouterEngine(each.address, each.state, list(each.places)) for each in context.run.engines()]


async def metrics(request: Request) -> Response:
    """Handle `GET /metrics`."""
    is_open = OPEN_METRICS in request.headers.get("accept", "").lower()
    text = await RequestContext.of(request).services.renderings.text(is_open)
    return Response(text, headers={"content-type": OPEN_METRICS_TYPE if is_open else TEXT_TYPE})


def of_router(actors: Sequence[ActorSnapshot], halted: Mapping[str, str]) -> tuple[list[ActorSnapshot], dict[str, str]]:
    """Return the actors of a router that count for its health, and why they are idle: it needs one replica of any engine, not
    all of its places."""
    others = [actor for actor in actors if actor.role != SCHEDULER]
    are_serving = any(actor.role == SCHEDULER and actor.state is State.READY and actor.name not in halted for actor in actors)
    return others, {} if are_serving else {LINK: "no engine of the list is ready; see `tokamak ctl errors`"}


def problems(
    actors: Iterable[ActorSnapshot],
    errors: Sequence[ErrorSnapshot],
    halts: Mapping[str, str],
    now_ns: int,
    hang_timeout_s: float,
) -> list[HealthProblem]:
    """Return why the engine cannot serve, one entry per actor with a problem. `errors`: from the error log, the latest first.
    `halts`: reasons of actors that are healthy but idle. An actor counts as stuck after half of the time after which it is
    restarted."""
    found = []
    stale_ns = int(hang_timeout_s * 1e9 / 2)
    for actor in actors:
        age_ns = now_ns - actor.heartbeat_ns
        if actor.state not in (State.READY, State.RUNNING):
            cause = _last_error(actor.name, errors) if actor.restarts or actor.state in (State.DEAD, State.FAILED) else ""
            reason = f"is {State(actor.state).name}, not READY or RUNNING"
            found.append(HealthProblem(actor.name, f"{reason}: {cause}" if cause else reason))
        elif age_ns > (stale_ns if actor.role == "worker" else min(stale_ns, MAX_STALE_NS)):
            found.append(HealthProblem(actor.name, f"has not responded for {age_ns / 1e9:.1f} s"))
        elif actor.name in halts:
            found.append(HealthProblem(actor.name, halts[actor.name]))
    return found


def _last_error(actor: str, errors: Sequence[ErrorSnapshot]) -> str:
    """Return the last error of an actor; the supervisor writes the cause of a death there."""
    return next((error.text for error in errors if error.actor == actor), "")


def halts(counters: Counters, errors: Sequence[ErrorSnapshot]) -> dict[str, str]:
    """Return the schedulers that dispatch nothing, with the reason that they report."""
    found = {}
    places = places_of(actor.name for actor in counters.actors())
    for name in _actors(counters, SCHEDULER):
        state = WeightsState(int(counters.counter("engine_state", name).value))
        if state in _NOT_SERVING:
            found[name] = _NOT_SERVING[state]
        elif name not in places and counters.counter("is_record_unwritten", name).value:
            found[name] = f"cannot record which weights are in use and holds new requests: {_last_error(name, errors)}"
    return found


def _actors(counters: Counters, role: str) -> tuple[str, ...]:
    return actors_of(role, (actor.name for actor in counters.actors()))


async def live(request: Request) -> Response:
    """Handle the route: this process responds."""
    return json_response(Health(status="ok"))


async def load(request: Request) -> Response:
    """Handle the route: open sequences in the api process, in the batch, and waiting; and the free capacity of each replica,
    for load balancers."""
    context = RequestContext.of(request).services.context
    counters = context.counters

    def total(gauge: str, role: str) -> int:
        return int(sum(counters.counter(gauge, name).value for name in _actors(counters, role)))

    def of_replica(replica: int, scheduler: str) -> ReplicaLoad:
        def gauge(name: str) -> int:
            return int(counters.counter(name, scheduler).value)

        return ReplicaLoad(
            replica=replica,
            running=gauge("num_requests_running"),
            waiting=gauge("num_requests_waiting"),
            tokens_to_compute=gauge("num_tokens_to_compute"),
            max_num_seqs=context.config.max_num_seqs,
            free_slots=gauge("num_free_slots"),
            max_num_batched_tokens=context.config.max_num_batched_tokens,
            kv_blocks=gauge("num_kv_blocks"),
            free_kv_blocks=gauge("num_free_kv_blocks"),
        )

    names = _actors(counters, SCHEDULER)
    if context.config.is_router:
        names = tuple(name for name in names if counters.actor(name).state is State.READY)
    replicas = [of_replica(index_of(name), name) for name in names]
    running, waiting = sum(each.running for each in replicas), sum(each.waiting for each in replicas)
    return json_response(
        Load(
            server_load=total("open_requests", "api"),
            running=running,
            waiting=waiting,
            replicas=replicas,
            engines=_engines(context),
        )
    )


async def show_version(request: Request) -> Response:
    """Handle `GET /version`."""
    return json_response(Version(package_version()))
