"""All routes of the API, each with its description: the router and `/openapi.json` are made of this table.

To add a route, add a row. The router tries them in this order, so the most frequent ones come first.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from starlette.routing import BaseRoute, Route

from api import admin, health
from api.dashboard import dashboard, show_log
from api.endpoint import ALWAYS, LINES, Endpoint, Handler, Shapes, Type, on_first_use
from api.ollama.errors import REFUSED_COMMANDS
from api.openai.chat import create_chat_completion, render_chat_completion
from api.openai.completions import create_completion
from api.page_files import page
from api.schemas import requests, responses
from api.served_models import list_models, show_model
from api.tokenization import detokenize, tokenize

WITH_KEY = (*ALWAYS, 401)
WITH_BODY = (*WITH_KEY, 404, 408, 413, 429, 503)
COMMANDS = (*ALWAYS, 401, 404, 408, 409, 413, 503)

WITHOUT_DEFAULTS = (requests.AbortRequestBody, requests.LoadAdapterRequest, requests.UnloadAdapterRequest)


def _show(path: str, handler: Handler | str, summary: str, answer: Type, **others: Any) -> Endpoint:
    """Return a route that anyone may read."""
    return Endpoint("GET", path, handler, summary, answer, **others)


def _read(path: str, handler: Handler | str, summary: str, answer: Type, **others: Any) -> Endpoint:
    errors = (*WITH_KEY, 404) if "{" in path else WITH_KEY
    return Endpoint("GET", path, handler, summary, answer, errors=errors, security="api_key", **others)


def _post(
    path: str,
    handler: Handler | str,
    summary: str,
    answer: Type,
    body: Shapes,
    event: Type = None,
    errors: tuple[int, ...] = (),
) -> Endpoint:
    return Endpoint("POST", path, handler, summary, answer, body, event, errors=(*WITH_BODY, *errors), security="api_key")


def _change(method: Any, path: str, handler: str, summary: str, answer: Type, *errors: int, form: Type = None) -> Endpoint:
    """Return a route without a JSON body."""
    return Endpoint(method, path, handler, summary, answer, errors=(*WITH_KEY, *errors), security="api_key", form=form)


def _message(path: str, handler: str, summary: str, answer: Type, body: Shapes, event: Type = None) -> Endpoint:
    error = "api.anthropic.answers.AnthropicError"
    return Endpoint("POST", path, handler, summary, answer, body, event, error, (*WITH_BODY, 409), "api_key")


def _pool(path: str, handler: str, summary: str, answer: str, body: str, has_conversation: bool = False) -> Endpoint:
    body = f"api.schemas.pooling.{body}"
    shapes: Shapes = ((body,),)
    if has_conversation:
        shapes = ((body, "api.schemas.pooling.PooledInput"), (body, requests.Conversation))
    return _post(path, f"api.pooling.{handler}", summary, f"api.schemas.pooling.{answer}", shapes, errors=(409,))


def _ollama(path: str, handler: str, summary: str, answer: str, body: str = "", has_stream: bool = False) -> Endpoint:
    answer = f"api.ollama.answers.{answer}"
    return Endpoint(
        "POST" if body else "GET",
        f"/api/{path}",
        f"api.ollama.{handler}",
        summary,
        answer,
        ((f"api.ollama.requests.{body}",),) if body else (),
        answer if has_stream else None,
        "api.ollama.answers.OllamaError",
        (*WITH_BODY, 409) if body else WITH_KEY,
        "api_key",
        stream_type=LINES,
    )


def _refused(method: Any, path: str, *other_methods: str) -> Endpoint:
    return Endpoint(
        method,
        f"/api/{path}",
        "api.ollama.models.refuse",
        "Not supported: explains how a model is chosen",
        error="api.ollama.answers.OllamaError",
        errors=WITH_KEY,
        security="api_key",
        is_refused=True,
        other_methods=other_methods,
    )


def _look(path: str, handler: Handler, summary: str, answer: Type = responses.AdminAnswer) -> Endpoint:
    """Return a route that an operator may read."""
    return Endpoint("GET", path, handler, summary, answer, errors=COMMANDS, security="admin_key")


def _command(path: str, handler: Handler, summary: str, body: Type = requests.EmptyRequest, accepted: str = "") -> Endpoint:
    return Endpoint(
        "POST",
        path,
        handler,
        summary,
        responses.AdminAnswer,
        ((body,),),
        errors=COMMANDS,
        security="admin_key",
        is_body_required=body in WITHOUT_DEFAULTS,
        accepted=accepted,
    )


CHAT_BODY = ((requests.ChatRequest, requests.Conversation),)
RESPONSE = "api.responses.answers.OpenAIResponse"
INPUT_TOKENS_BODY = (("api.responses.requests.InputTokensRequest",),)
FILE, BATCH = "api.files.store.FileObject", "api.batches.batch.Batch"

ENDPOINTS = (
    _post(
        "/v1/completions",
        create_completion,
        "Complete prompts",
        responses.Completion,
        ((requests.CompletionRequest, requests.CompletionMedia),),
        responses.CompletionChunk,
    ),
    _post(
        "/v1/chat/completions",
        create_chat_completion,
        "Answer a conversation",
        responses.ChatCompletion,
        CHAT_BODY,
        responses.ChatChunk,
    ),
    _show("/", page, "Page for chat and monitoring", None, media_type="text/html"),
    _show("/page/{name:path}", page, "File of the page", None, media_type="*/*", errors=(*ALWAYS, 404)),
    _read("/dashboard", dashboard, "State of the engine", dict[str, Any]),
    _read("/dashboard/logs/{actor}", show_log, "Last lines of an actor's log", responses.ActorLog),
    _read("/v1/models", list_models, "List models", responses.ModelList),
    _read("/v1/models/{id:path}", show_model, "Show a model", responses.Model),
    _post(
        "/v1/chat/completions/render",
        render_chat_completion,
        "Show the prompt of a conversation",
        responses.RenderedPrompt,
        CHAT_BODY,
    ),
    # Anthropic
    _message(
        "/v1/messages",
        "api.anthropic.messages.create_message",
        "Answer a conversation (Anthropic)",
        "api.anthropic.answers.AnthropicMessage",
        (("api.anthropic.requests.MessagesRequest", requests.SamplingFields),),
        "api.anthropic.answers.MessageEvent",
    ),
    _message(
        "/v1/messages/count_tokens",
        "api.anthropic.messages.count_tokens",
        "Count tokens of a conversation",
        "api.anthropic.answers.TokensCount",
        (("api.anthropic.requests.CountTokensRequest",),),
    ),
    # OpenAI's Responses
    _post(
        "/v1/responses",
        "api.responses.routes.create_response",
        "Create a response",
        RESPONSE,
        (("api.responses.requests.ResponsesRequest", requests.SamplingFields),),
        "api.responses.answers.ResponseEvent",
    ),
    _post(
        "/v1/responses/input_tokens",
        "api.responses.routes.count_input_tokens",
        "Count tokens of an input",
        "api.responses.answers.InputTokens",
        INPUT_TOKENS_BODY,
    ),
    _post(
        "/v1/responses/compact",
        "api.responses.routes.compact_conversation",
        "Summarize a conversation",
        "api.responses.answers.CompactedResponse",
        INPUT_TOKENS_BODY,
    ),
    _read(
        "/v1/responses/{id}/input_items",
        "api.responses.routes.list_input_items",
        "List the input items of a response",
        "api.responses.answers.InputItems",
    ),
    _change(
        "POST",
        "/v1/responses/{id}/cancel",
        "api.responses.routes.cancel_response",
        "Cancel a background response",
        RESPONSE,
        404,
        503,
    ),
    _read("/v1/responses/{id}", "api.responses.routes.get_response", "Get a response", RESPONSE),
    _change(
        "DELETE",
        "/v1/responses/{id}",
        "api.responses.routes.delete_response",
        "Delete a response",
        "api.responses.answers.DeletedResponse",
        404,
    ),
    # files and batches
    _change(
        "POST",
        "/v1/files",
        "api.files.routes.create_file",
        "Upload a file",
        FILE,
        408,
        413,
        507,
        form="api.files.upload.UploadFields",
    ),
    _read("/v1/files", "api.files.routes.list_files", "List files", "api.files.routes.FileList"),
    _read("/v1/files/{id}", "api.files.routes.show_file", "A file", FILE),
    _change(
        "DELETE", "/v1/files/{id}", "api.files.routes.delete_file", "Delete a file", "api.files.routes.DeletedFile", 404, 409
    ),
    _read(
        "/v1/files/{id}/content",
        "api.files.routes.show_content",
        "Download a file",
        None,
        media_type="application/octet-stream",
    ),
    _post(
        "/v1/batches",
        "api.batches.routes.create_batch",
        "Create a batch",
        BATCH,
        (("api.batches.batch.CreateBatchRequest",),),
        errors=(507,),
    ),
    _read("/v1/batches", "api.batches.routes.list_batches", "List batches", "api.batches.routes.BatchList"),
    _read("/v1/batches/{id}", "api.batches.routes.show_batch", "A batch", BATCH),
    _change("POST", "/v1/batches/{id}/cancel", "api.batches.routes.cancel_batch", "Cancel a batch", BATCH, 404, 409, 507),
    # vectors and scores
    _pool("/v1/embeddings", "embeddings.create_embeddings", "Create embeddings", "EmbeddingList", "EmbeddingRequest", True),
    _pool("/pooling", "embeddings.pool", "Pool texts into embeddings or scores", "PooledList", "PoolRequest", True),
    _pool("/classify", "labels.classify", "Classify texts", "ClassificationList", "ClassificationRequest", True),
    _pool("/v1/score", "scores.create_scores", "Score pairs of texts", "ScoreList", "ScoreRequest"),
    _pool("/v1/rerank", "scores.rerank", "Rank documents by relevance to a query", "Ranking", "RerankRequest"),
    _pool("/score", "scores.create_scores", "As /v1/score", "ScoreList", "ScoreRequest"),
    _pool("/rerank", "scores.rerank", "As /v1/rerank", "Ranking", "RerankRequest"),
    _pool("/v2/rerank", "scores.rerank", "Alias", "Ranking", "RerankRequest"),
    # Ollama
    _ollama("chat", "routes.chat", "Answer a conversation (Ollama)", "OllamaChat", "OllamaChatRequest", True),
    _ollama("generate", "routes.generate", "Answer a prompt (Ollama)", "OllamaGeneration", "OllamaGenerateRequest", True),
    _ollama("embed", "vectors.embed", "Create normalized embeddings", "OllamaEmbeddings", "OllamaEmbedRequest"),
    _ollama("embeddings", "vectors.embed_one", "Create an embedding", "OllamaEmbedding", "OllamaEmbeddingsRequest"),
    _ollama("tags", "models.list_models", "List models", "OllamaModelList"),
    _ollama("ps", "models.list_running", "Show the loaded model", "OllamaRunningModels"),
    _ollama("show", "models.show", "Show details of a model", "OllamaShown", "OllamaShowRequest"),
    _ollama("version", "models.show_version", "Supported version of the Ollama API", "OllamaVersion"),
    _ollama("pull", "models.pull", "Check that a model is available", "OllamaStatus", "OllamaPullRequest", True),
    *(_refused("POST", name) for name in REFUSED_COMMANDS),
    _refused("DELETE", "delete"),
    _refused("POST", "blobs/{digest}", "HEAD"),
    # adapters, token ids, and the state of the server
    _command("/v1/load_lora_adapter", admin.load_adapter, "Load a LoRA adapter", requests.LoadAdapterRequest),
    _command("/v1/unload_lora_adapter", admin.unload_adapter, "Unload a LoRA adapter", requests.UnloadAdapterRequest),
    _post(
        "/tokenize",
        tokenize,
        "Tokenize a text or a conversation",
        responses.Tokenization,
        ((requests.TokenizeTextRequest, requests.CompletionMedia), (requests.TokenizeRequest, requests.Conversation)),
    ),
    _post("/detokenize", detokenize, "Detokenize token ids", responses.Detokenization, ((requests.DetokenizeRequest,),)),
    _show("/health", health.health, "Whether the engine can serve requests", responses.Health, unavailable=responses.Health),
    _show("/health/live", health.live, "Whether this process responds", responses.Health),
    _show("/load", health.load, "Numbers of open, running and waiting sequences", responses.Load),
    _show("/version", health.show_version, "Version of the engine", responses.Version),
    _show("/metrics", health.metrics, "All metrics in Prometheus format", None, media_type="text/plain"),
    _show("/openapi.json", "api.openapi.openapi", "This OpenAPI document", dict[str, Any]),
    # operators
    _look("/admin/actors", admin.list_actors, "List actors"),
    _look("/admin/rank-groups", admin.list_rank_groups, "List rank groups"),
    _look(
        "/admin/gangs", admin.list_rank_groups, "List rank groups (former name of /admin/rank-groups)"
    ),  # until the next release
    _look("/admin/eplb", admin.show_experts, "Show expert load"),
    _command(
        "/admin/actors/{name}/restart",
        admin.restart_actor,
        "Restart an actor",
        accepted="The actor itself restarts now",
    ),
    _command("/admin/pause", admin.pause, "Pause computing and hold new requests", requests.PauseRequest),
    _command("/admin/resume", admin.resume, "Continue after a pause"),
    _command("/admin/sleep", admin.sleep, "Pause and release the weights", requests.PauseRequest),
    _command("/admin/wake", admin.resume, "Load the weights again and continue"),
    _command("/sleep", admin.sleep_by_query, "Alias of /admin/sleep, as in vLLM"),
    _command("/wake_up", admin.wake_up, "Alias of /admin/wake, as in vLLM"),
    _look("/is_sleeping", admin.is_sleeping, "Whether the engine is asleep", responses.Sleeping),
    _command("/admin/reset_prefix_cache", admin.reset_prefix_cache, "Clear the prefix cache"),
    _command("/admin/reset_encoder_cache", admin.reset_encoder_cache, "Clear the cache of media features"),
    _command("/admin/reload", admin.reload_weights, "Load other weights", requests.ReloadRequest),
    _command("/admin/eplb/rebalance", admin.rebalance_experts, "Rebalance experts", requests.RebalanceRequest),
    _command("/admin/clear_weights", admin.clear_weights, "Release the weights", requests.PauseRequest),
    _look("/clear_load_weight", admin.clear_weights, "Release the weights"),
    _command("/clear_load_weight", admin.clear_weights, "Alias of /admin/clear_weights", requests.PauseRequest),
    _look("/update_model_weight", admin.reload_weights, "Load the weights from the same files again"),
    _command("/update_model_weight", admin.reload_weights, "Alias of /admin/reload", requests.ReloadRequest),
    _command("/admin/abort", admin.abort_request, "Abort a request", requests.AbortRequestBody),
)


def routes() -> list[BaseRoute]:
    """Return the table as Starlette's routes: rows with the same path and handler are one route."""
    made: list[BaseRoute] = []
    for (path, handler), rows in groupby(ENDPOINTS, lambda endpoint: (endpoint.path, endpoint.handler)):
        methods = [method for row in rows for method in (row.method, *row.other_methods)]
        made.append(Route(path, on_first_use(handler) if isinstance(handler, str) else handler, methods=methods))
    return made
