"""`POST /api/chat` and `/api/generate`. Runs in the api process."""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.requests import Request
from starlette.responses import Response

from api.client.generation import Generation
from api.errors import json_response
from api.ollama.conversation import is_bare, translate_bare, translate_chat, translate_generate
from api.ollama.lines import ChatLines, GenerationLines, LineStream, LineWriter
from api.ollama.requests import KeepAlive, OllamaChatRequest, OllamaGenerateRequest
from api.openai.completions import open_completion, prompts_of
from api.request_context import RequestContext, until_finished
from api.schemas import requests
from api.schemas.requests import CompletionMedia, CompletionRequest
from api.translation import Translation, open_translated

_AT_ONCE = (0, "0", "0s", "0m", "0h")  # immediate values of `keep_alive`


async def chat(request: Request) -> Response:
    """Handle `POST /api/chat`."""
    context = RequestContext.of(request)
    model = context.services.model
    body = await context.parse(request, OllamaChatRequest)
    name = model.resolve(body.model)
    if not body.messages:
        return _loaded(context, ChatLines(context, body, Translation({}, [], {})), body.keep_alive)
    translation = translate_chat(body, model)
    translation.fields["model"] = name
    writer = ChatLines(context, body, translation)
    return await _answer(request, open_translated(request, translation), writer, translation, body.is_stream)


async def generate(request: Request) -> Response:
    """Handle `POST /api/generate`."""
    context = RequestContext.of(request)
    model = context.services.model
    body = await context.parse(request, OllamaGenerateRequest)
    name = model.resolve(body.model)
    if not (body.prompt or body.suffix or body.images):
        return _loaded(context, GenerationLines(context, body, Translation({}, [], {})), body.keep_alive)
    translation = translate_bare(body) if is_bare(body) else translate_generate(body, model)
    translation.fields["model"] = name
    opening = _open_bare(request, translation) if is_bare(body) else open_translated(request, translation)
    writer = GenerationLines(context, body, translation)
    return await _answer(request, opening, writer, translation, body.is_stream)


async def _answer(
    request: Request, opening: Awaitable[Generation], writer: LineWriter, translation: Translation, is_stream: bool
) -> Response:
    generation = await opening
    if is_stream:
        return LineStream(generation, writer)
    with translation.restored():
        await until_finished(generation, request.receive)
    return json_response(await writer.whole(generation), headers=generation.headers)


async def _open_bare(request: Request, translation: Translation) -> Generation:
    with translation.restored():
        body = requests.convert(translation.fields, CompletionRequest)
        prompts = prompts_of(body.prompt, RequestContext.of(request).services.model, suffix=body.suffix)
        generation, _ = await open_completion(request, body, CompletionMedia(), prompts, None)
        return generation


def _loaded(context: RequestContext, writer: LineWriter, keep_alive: KeepAlive | None) -> Response:
    """Answer a request to load or unload the model, which clients send first: the model is loaded, and stays."""
    context.services.model.check_task("generate")
    return json_response(writer.loaded("unload" if keep_alive in _AT_ONCE else "load"))
