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
        "Not supported: explains how a model is chosen",
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
    _look("/", "Page for chat and monitoring", None, "text/html"),
    Operation("get", "/page/{name}", "File of the page", None, errors=(*_ANY, 404), media_type="*/*", parameters=("name",)),
    _model("/dashboard", "State of the engine", dict[str, Any]),
    _model("/dashboard/logs/{actor}", "Last lines of an actor's log", responses.ActorLog, ("actor",)),
    _look("/health", "Whether the engine can serve requests", responses.Health, unavailable=responses.Health),
    _look("/health/live", "Whether this process responds", responses.Health),
    _look("/load", "Numbers of open, running and waiting sequences", responses.Load),
    _look("/version", "Version of the engine", responses.Version),
    _look("/metrics", "All metrics in Prometheus format", None, "text/plain"),
    _look("/openapi.json", "This OpenAPI document", dict[str, Any]),
    _model("/v1/models", "List models", responses.ModelList),
    _model("/v1/models/{id}", "Show a model", responses.Model, ("id",)),
    _work(
        "/v1/completions",
        "Complete prompts",
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
        "Answer a conversation (Anthropic)",
        anthropic.AnthropicMessage,
        ((MessagesRequest, requests.DrawingFields),),
        get_args(anthropic.MessageEvent),
    ),
    _message("/v1/messages/count_tokens", "Count tokens of a conversation", anthropic.TokensCount, ((CountTokensRequest,),)),
    _work(
        "/v1/responses",
        "Create a response",
        openai_responses.OpenAIResponse,
        ((ResponsesRequest, requests.DrawingFields),),
        get_args(openai_responses.ResponseEvent),
    ),
    _work(
        "/v1/responses/input_tokens",
        "Count tokens of an input",
        openai_responses.InputTokens,
        ((InputTokensRequest,),),
    ),
    _work("/v1/responses/compact", "Summarize a conversation", openai_responses.CompactedResponse, ((InputTokensRequest,),)),
    _model("/v1/responses/{id}", "Get a response", openai_responses.OpenAIResponse, ("id",)),
    _model("/v1/responses/{id}/input_items", "List the input items of a response", openai_responses.InputItems, ("id",)),
    Operation(
        "post",
        "/v1/responses/{id}/cancel",
        "Cancel a background response",
        openai_responses.OpenAIResponse,
        errors=(*_WITH_KEY, 404, 503),
        security="api_key",
        parameters=("id",),
    ),
    Operation(
        "delete",
        "/v1/responses/{id}",
        "Delete a response",
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
    _model("/v1/files", "List files", FileList),
    _model("/v1/files/{id}", "A file", FileObject, ("id",)),
    _model("/v1/files/{id}/content", "Download a file", None, ("id",), "application/octet-stream"),
    Operation(
        "delete",
        "/v1/files/{id}",
        "Delete a file",
        DeletedFile,
        errors=(*_WITH_KEY, 404, 409),
        security="api_key",
        parameters=("id",),
    ),
    Operation(
        "post",
        "/v1/batches",
        "Create a batch",
        Batch,
        ((CreateBatchRequest,),),
        errors=(*_WITH_BODY, 507),
        security="api_key",
    ),
    _model("/v1/batches", "List batches", BatchList),
    _model("/v1/batches/{id}", "A batch", Batch, ("id",)),
    Operation(
        "post",
        "/v1/batches/{id}/cancel",
        "Cancel a batch",
        Batch,
        errors=(*_WITH_KEY, 404, 409, 507),
        security="api_key",
        parameters=("id",),
    ),
    _work(
        "/v1/chat/completions/render",
        "Show the prompt of a conversation",
        responses.RenderedPrompt,
        ((requests.ChatRequest, requests.Conversation),),
    ),
    _pool("/v1/embeddings", "Create embeddings", pooling.EmbeddingList, pooling.EmbeddingRequest, True),
    _pool("/pooling", "Pool texts into embeddings or scores", pooling.PooledList, pooling.PoolRequest, True),
    _pool("/classify", "Classify texts", pooling.ClassificationList, pooling.ClassificationRequest, True),
    _pool("/v1/score", "Score pairs of texts", pooling.ScoreList, pooling.ScoreRequest),
    _pool("/v1/rerank", "Rank documents by relevance to a query", pooling.Ranking, pooling.RerankRequest),
    _pool("/score", "As /v1/score", pooling.ScoreList, pooling.ScoreRequest),
    _pool("/rerank", "As /v1/rerank", pooling.Ranking, pooling.RerankRequest),
    _pool("/v2/rerank", "Alias", pooling.Ranking, pooling.RerankRequest),
    _ollama("chat", "Answer a conversation (Ollama)", ollama.OllamaChat, OllamaChatRequest, ollama.OllamaChat),
    _ollama("generate", "Answer a prompt (Ollama)", ollama.OllamaGeneration, OllamaGenerateRequest, ollama.OllamaGeneration),
    _ollama("embed", "Create normalized embeddings", ollama.OllamaEmbeddings, OllamaEmbedRequest),
    _ollama("embeddings", "Create an embedding", ollama.OllamaEmbedding, OllamaEmbeddingsRequest),
    _ollama("show", "Show details of a model", ollama.OllamaShown, OllamaShowRequest),
    _ollama("tags", "List models", ollama.OllamaModelList, method="get"),
    _ollama("ps", "Show the loaded model", ollama.OllamaRunningModels, method="get"),
    _ollama("version", "Supported version of the Ollama API", ollama.OllamaVersion, method="get"),
    _ollama("pull", "Check that a model is available", ollama.OllamaStatus, OllamaPullRequest, ollama.OllamaStatus),
    *(_refused("post", path) for path in REFUSED_ORDERS),
    _refused("delete", "delete"),
    _refused("post", "blobs/{digest}", ("digest",)),
    _work(
        "/tokenize",
        "Tokenize a text or a conversation",
        responses.Tokenization,
        ((requests.TokenizeTextRequest, requests.CompletionMedia), (requests.TokenizeRequest, requests.Conversation)),
    ),
    _work("/detokenize", "Detokenize token ids", responses.Detokenization, ((requests.DetokenizeRequest,),)),
    Operation("get", "/admin/actors", "List actors", responses.AdminAnswer, errors=_ORDERS, security="admin_key"),
    Operation("get", "/admin/rank-groups", "List rank groups", responses.AdminAnswer, errors=_ORDERS, security="admin_key"),
    Operation(
        "get",
        "/admin/gangs",  # the former name, until the next release
        "List rank groups (former name of /admin/rank-groups)",
        responses.AdminAnswer,
        errors=_ORDERS,
        security="admin_key",
    ),
    Operation("get", "/admin/eplb", "Show expert load", responses.AdminAnswer, errors=_ORDERS, security="admin_key"),
    _order(
        "actors/{name}/restart",
        "Restart an actor",
        parameters=("name",),
        accepted="The actor itself restarts now",
    ),
    _order("pause", "Pause computing and hold new requests", requests.PauseRequest),
    _order("resume", "Continue after a pause"),
    _order("sleep", "Pause and release the weights", requests.PauseRequest),
    _order("wake", "Load the weights again and continue"),
    _order("reset_prefix_cache", "Clear the prefix cache"),
    _order("reset_encoder_cache", "Clear the cache of media features"),
    _order("reload", "Load other weights", requests.ReloadRequest),
    _order("eplb/rebalance", "Rebalance experts", requests.RebalanceRequest),
    _order("clear_weights", "Release the weights", requests.PauseRequest),
    _order("clear_load_weight", "Alias of /admin/clear_weights", requests.PauseRequest, folder=""),
    _order("update_model_weight", "Alias of /admin/reload", requests.ReloadRequest, folder=""),
    _order("sleep", "Alias of /admin/sleep, as in vLLM", folder=""),
    _order("wake_up", "Alias of /admin/wake, as in vLLM", folder=""),
    Operation("get", "/is_sleeping", "Whether the engine is asleep", responses.Sleeping, errors=_ORDERS, security="admin_key"),
    *(
        Operation("get", path, summary, responses.AdminAnswer, errors=_ORDERS, security="admin_key")
        for path, summary in (
            ("/clear_load_weight", "Release the weights"),
            ("/update_model_weight", "Load the weights from the same files again"),
        )
    ),
    _order("abort", "Abort a request", requests.AbortRequestBody),
    _order("load_lora_adapter", "Load a LoRA adapter", requests.LoadAdapterRequest, folder="/v1"),
    _order("unload_lora_adapter", "Unload a LoRA adapter", requests.UnloadAdapterRequest, folder="/v1"),
)
