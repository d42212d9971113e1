"""`POST /v1/chat/completions`, and the prompt of a conversation.

Runs in the api process. The conversation is checked here and passed unchanged to the tokenizer, which renders it with the
template.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from api.client.generation import Generation, OpenSequence
from api.client.parsing import ToolChoice, parsing_of
from api.errors import json_response
from api.fingerprint import Fingerprints
from api.media.parts import MediaPart, take_parts
from api.model import ServedModel
from api.openai.completions import likeliest
from api.openai.custom import as_functions, require_functions
from api.openai.logprobs import LogprobsShown, chat_logprobs, logprobs_by_id, prompt_logprobs, whole_chat_logprobs
from api.openai.parts import DeltasOfParts, finish_reason_of, message_of
from api.openai.sse import ChunkWriter
from api.openai.usage import timings_of, usage_of
from api.openai.whole import WholeAnswer
from api.request_context import RequestContext, until_finished
from api.schemas import requests
from api.schemas.formats import format_of
from api.schemas.requests import ChatRequest, Conversation, NamedCustomTool, NamedToolChoice, invalid
from api.schemas.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    RenderedPrompt,
    encoder,
)
from api.schemas.unsupported import check_supported
from api.sse import EventStream
from api.submission import (
    check_max_tokens,
    check_sequences,
    check_stream,
    deadline_of,
    open_generation,
    sampling_params,
    truncation_of,
)
from engine.errors import RequestError
from engine.messages import ChatPrompt, Delta


class ChatHead(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str


async def create_chat_completion(request: Request) -> Response:
    """Handle `POST /v1/chat/completions`."""
    context = RequestContext.of(request)
    model = context.services.model
    fields = await context.fields(request)
    body = requests.convert(fields, ChatRequest)
    check_supported(fields, is_chat=True)
    head = ChatHead(f"chatcmpl-{context.request_id}", "chat.completion", int(time.time()), model.resolve(body.model))
    custom_names = as_functions(fields)
    echoed = _echo_of(body, fields)
    generation, n = await open_chat(request, fields, body)
    del fields  # while it is answered, only the encoded form of the conversation is kept
    if body.stream:
        head.object = "chat.completion.chunk"
        return EventStream(generation, ChatWriter(head, body, context.services.fingerprints, echoed, custom_names))
    await until_finished(generation, request.receive)
    fingerprint = context.services.fingerprints.of(generation.weight_version, generation.adapter)
    return await _answer(head, body, generation, n, echoed, fingerprint, custom_names)


async def open_chat(request: Request, fields: dict[str, Any], body: ChatRequest) -> tuple[Generation, int]:
    """Submit the conversation in `fields` with the options in `body`. Also return how many of the sequences are wanted."""
    context = RequestContext.of(request)
    model = context.services.model
    prompt, parts, options = chat_prompt(
        fields, context.services.client.max_record_bytes, context.services.context.config.default_chat_template_kwargs
    )
    parsing = parsing_of(
        model,
        (tool.function.name for tool in options.tools or () if tool.function),
        tool_choice_of(options),
        is_parallel=options.parallel_tool_calls is not False,
        has_strict=any(tool.function.strict for tool in options.tools or () if tool.function),
        thinking_token_budget=body.thinking_token_budget,
    )
    format_ = format_of(body)
    # a structural tag itself says where calls are
    if parsing is not None and format_ is not None and format_.kind != "structural_tag":
        parsing = msgspec.structs.replace(parsing, has_format=True)
    if (leaves_reasoning := _leaves_reasoning(body)) and body.include_reasoning is False:
        raise invalid("include_reasoning", "include_reasoning=false conflicts with reasoning inside content; remove one")
    if parsing is not None and (leaves_reasoning or body.parse_tool_calls is False):
        leaves_calls = body.parse_tool_calls is False
        parsing = msgspec.structs.replace(parsing, leaves_calls=leaves_calls, leaves_reasoning=leaves_reasoning)
    check_stream(body)
    n, best_of = check_sequences(body, 1, model)
    num_logprobs, max_tokens = _num_logprobs(body), _max_tokens(body, model)
    sampling = sampling_params(
        body,
        model,
        max_tokens=max_tokens,
        num_logprobs=max(num_logprobs, 0) if best_of > n else num_logprobs,
        num_prompt_logprobs=-1 if body.prompt_logprobs is None else body.prompt_logprobs,
    )
    deadline_ns = deadline_of(context, body)
    media = await context.services.media.gather(parts, request, options, context.key, deadline_ns)
    generation = open_generation(request, body, [prompt], sampling, best_of=best_of, media=media, parsing=parsing)
    if prompt.tools and not prompt.chat_template and not model.shows_tools:
        generation.dropped.append("tools")
    return generation, n


async def render_chat_completion(request: Request) -> Response:
    """Handle the route: return the prompt of a request of `/v1/chat/completions`, as text and token ids."""
    context = RequestContext.of(request)
    client = context.services.client
    fields = await context.fields(request)
    body = requests.convert(fields, ChatRequest)
    check_supported(fields, is_chat=True)
    model = context.services.model.resolve(body.model)
    num_kept, max_tokens = truncation_of(body), _max_tokens(body, context.services.model)
    default_kwargs = context.services.context.config.default_chat_template_kwargs
    prompt, parts, options = chat_prompt(fields, client.max_record_bytes, default_kwargs)
    media = await context.services.media.gather(parts, request, options, context.key)
    try:
        tokenized = await client.tokenize(
            prompt, request, False, media.items, num_kept, -1 if max_tokens is None else max_tokens
        )
    finally:
        media.release()
    text = await client.detokenize(tokenized.token_ids, request)
    token_ids = array("i", tokenized.token_ids).tolist()
    return json_response(RenderedPrompt(request_id=context.request_id, model=model, prompt=text, token_ids=token_ids))


def _echo_of(body: ChatRequest, fields: dict[str, Any]) -> str:
    """Return the message with which the answer must begin."""
    if not body.echo:
        return ""
    conversation = requests.convert(fields, Conversation)
    last = conversation.messages[-1]
    if last.role != "assistant" or not conversation.continue_final_message:
        raise invalid("echo", "only allowed if continue_final_message continues an assistant message")
    if not isinstance(last.content, str):
        raise invalid("echo", "only allowed if the continued message is a single text")
    return last.content


def chat_prompt(
    fields: dict[str, Any], max_bytes: int, default_kwargs: dict[str, Any]
) -> tuple[ChatPrompt, list[MediaPart], Conversation]:
    """Return the conversation of a body, with its images and video; messages are passed as the client sent them, without the
    media bytes, in at most `max_bytes`. `default_kwargs`: variables of the template that the body does not set."""
    as_functions(fields)
    body = requests.convert(fields, Conversation)
    require_functions(body)
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid(
            "continue_final_message", "conflicts with add_generation_prompt, which starts a new message; remove one of them"
        )
    for index, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            param = f"messages[{index}].content"
            raise RequestError(f"{param} is required", code="missing_required_parameter", param=param)
    tools = fields.get("tools") if body.tool_choice != "none" else None
    kwargs = default_kwargs | thinking_variables(body.reasoning_effort) | (body.chat_template_kwargs or {})
    parts = take_parts(fields["messages"])
    prompt = ChatPrompt(
        messages=requests.dump_list(fields["messages"], "messages", max_bytes),
        tools=requests.dump_list(tools, "tools", max_bytes) if tools else b"",
        documents=requests.dump_list(body.documents, "documents", max_bytes) if body.documents else b"",
        add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template or "",
        chat_template_kwargs=requests.dump(kwargs, "chat_template_kwargs") if kwargs else b"",
    )
    return prompt, parts, body


def tool_choice_of(body: Conversation) -> ToolChoice:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return ToolChoice(choice or "auto")
    if isinstance(choice, NamedToolChoice):
        return ToolChoice("named", (choice.function.name,))
    if isinstance(choice, NamedCustomTool):
        return ToolChoice("named", (choice.custom.name,))
    return ToolChoice(choice.allowed_tools.mode, [tool.function.name for tool in choice.allowed_tools.tools if tool.function])


def thinking_variables(effort: str | None) -> dict[str, Any]:
    """Return template variables for the reasoning effort: for templates with a switch (under either name), and for those with
    degrees."""
    if effort is None:
        return {}
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


def _leaves_reasoning(body: ChatRequest) -> bool:
    """Return whether reasoning stays in the content, by SGLang's field or llama.cpp's."""
    if body.separate_reasoning and body.reasoning_format == "none":
        raise invalid("reasoning_format", '"none" conflicts with separate_reasoning true; remove one of them')
    return body.separate_reasoning is False or body.reasoning_format == "none"


def _max_tokens(body: ChatRequest, model: ServedModel) -> int | None:
    """Return the limit; None: up to the model's limit."""
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None:
        check_max_tokens(param, max_tokens, body, model)
    return max_tokens


