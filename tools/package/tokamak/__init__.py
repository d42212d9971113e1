"""Tokamak without a server: `from tokamak import LLM, SamplingParams`, with the arguments and outputs of vLLM's classes.

The only package that a user's process imports. An `LLM` starts the engine in separate processes and is its client on a UNIX
socket. Read `llm.py` first.

llm.py         LLM: generate, chat, embed, score
parameters.py  SamplingParams, StructuredOutputsParams, ...: parameters as fields of a request
inputs.py      prompts of all types, as fields of a request
outputs.py     RequestOutput, ...
answers.py     answers of the engine, converted to outputs
logprobs.py    Logprob, and log-probabilities as vLLM arranges them
tokenizer.py   the engine's tokenizer, by HTTP
beams.py       beam search, by many requests
metrics.py     results of `LLM.get_metrics`
asking.py      many requests at a time, in order
connection.py  HTTP on kept-alive connections, over TCP or a UNIX socket
launched.py    an engine as a child process, which ends with this process
__main__.py    the program `tokamak`

A wheel has only this package at the top of site-packages, with the engine's packages below it. Those import each other by their
names in the repository (`engine`, `tools`, ...), and only our processes have this directory on their path (`__main__.py`), so
they never clash with a user's own `tools` or `api`. Modules here import none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokamak.beams import BeamSearchOutput as BeamSearchOutput
    from tokamak.beams import BeamSearchParams as BeamSearchParams
    from tokamak.beams import BeamSearchSequence as BeamSearchSequence
    from tokamak.inputs import TextPrompt as TextPrompt
    from tokamak.inputs import TokensPrompt as TokensPrompt
    from tokamak.launched import EngineDeadError as EngineDeadError
    from tokamak.llm import LLM as LLM
    from tokamak.logprobs import Logprob as Logprob
    from tokamak.outputs import CompletionOutput as CompletionOutput
    from tokamak.outputs import EmbeddingOutput as EmbeddingOutput
    from tokamak.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from tokamak.outputs import RequestOutput as RequestOutput
    from tokamak.outputs import ScoringOutput as ScoringOutput
    from tokamak.outputs import ScoringRequestOutput as ScoringRequestOutput
    from tokamak.parameters import LoRARequest as LoRARequest
    from tokamak.parameters import PoolingParams as PoolingParams
    from tokamak.parameters import RepetitionDetectionParams as RepetitionDetectionParams
    from tokamak.parameters import SamplingParams as SamplingParams
    from tokamak.parameters import StructuredOutputsParams as StructuredOutputsParams

_PLACES = {
    "LLM": "llm",
    "BeamSearchParams": "beams",
    "BeamSearchSequence": "beams",
    "BeamSearchOutput": "beams",
    "SamplingParams": "parameters",
    "StructuredOutputsParams": "parameters",
    "RepetitionDetectionParams": "parameters",
    "PoolingParams": "parameters",
    "LoRARequest": "parameters",
    "TextPrompt": "inputs",
    "TokensPrompt": "inputs",
    "Logprob": "logprobs",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "EmbeddingOutput": "outputs",
    "EmbeddingRequestOutput": "outputs",
    "ScoringOutput": "outputs",
    "ScoringRequestOutput": "outputs",
    "EngineDeadError": "launched",
}
__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineDeadError",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


def __getattr__(name: str) -> Any:
    """Import each name on first use: the program `tokamak` is in this package too and needs none of them."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
