"""What the API can do, as data for its OpenAPI document: per route its bodies, answers and errors. Mirrors `app.routes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec

from api.anthropic import answers as anthropic
from api.anthropic.requests import CountTokensRequest, MessagesRequest
from api.batches.batch import Batch, CreateBatchRequest
from api.batches.routes import BatchList
from api.files.routes import DeletedFile, FileList
from api.files.store import FileObject
from api.files.upload import UploadFields
from api.ollama import answers as ollama
from api.ollama.errors import REFUSED_ORDERS
from api.ollama.requests import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from api.responses import answers as openai_responses
from api.responses.requests import InputTokensRequest, ResponsesRequest
from api.schemas import pooling, requests, responses

JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"

_ANY = (400, 403, 431, 500)  # a malformed head, a foreign page, too long a head, an error of ours
_WITH_KEY = (*_ANY, 401)
_WITH_BODY = (*_WITH_KEY, 404, 408, 413, 429, 503)
_ORDERS = (*_ANY, 401, 404, 408, 409, 413, 503)


Shapes = Sequence[Sequence[type[msgspec.Struct]]]  # a body has one of these shapes; a shape is all of these structs together


Method = Literal["get", "post", "delete"]


class Operation(msgspec.Struct, frozen=True):
    method: Method
    path: str
    summary: str
    answer: Any  # struct of the 200 answer; None: text
    body: Shapes = ()
    event: Any = None  # struct of an event, or several, where the answer may be a stream
    error: Any = responses.ErrorBody
    errors: Sequence[int] = _ANY
    security: Literal["", "api_key", "admin_key"] = ""
    media_type: str = JSON
    stream_type: str = EVENTS
    parameters: Sequence[str] = ()  # in the path
    is_body_required: bool = True
    unavailable: Any = None  # struct of a 503 answer that is no error body
    is_refused: bool = False  # in any case
    form: Any = None  # struct of the fields of a multipart body, beside its file
    accepted: str = ""  # what a 202 answer means, where there is one


def _look(path: str, summary: str, answer: Any, media_type: str = JSON, unavailable: Any = None) -> Operation:
    return Operation("get", path, summary, answer, media_type=media_type, unavailable=unavailable)


def _model(path: str, summary: str, answer: Any, parameters: Sequence[str] = (), media_type: str = JSON) -> Operation:
    errors = (*_WITH_KEY, 404) if parameters else _WITH_KEY
    return Operation(
        "get", path, summary, answer, errors=errors, security="api_key", parameters=parameters, media_type=media_type
    )


def _work(path: str, summary: str, answer: Any, body: Shapes, event: Any = None) -> Operation:
    return Operation("post", path, summary, answer, body, event, errors=_WITH_BODY, security="api_key")


def _message(path: str, summary: str, answer: Any, body: Shapes, event: Any = None) -> Operation:
    return Operation(
        "post", path, summary, answer, body, event, anthropic.AnthropicError, (*_WITH_BODY, 409), security="api_key"
    )


def _pool(
    path: str, summary: str, answer: Any, body: type[pooling.PoolingRequest], has_conversation: bool = False
) -> Operation:
    shapes = ((body, pooling.PooledInput), (body, requests.Conversation)) if has_conversation else ((body,),)
    return Operation("post", path, summary, answer, shapes, errors=(*_WITH_BODY, 409), security="api_key")


def _ollama(
    path: str, summary: str, answer: Any, body: type[msgspec.Struct] | None = None, event: Any = None, method: Method = "post"
) -> Operation:
    return Operation(
        method,
        f"/api/{path}",
        summary,
        answer,
        ((body,),) if body else (),
        event,
        ollama.OllamaError,
        (*_WITH_BODY, 409) if body else _WITH_KEY,
        security="api_key",
        stream_type=LINES,
    )


def _refused(method: Method, path: str, parameters: Sequence[str] = ()) -> Operation:
    return Operation(
        method,
        f"/api/{path}",
        "Refused: how a model is chosen",
        None,
        error=ollama.OllamaError,
        errors=_WITH_KEY,
        security="api_key",
        parameters=parameters,
        is_refused=True,
    )


_WITHOUT_DEFAULTS = (requests.AbortRequestBody, requests.LoadAdapterRequest, requests.UnloadAdapterRequest)


def _order(
    path: str,
    summary: str,
    body: type[msgspec.Struct] = requests.EmptyRequest,
    parameters: Sequence[str] = (),
    accepted: str = "",
    folder: str = "/admin",
) -> Operation:
    return Operation(
        "post",
        f"{folder}/{path}",
        summary,
        responses.AdminAnswer,
        ((body,),),
        errors=_ORDERS,
        security="admin_key",
        parameters=parameters,
        is_body_required=body in _WITHOUT_DEFAULTS,
        accepted=accepted,
    )


OPERATIONS = (
    _look("/", "A page to chat and watch", None, "text/html"),
    Operation("get", "/page/{name}", "A file of that page", None, errors=(*_ANY, 404), media_type="*/*", parameters=("name",)),
    _model("/dashboard", "What the engine is doing", dict[str, Any]),
    _model("/dashboard/logs/{actor}", "The end of an actor's log", responses.ActorLog, ("actor",)),
    _look("/health", "Whether the engine can serve", responses.Health, unavailable=responses.Health),
    _look("/health/live", "Whether this process answers", responses.Health),
    _look("/load", "Open, running and waiting samples", responses.Load),
    _look("/version", "The version of the engine", responses.Version),
    _look("/metrics", "All counters for Prometheus", None, "text/plain"),
    _look("/openapi.json", "This document", dict[str, Any]),
    _model("/v1/models", "The served models", responses.ModelList),
    _model("/v1/models/{id}", "A served model", responses.Model, ("id",)),
    _work(
        "/v1/completions",
        "Continue prompts",
        responses.Completion,
        ((requests.CompletionRequest, requests.CompletionMedia),),
        responses.CompletionChunk,
    ),
    _work(
        "/v1/chat/completions",
        "Answer a conversation",
        responses.ChatCompletion,
        ((requests.ChatRequest, requests.Conversation),),
        responses.ChatChunk,
    ),
    _message(
        "/v1/messages",
        "Answer a conversation, in Anthropic's form",
        anthropic.AnthropicMessage,
        ((MessagesRequest, requests.DrawingFields),),
        get_args(anthropic.MessageEvent),
    ),
    _message("/v1/messages/count_tokens", "The tokens of a conversation", anthropic.TokensCount, ((CountTokensRequest,),)),
    _work(
        "/v1/responses",
        "Answer a conversation of items",
        openai_responses.OpenAIResponse,
        ((ResponsesRequest, requests.DrawingFields),),
        get_args(openai_responses.ResponseEvent),
    ),
    _work("/v1/responses/input_tokens", "The tokens of items", openai_responses.InputTokens, ((InputTokensRequest,),)),
    _work("/v1/responses/compact", "A conversation as a summary", openai_responses.CompactedResponse, ((InputTokensRequest,),)),
    _model("/v1/responses/{id}", "An earlier response", openai_responses.OpenAIResponse, ("id",)),
    _model("/v1/responses/{id}/input_items", "What a response answers", openai_responses.InputItems, ("id",)),
    Operation(
        "post",
        "/v1/responses/{id}/cancel",
        "End a response that is made in the background",
        openai_responses.OpenAIResponse,
        errors=(*_WITH_KEY, 404, 503),
        security="api_key",
        parameters=("id",),
    ),
    Operation(
        "delete",
        "/v1/responses/{id}",
        "Forget a response",
        openai_responses.DeletedResponse,
        errors=(*_WITH_KEY, 404),
        security="api_key",
        parameters=("id",),
    ),
    Operation(
        "post",
        "/v1/files",
        "Upload a file",
        FileObject,
        errors=(*_WITH_KEY, 408, 413, 507),
        security="api_key",
        form=UploadFields,
    ),
    _model("/v1/files", "Your files", FileList),
    _model("/v1/files/{id}", "A file", FileObject, ("id",)),
    _model("/v1/files/{id}/content", "A file's bytes", None, ("id",), "application/octet-stream"),
    Operation(
        "delete",
        "/v1/files/{id}",
        "Remove a file",
        DeletedFile,
        errors=(*_WITH_KEY, 404, 409),
        security="api_key",
        parameters=("id",),
    ),
    Operation(
        "post",
        "/v1/batches",
        "Have the requests in a file answered",
        Batch,
        ((CreateBatchRequest,),),
        errors=(*_WITH_BODY, 507),
        security="api_key",
    ),
    _model("/v1/batches", "Your batches", BatchList),
    _model("/v1/batches/{id}", "A batch", Batch, ("id",)),
    Operation(
        "post",
        "/v1/batches/{id}/cancel",
        "End a batch",
        Batch,
        errors=(*_WITH_KEY, 404, 409, 507),
        security="api_key",
        parameters=("id",),
    ),
    _work(
        "/v1/chat/completions/render",
        "The prompt that a conversation comes to",
        responses.RenderedPrompt,
        ((requests.ChatRequest, requests.Conversation),),
    ),
    _pool("/v1/embeddings", "Texts as vectors", pooling.EmbeddingList, pooling.EmbeddingRequest, True),
    _pool("/pooling", "What the model makes of texts: vectors or scores", pooling.PooledList, pooling.PoolRequest, True),
    _pool("/classify", "Texts by label", pooling.ClassificationList, pooling.ClassificationRequest, True),
    _pool("/v1/score", "How well texts fit each other", pooling.ScoreList, pooling.ScoreRequest),
    _pool("/v1/rerank", "Documents by how well they fit a query", pooling.Ranking, pooling.RerankRequest),
    _pool("/score", "As /v1/score", pooling.ScoreList, pooling.ScoreRequest),
    _pool("/rerank", "As /v1/rerank", pooling.Ranking, pooling.RerankRequest),
    _pool("/v2/rerank", "The same", pooling.Ranking, pooling.RerankRequest),
    _ollama("chat", "Answer a conversation, in Ollama's form", ollama.OllamaChat, OllamaChatRequest, ollama.OllamaChat),
    _ollama("generate", "Answer a prompt", ollama.OllamaGeneration, OllamaGenerateRequest, ollama.OllamaGeneration),
    _ollama("embed", "Texts as vectors of length 1", ollama.OllamaEmbeddings, OllamaEmbedRequest),
    _ollama("embeddings", "A text as a vector", ollama.OllamaEmbedding, OllamaEmbeddingsRequest),
    _ollama("show", "What a model is", ollama.OllamaShown, OllamaShowRequest),
    _ollama("tags", "The served models", ollama.OllamaModelList, method="get"),
    _ollama("ps", "The loaded model", ollama.OllamaRunningModels, method="get"),
    _ollama("version", "The version of Ollama that is spoken", ollama.OllamaVersion, method="get"),
    _ollama("pull", "Make sure that a model is here", ollama.OllamaStatus, OllamaPullRequest, ollama.OllamaStatus),
    *(_refused("post", path) for path in REFUSED_ORDERS),
    _refused("delete", "delete"),
    _refused("post", "blobs/{digest}", ("digest",)),
    _work(
        "/tokenize",
        "A text or a conversation as token ids",
        responses.Tokenization,
        ((requests.TokenizeTextRequest, requests.CompletionMedia), (requests.TokenizeRequest, requests.Conversation)),
    ),
    _work("/detokenize", "Token ids as text", responses.Detokenization, ((requests.DetokenizeRequest,),)),
    Operation("get", "/admin/actors", "The actor table", responses.AdminAnswer, errors=_ORDERS, security="admin_key"),
    Operation("get", "/admin/rank-groups", "Ranks by rank group", responses.AdminAnswer, errors=_ORDERS, security="admin_key"),
    Operation("get", "/admin/eplb", "Shared experts", responses.AdminAnswer, errors=_ORDERS, security="admin_key"),
    _order("actors/{name}/restart", "Restart an actor", parameters=("name",), accepted="It answers itself, and restarts now"),
    _order("pause", "Stop what runs, hold what comes", requests.PauseRequest),
    _order("resume", "Go on after a pause"),
    _order("sleep", "Pause and drop the weights", requests.PauseRequest),
    _order("wake", "Load the weights again and go on"),
    _order("reset_prefix_cache", "Forget cached prefixes"),
    _order("reset_encoder_cache", "Forget features of media"),
    _order("reload", "Change the weights in place", requests.ReloadRequest),
    _order("eplb/rebalance", "Have experts moved between ranks", requests.RebalanceRequest),
    _order("clear_weights", "Drop the weights", requests.PauseRequest),
    _order("clear_load_weight", "As /admin/clear_weights", requests.PauseRequest, folder=""),
    _order("update_model_weight", "As /admin/reload", requests.ReloadRequest, folder=""),
    _order("sleep", "As /admin/sleep, by vLLM's name", folder=""),
    _order("wake_up", "As /admin/wake, by vLLM's name", folder=""),
    Operation("get", "/is_sleeping", "Whether the engine sleeps", responses.Sleeping, errors=_ORDERS, security="admin_key"),
    *(
        Operation("get", path, summary, responses.AdminAnswer, errors=_ORDERS, security="admin_key")
        for path, summary in (
            ("/clear_load_weight", "Drop the weights"),
            ("/update_model_weight", "Take the weights of the same files anew"),
        )
    ),
    _order("abort", "End a request", requests.AbortRequestBody),
    _order("load_lora_adapter", "Serve a LoRA adapter", requests.LoadAdapterRequest, folder="/v1"),
    _order("unload_lora_adapter", "Let go of one", requests.UnloadAdapterRequest, folder="/v1"),
)
