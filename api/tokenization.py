"""`POST /tokenize` and `POST /detokenize`: answered by a tokenizer actor, in vLLM's format. Runs in the api process."""

from __future__ import annotations

from array import array

from starlette.requests import Request
from starlette.responses import Response

from api.errors import json_response
from api.media.parts import completion_parts
from api.openai.chat import chat_prompt
from api.openai.logprobs import token_text
from api.request_context import RequestContext
from api.schemas import requests
from api.schemas.requests import CompletionMedia, DetokenizeRequest, MediaOptions, TokenizeRequest, TokenizeTextRequest
from api.schemas.responses import Detokenization, Tokenization
from api.submission import check_vocabulary, int32
from engine.messages import Prompt, TextPrompt


async def tokenize(request: Request) -> Response:
    """Handle the route: return a text (`prompt`) or a conversation (`messages`) as token ids, including those of images and
    video."""
    context = RequestContext.of(request)
    fields = await context.fields(request)
    prompt: Prompt
    options: MediaOptions
    if "messages" in fields:
        body: TokenizeRequest = requests.convert(fields, TokenizeRequest)
        prompt, parts, options = chat_prompt(
            fields, context.services.client.max_record_bytes, context.services.context.config.default_chat_template_kwargs
        )
    else:
        body = text = requests.convert(fields, TokenizeTextRequest)
        prompt = TextPrompt(text.prompt, text.add_special_tokens is not False)
        options = behind = requests.convert(fields, CompletionMedia)
        parts = completion_parts(behind)
    context.services.model.resolve(body.model)
    media = await context.services.media.gather(parts, request, options, context.key)
    try:
        tokenized = await context.services.client.tokenize(prompt, request, bool(body.return_token_strs), media.items)
    finally:
        media.release()
    token_ids = array("i", tokenized.token_ids).tolist()
    answer = Tokenization(count=len(token_ids), max_model_len=tokenized.max_model_len, tokens=token_ids)
    if body.return_token_strs:
        answer.token_strs = [token_text(token) for token in tokenized.tokens]
    return json_response(answer)


async def detokenize(request: Request) -> Response:
    """Handle the route: return token ids as text."""
    context = RequestContext.of(request)
    body = await context.parse(request, DetokenizeRequest)
    context.services.model.resolve(body.model)
    check_vocabulary("tokens", body.tokens, context.services.model)
    text = await context.services.client.detokenize(int32(body.tokens), request)
    return json_response(Detokenization(text))