def _num_logprobs(body: ChatRequest) -> int:
    if body.logprobs:
        return body.top_logprobs or 0
    for param in ("logprob_token_ids", "logprobs_by_id", "top_logprobs"):
        if getattr(body, param):
            raise invalid(param, "only allowed if logprobs is true")
    return -1


class ChatWriter(ChunkWriter):
    """The first chunk of each choice has the role."""

    def __init__(
        self,
        head: ChatHead,
        body: ChatRequest,
        fingerprints: Fingerprints,
        echoed: str = "",
        custom_names: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(head, body, fingerprints)
        self._echoed = echoed
        self._shown = LogprobsShown.of(body, body.top_logprobs or 0)
        self._body = body
        self._custom_names = custom_names
        self._begun: dict[int, DeltasOfParts] = {}

    def choices(self, index: int, sequence: OpenSequence, delta: Delta) -> list[ChatChunkChoice]:
        """Return a chunk for each part; the first one has the data of the tokens, the last one the finish reason."""
        is_first = index not in self._begun
        of_parts = self._begun.get(index) or DeltasOfParts(self._body.include_reasoning is not False, self._custom_names)
        deltas = list(of_parts.take(delta.parts, bool(delta.finish_reason)))
        if not deltas:
            deltas = [ChatDelta(content=delta.text) if delta.text else ChatDelta()]
            shows_tokens = self._body.return_token_ids or (self._body.logprobs and delta.logprobs)
            if not (delta.text or is_first or delta.finish_reason or shows_tokens):
                return []  # everything is held back until a call is complete
        choices = [ChatChunkChoice(index=index, delta=piece) for piece in deltas]
        choices[-1].finish_reason, choices[-1].stop_reason = finish_reason_of(sequence, delta), delta.stop_reason
        choice = choices[0]
        if is_first:
            self._begun[index] = of_parts
            choice.delta.role = "assistant"
            # in any case, even if parts of other kinds have arrived
            choice.delta.content = self._echoed + (choice.delta.content or "")
        if self._body.logprobs and delta.logprobs:
            choice.logprobs = ChatLogprobs(chat_logprobs(delta.logprobs, self._shown))
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
            if is_first:
                choice.prompt_token_ids = sequence.prompt_token_ids
        return choices


async def _answer(
    head: ChatHead,
    body: ChatRequest,
    generation: Generation,
    n: int,
    echoed: str = "",
    fingerprint: str = "",
    custom_names: frozenset[str] = frozenset(),
) -> Response:
    chosen = [generation.sequences[index] for index in likeliest(generation, 0, n)]
    choices = []
    for index, sequence in enumerate(chosen):
        choices.append(encoder.encode(await _choice(index, sequence, body, echoed, custom_names)))
        await asyncio.sleep(0)
    answer = ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[],
        usage=usage_of(generation),
        weight_version=generation.weight_version,
        system_fingerprint=fingerprint,
        timings=timings_of(generation) if body.timings else UNSET,
    )
    if body.prompt_logprobs is not None:
        answer.prompt_logprobs = await prompt_logprobs(generation.sequences[0].prompt_logprobs, body.prompt_logprobs)
    return WholeAnswer(answer, choices, generation.headers)


async def _choice(
    index: int, sequence: OpenSequence, body: ChatRequest, echoed: str, custom_names: frozenset[str]
) -> ChatChoice:
    delta = sequence.take()
    shown = LogprobsShown.of(body, body.top_logprobs or 0)
    choice = ChatChoice(
        index=index,
        message=message_of(delta, body.include_reasoning is not False, echoed, custom_names),
        logprobs=await whole_chat_logprobs(delta.logprobs, shown) if body.logprobs and not body.logprobs_by_id else None,
        finish_reason=finish_reason_of(sequence, delta),
        stop_reason=delta.stop_reason,
    )
    if body.logprobs_by_id:
        choice.logprobs_by_id = await logprobs_by_id(delta.logprobs, shown.num_top)
    if body.return_token_ids:
        choice.token_ids = delta.token_ids
        choice.prompt_token_ids = sequence.prompt_token_ids
    return choice
