"""`/admin`: operators' commands over HTTP, each sent to the supervisor as by `tokamak ctl`, and answered when it is done.

Runs in the api process. Only holders of `--admin-key` get here (`access.Access`).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.errors import json_response
from api.request_context import RequestContext
from api.schemas.requests import (
    AbortRequestBody,
    EmptyRequest,
    LoadAdapterRequest,
    PauseRequest,
    RebalanceRequest,
    ReloadRequest,
    UnloadAdapterRequest,
    convert,
    shown,
)
from api.schemas.responses import Sleeping
from engine.errors import CheckpointError, ControlError, RequestError
from engine.messages import (
    AbortRequest,
    DropWeights,
    ListActors,
    LoadAdapter,
    Order,
    Pause,
    RebalanceExperts,
    ReloadWeights,
    ResetEncoderCache,
    ResetPrefixCache,
    RestartActor,
    Resume,
    UnloadAdapter,
    WeightsState,
)
from engine.process.rank_groups import rank_group_ranks
from engine.process.topology import SCHEDULER, actors_of
from shm.experts import ExpertTable

T = TypeVar("T", bound=msgspec.Struct)


async def list_actors(request: Request) -> Response:
    return await _carry_out(request, ListActors())


async def list_rank_groups(request: Request) -> Response:
    """List rank groups, from shared memory."""
    context = RequestContext.of(request).services.context
    states = {actor.name: actor.state.name for actor in context.counters.actors()}
    values = {(row["labels"]["actor"], row["name"]): row.get("value", 0) for row in context.counters.snapshot()["metrics"]}
    ranks = rank_group_ranks(states, values, context.config.tensor_parallel_size)
    return json_response({"message": f"{len(ranks)} ranks", "ranks": ranks})


async def show_experts(request: Request) -> Response:
    """Show experts, from shared memory."""
    from engine.parallel.expert_view import expert_view  # imports numpy, so only when requested

    context = RequestContext.of(request).services.context
    if not context.config.enable_expert_parallel:
        text = "expert parallelism is disabled; start the server with --enable-expert-parallel"
        raise RequestError(text, status=409, code="order_refused")
    rows = context.counters.snapshot()["metrics"]
    num_rebalances = sum(row["value"] for row in rows if row["name"] == "eplb_rebalances_total")
    table = ExpertTable.attach(context.run.run_id, is_readonly=True)
    view = expert_view(table, num_rebalances, time.monotonic_ns())
    table.close()
    return json_response({"message": f"placement {view.placement_version} of experts", **view.as_json()})


async def restart_actor(request: Request) -> Response:
    await _parse(request, EmptyRequest)
    own_name = RequestContext.of(request).services.context.name
    return await _carry_out(request, RestartActor(request.path_params["name"], own_name))


async def pause(request: Request) -> Response:
    body = await _parse(request, PauseRequest)
    return await _carry_out(request, Pause(body.mode))


async def sleep(request: Request) -> Response:
    body = await _parse(request, PauseRequest)
    return await _carry_out(request, Pause(body.mode, level="sleep"))


async def sleep_by_query(request: Request) -> Response:
    """Handle vLLM's route: `mode` in the query; both levels release all memory of the weights."""
    await _parse(request, EmptyRequest)
    given = {name: value for name, value in request.query_params.items() if name == "mode"}
    body = convert(given, PauseRequest)
    level = request.query_params.get("level", "1")
    if level not in ("0", "1", "2"):
        raise RequestError(f"level: expected 0, 1 or 2, got {shown(level)}", code="invalid_value", param="level")
    return await _carry_out(request, Pause(body.mode) if level == "0" else Pause(body.mode, level="sleep"))


async def wake_up(request: Request) -> Response:
    """Handle vLLM's route. Wakes everything, regardless of `tags`."""
    await _parse(request, EmptyRequest)
    return await _carry_out(request, Resume())


async def is_sleeping(request: Request) -> Response:
    """Handle vLLM's route: return whether the weights are not in memory."""
    context = RequestContext.of(request).services.context
    schedulers = actors_of(SCHEDULER, (actor.name for actor in context.counters.actors()))
    states = [context.counters.counter("engine_state", name).value for name in schedulers]
    return json_response(Sleeping(is_sleeping=WeightsState.CLEARED in states))


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
    """Load weights from a path on the engine's machine: a directory or a GGUF file."""
    body = await _parse(request, ReloadRequest)
    is_here = not RequestContext.of(request).services.context.config.is_router  # a router's engines are on other machines
    path = await asyncio.to_thread(_checkpoint_at, body.path) if body.path and is_here else body.path
    return await _carry_out(request, ReloadWeights(path, body.mode, body.ranks))


async def load_adapter(request: Request) -> Response:
    """Load an adapter from a directory on the engine's machine. The body is vLLM's."""
    body = await _parse(request, LoadAdapterRequest, b"")
    path = Path(body.lora_path)
    if "\0" in body.lora_path or not path.is_absolute():
        raise RequestError("lora_path: expected an absolute directory path on the server's machine", param="lora_path")
    return await _carry_out(request, LoadAdapter(body.lora_name, str(path), body.load_inplace))


async def unload_adapter(request: Request) -> Response:
    """Unload an adapter. Answered when its open requests have ended."""
    body = await _parse(request, UnloadAdapterRequest, b"")
    return await _carry_out(request, UnloadAdapter(body.lora_name))


async def rebalance_experts(request: Request) -> Response:
    body = await _parse(request, RebalanceRequest)
    return await _carry_out(request, RebalanceExperts(body.force))


async def clear_weights(request: Request) -> Response:
    body = await _parse(request, PauseRequest)
    return await _carry_out(request, DropWeights(body.mode))


async def abort_request(request: Request) -> Response:
    """Abort a request by the id that its client got. Requests of other api processes are reached through the engine."""
    context = RequestContext.of(request)
    body = await _parse(request, AbortRequestBody, b"")
    if context.services.client.abort(body.request_id):
        return json_response({"message": f"request {body.request_id} was aborted"})
    return await _carry_out(request, AbortRequest(body.request_id))


def _checkpoint_at(path: str) -> str:
    from engine.checkpoint.local import local_checkpoint  # slow to import, rarely needed

    try:
        found = local_checkpoint(path)
    except CheckpointError as error:
        raise RequestError(str(error), param="path") from None
    if found is None:
        text = f"{path}: no such directory or .gguf file on this machine; for models on the hub use `tokamak ctl reload`"
        raise RequestError(text, param="path")
    return str(found)


async def _parse(request: Request, type_: type[T], default: bytes = b"{}") -> T:
    """Parse a body; it may be empty if every field has a default."""
    return await RequestContext.of(request).parse(request, type_, default)


async def _carry_out(request: Request, order: Order) -> Response:
    services = RequestContext.of(request).services
    try:
        reply = await services.control.ask_async(order, services.context.config.load_timeout_s)
    except ControlError as error:
        raise RequestError(str(error), status=503, code="no_answer") from None
    if reply.status >= 400:
        raise RequestError(reply.message, status=reply.status, code="order_refused")
    return json_response({"message": reply.message, **reply.details}, reply.status)
