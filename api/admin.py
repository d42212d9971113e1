"""`/admin`: an operator's orders over HTTP, each handed to the supervisor as `tokamak ctl` does, answered when it is done.

Runs in the api process. Only holders of `--admin-key` get here (`access.Access`).
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.errors import json_response
from api.exchange import Exchange
from api.schemas.requests import AbortRequestBody, EmptyRequest, PauseRequest, RebalanceRequest, ReloadRequest
from engine.errors import ControlError, RequestError
from engine.messages import (
    AbortRequest,
    DropWeights,
    ListActors,
    Order,
    Pause,
    RebalanceExperts,
    ReloadWeights,
    ResetEncoderCache,
    ResetPrefixCache,
    RestartActor,
    Resume,
)
from engine.process.gangs import gang_ranks
from shm.experts import ExpertTable

T = TypeVar("T", bound=msgspec.Struct)


async def list_actors(request: Request) -> Response:
    return await _carry_out(request, ListActors())


async def list_gangs(request: Request) -> Response:
    """From shared memory: nobody is asked."""
    context = Exchange.of(request).services.context
    states = {actor.name: actor.state.name for actor in context.counters.actors()}
    values = {(row["labels"]["actor"], row["name"]): row.get("value", 0) for row in context.counters.snapshot()["metrics"]}
    ranks = gang_ranks(states, values, context.config.tensor_parallel_size)
    return json_response({"message": f"{len(ranks)} ranks", "ranks": ranks})


async def show_experts(request: Request) -> Response:
    """From shared memory: nobody is asked."""
    from engine.parallel.expert_view import expert_view  # numpy, which is much to load for who does not ask

    context = Exchange.of(request).services.context
    if not context.config.enable_expert_parallel:
        text = "the ranks of this engine share no experts; start it with --enable-expert-parallel"
        raise RequestError(text, status=409, code="order_refused")
    rows = context.counters.snapshot()["metrics"]
    num_rebalances = sum(row["value"] for row in rows if row["name"] == "eplb_rebalances_total")
    table = ExpertTable.attach(context.run.run_id, is_readonly=True)
    view = expert_view(table, num_rebalances)
    table.close()
    return json_response({"message": f"placement {view.placement_version} of experts", **view.as_json()})


async def restart_actor(request: Request) -> Response:
    await _parse(request, EmptyRequest)
    own_name = Exchange.of(request).services.context.name
    return await _carry_out(request, RestartActor(request.path_params["name"], own_name))


async def pause(request: Request) -> Response:
    body = await _parse(request, PauseRequest)
    return await _carry_out(request, Pause(body.mode))


async def sleep(request: Request) -> Response:
    body = await _parse(request, PauseRequest)
    return await _carry_out(request, Pause(body.mode, level="sleep"))


async def resume(request: Request) -> Response:
    await _parse(request, EmptyRequest)
    return await _carry_out(request, Resume())


async def reset_prefix_cache(request: Request) -> Response:
    await _parse(request, EmptyRequest)
    return await _carry_out(request, ResetPrefixCache())


async def reset_encoder_cache(request: Request) -> Response:
    await _parse(request, EmptyRequest)
    return await _carry_out(request, ResetEncoderCache())


async def reload_weights(request: Request) -> Response:
    body = await _parse(request, ReloadRequest)
    return await _carry_out(request, ReloadWeights(body.path, body.mode, body.ranks))


async def rebalance_experts(request: Request) -> Response:
    body = await _parse(request, RebalanceRequest)
    return await _carry_out(request, RebalanceExperts(body.force))


async def clear_weights(request: Request) -> Response:
    body = await _parse(request, PauseRequest)
    return await _carry_out(request, DropWeights(body.mode))


async def abort_request(request: Request) -> Response:
    """By the id that the client was given. Another api process's requests are reached through the engine."""
    exchange = Exchange.of(request)
    body = await _parse(request, AbortRequestBody)
    if exchange.services.client.abort(body.request_id):
        return json_response({"message": f"request {body.request_id} is aborted"})
    return await _carry_out(request, AbortRequest(body.request_id))


async def _parse(request: Request, type_: type[T]) -> T:
    """A body whose every field has a default may be empty."""
    return await Exchange.of(request).parse(request, type_, b"" if type_ is AbortRequestBody else b"{}")


async def _carry_out(request: Request, order: Order) -> Response:
    services = Exchange.of(request).services
    try:
        reply = await services.control.ask_async(order, services.context.config.load_timeout_s)
    except ControlError as error:
        raise RequestError(str(error), status=503, code="no_answer") from None
    if reply.status >= 400:
        raise RequestError(reply.message, status=reply.status, code="order_refused")
    return json_response({"message": reply.message, **reply.details}, reply.status)
