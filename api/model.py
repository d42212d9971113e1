"""The served model in the api process: names, limits, and the sampling defaults of its authors.

Created once by the api actor at its start; route handlers read it.
"""

from __future__ import annotations

import time

import msgspec

from api.schemas import responses
from api.schemas.requests import shown
from engine.checkpoint.model_config import GENERATION_CONFIG, ModelConfig
from engine.checkpoint.record import ModelRecord
from engine.checkpoint.sampling_defaults import SamplingDefaults
from engine.config import EngineConfig, PoolingConfig
from engine.errors import CheckpointError, RequestError
from engine.messages import Adapter, AdapterUse
from engine.parsers.choice import JSON
from engine.process.adapters import AdapterRegistry

LATEST = ":latest"  # tag that Ollama's clients append to a name
_TASKS = {
    "generate": (
        "text generation, /v1/chat/completions and /v1/completions; start the server with --runner pooling for embeddings"
    ),
    "embed": "embeddings, /v1/embeddings, /v1/rerank and /v1/score",
    "classify": "scores of texts or pairs of texts, /classify, /v1/rerank and /v1/score",
}


class ServedModel(msgspec.Struct, frozen=True):
    names: tuple[str, ...]  # answers have the first one
    path: str
    max_model_len: int
    vocab_size: int
    shape: ModelConfig
    max_sequences: int  # of one HTTP request: all of them wait at first, and more are never accepted
    request_timeout_s: float  # 0: none
    max_logprobs: int  # per position
    defaults: SamplingDefaults
    tool_call_parser: str
    reasoning_parser: str
    finds_calls: bool  # if the request leaves it to the model to make one
    shows_tools: bool  # the chat template shows tools to the model
    media_kinds: tuple[str, ...]  # "image", "video"; none for a model that is served only for text
    modalities: tuple[str, ...]  # allowed in a request: without those that --limit-mm-per-prompt excludes
    pooling: PoolingConfig | None = None  # None: it generates
    adapters: AdapterRegistry | None = None  # None: adapters are disabled
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    @staticmethod
    def of(config: EngineConfig, model: ModelRecord, adapters: AdapterRegistry | None = None) -> ServedModel:
        vision = model.config.vision if config.media_processes else None
        kinds = () if vision is None else ("image",) if vision.video_token_id < 0 else ("image", "video")
        return ServedModel(
            names=config.served_model_name,
            path=config.model,
            max_model_len=config.max_model_len,
            vocab_size=model.config.vocab_size,
            shape=model.config,
            max_sequences=config.max_waiting,
            request_timeout_s=config.request_timeout_s,
            max_logprobs=config.max_logprobs,
            defaults=_defaults_of(model),
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            finds_calls=config.enable_auto_tool_choice and config.tool_call_parser != JSON,
            shows_tools=config.shows_tools,
            media_kinds=kinds,
            modalities=("text", *(kind for kind in kinds if config.limit_mm_per_prompt.get(kind))),
            pooling=config.pooling,
            adapters=adapters,
        )

    def resolve(self, name: str | None) -> str:
        """Return the name for the answer; `NAME:latest` is `NAME`. Raises 404 for a model that is not served."""
        return self.find(name)[0]

    def use_of(self, name: str | None) -> AdapterUse | None:
        """Return the adapter that a request for this model uses. Raises 404 for a model that is not served."""
        _, adapter = self.find(name)
        return None if adapter is None else adapter.use

    def find(self, name: str | None) -> tuple[str, Adapter | None]:
        """Return the name for the answer, and the adapter with that name. Raises 404 for a model that is not served."""
        candidates = (self.names[0],) if name is None else (name, name.removesuffix(LATEST))
        for each in candidates:
            if each in self.names:
                return each, None
        served = self.served()
        for each in candidates:
            if (adapter := served.get(each)) is not None:
                return each, adapter
        text = f"model {shown(name)} does not exist; available: {', '.join(served)}"
        raise RequestError(text, status=404, code="model_not_found", param="model")

    def served(self) -> dict[str, Adapter | None]:
        """Return the names that requests may use, first those of the model, each with its adapter. Adapters may change at any
        time, so a caller that needs several of them should take them from one call."""
        served: dict[str, Adapter | None] = dict.fromkeys(self.names)
        if self.adapters is not None:
            served |= {adapter.name: adapter for adapter in self.adapters.served()}
        return served

    def check_task(self, *tasks: str) -> None:
        """Raise 400 if the model supports none of these tasks."""
        task = "generate" if self.pooling is None else self.pooling.task
        if task not in tasks:
            raise RequestError(
                f"model {self.names[0]} does not support this API; it supports {_TASKS[task]}",
                code="unsupported_model",
                param="model",
            )

    def card(self, name: str, adapter: Adapter | None, system_fingerprint: str) -> responses.Model:
        return responses.Model(
            id=name,
            created=self.created,
            root=self.path if adapter is None else adapter.path,
            parent=None if adapter is None else self.names[0],
            max_model_len=self.max_model_len,
            end_token_ids=list(self.shape.eos_token_ids),
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            system_fingerprint=system_fingerprint,
            input_modalities=list(self.modalities),
        )


def _defaults_of(model: ModelRecord) -> SamplingDefaults:
    try:
        return SamplingDefaults.decode(model.files.get(GENERATION_CONFIG, b"{}"))
    except CheckpointError as error:
        raise CheckpointError(f"{model.path}/{GENERATION_CONFIG}: {error}") from None
