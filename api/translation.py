"""A chat request translated from another protocol's body, and errors with the field names of that protocol.

Used by the folders of these protocols in the api process, so that they support everything that chat supports, with the same
code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.requests import Request

from api.client.generation import Generation, OpenSequence
from api.openai.chat import chat_prompt, open_chat
from api.request_context import RequestContext
from api.schemas import requests
from api.schemas.requests import ChatRequest, Conversation, SamplingFields, TokenizeRequest, invalid
from engine.errors import RequestError

_MESSAGE = re.compile(r"messages\[(\d+)\]")
_HEAD = re.compile(r"[A-Za-z_]+")
_WITHOUT_EFFECT = {"user", "stream_options"}
_OF_CHATS = {*ChatRequest.__struct_fields__, *Conversation.__struct_fields__} - _WITHOUT_EFFECT


class Translation(msgspec.Struct):
    fields: dict[str, Any]  # of a chat request
    places: list[str]  # place of each message in the client's body
    names: Mapping[str, str]  # the client's names of fields, where they differ from chat's

    def add_ours(self, fields: dict[str, Any], type_: type[msgspec.Struct]) -> None:
        """Add fields of chat requests that a body of `type_` has in addition to its own: sampling parameters are used as in
        chat; other fields that would have an effect there raise RequestError, because they have none here."""
        own = type_.__struct_fields__
        given = {name: fields[name] for name in fields if name in _OF_CHATS and name not in own and fields[name] is not None}
        for name in given:
            if name in self.fields or name not in SamplingFields.__struct_fields__:
                own_name = self.names.get(name)
                raise invalid(
                    name,
                    f"send {own_name}" if own_name else "only supported at /v1/chat/completions; remove it",
                )
        self.fields |= given
        self.names = {name: own_name for name, own_name in self.names.items() if name not in given}

    def param(self, param: str) -> str:
        """Return the client's name of a field in the chat request."""
        message = _MESSAGE.match(param)
        if message is not None:
            return self.places[int(message[1])]
        head = _HEAD.match(param)
        if head is None:
            return param
        return self.names.get(head[0], head[0]) + param[head.end() :].replace(".function", "")

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Translate errors raised within to the client's field names."""
        try:
            yield
        except RequestError as error:
            raise self.restore(error) from None

    def restore(self, error: RequestError) -> RequestError:
        if not error.param or self.param(error.param) == error.param:
            return error
        param = self.param(error.param)
        return RequestError(
            error.message.replace(error.param, param, 1),
            status=error.status,
            code=error.code,
            param=param,
            retry_after_s=error.retry_after_s,
        )


def cut_off(sequence: OpenSequence) -> RequestError | None:
    """Return the error for an answer that did not end by itself, for protocols without such a reason."""
    if sequence.finish_reason == "timeout":
        return RequestError("the request timed out before its answer was complete", status=408, code="timeout")
    if sequence.finish_reason == "abort":
        return RequestError("an operator aborted the request", status=409, code="aborted")
    return None


async def open_translated(request: Request, translation: Translation) -> Generation:
    """Submit the request to the engine: one sequence."""
    with translation.restored():
        generation, _ = await open_chat(request, translation.fields, requests.convert(translation.fields, ChatRequest))
        return generation


async def count_translated(request: Request, translation: Translation) -> int:
    """Return the number of tokens of the prompt, including those of images."""
    context = RequestContext.of(request)
    services = context.services
    with translation.restored():
        services.model.resolve(requests.convert(translation.fields, TokenizeRequest).model)
        prompt, parts, options = chat_prompt(
            translation.fields, services.client.max_record_bytes, services.context.config.default_chat_template_kwargs
        )
        media = await services.media.gather(parts, request, options, context.key)
        try:
            tokenized = await services.client.tokenize(prompt, request, media=media.items)
        finally:
            media.release()
    return len(tokenized.token_ids) // 4
