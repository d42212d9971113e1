"""Tokamak without a server: `from tokamak import LLM, SamplingParams`, with the arguments and outputs of vLLM's classes.

What a user's process imports, and all that it imports: an `LLM` starts the engine in processes of its own and is its client on
a UNIX socket. Read `llm.py` first.

llm.py         LLM: generate, chat, embed, score
parameters.py  SamplingParams, StructuredOutputsParams, ...: what is asked for, as a request's fields
inputs.py      prompts in all their forms, as a request's fields
outputs.py     RequestOutput, ...
answers.py     an engine's answers as these
logprobs.py    Logprob, and log-probabilities as vLLM arranges them
tokenizer.py   the engine's tokenizer, from afar
beams.py       beam search, made of many requests
metrics.py     what `LLM.get_metrics` answers with
asking.py      many requests at a time, in order
connection.py  HTTP on kept-alive connections, over TCP or a UNIX socket
launched.py    an engine as a child, which ends with this process
__main__.py    the program `tokamak`

A wheel has this package alone at the top of site-packages, with the engine's packages below it. They import each other by the
names that they have in the repository (`engine`, `tools`, ...), and only processes of ours have this directory on their path
(`__main__.py`). So a user's own `tools` or `api` and ours never meet. Modules here import none of those.
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
    """Each on first use: the program `tokamak` is in this package too, and needs none of them."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
