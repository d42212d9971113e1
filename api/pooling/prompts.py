"""The prompts of a pooling request: its `input`, or the prompt of its `messages`. Runs in the api process."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from starlette.requests import Request

from api.openai.chat import chat_prompt
from api.openai.completions import prompts_of
from api.pooling.submission import check_count
from api.request_context import RequestContext
from api.schemas import requests
from api.schemas.pooling import PooledInput, PoolingRequest
from api.schemas.requests import invalid
from engine.messages import Prompt

T = TypeVar("T", bound=PoolingRequest)


async def read(request: Request, type_: type[T]) -> tuple[T, list[Prompt], str]:
    """Return the body, its prompts, and the field that they came from."""
    context = RequestContext.of(request)
    services = context.services
    fields = await context.fields(request)
    body = requests.convert(fields, type_)
    await asyncio.sleep(0)  # the next steps may take as long
    services.model.resolve(body.model)
    if fields.get("messages") is None:
        given = requests.convert(fields, PooledInput)
        prompts = prompts_of(given.input, services.model, given.add_special_tokens is not False, "input")
        check_count(len(prompts), "input", services.model)
        return body, prompts, "input"
    if fields.get("input") is not None:
        raise invalid("messages", "cannot be combined with input; send one of them")
    if fields.get("add_special_tokens"):
        raise invalid("add_special_tokens", "the chat template adds special tokens to messages; remove it")
    if fields.get("add_generation_prompt") is None:
        fields["add_generation_prompt"] = False  # nothing is generated
    prompt, parts, _ = chat_prompt(
        fields, services.client.max_record_bytes, services.context.config.default_chat_template_kwargs
    )
    if parts:
        raise invalid("messages", "this model accepts only text; remove images and video")
    return body, [prompt], "messages"
