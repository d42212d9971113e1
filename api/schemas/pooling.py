"""Bodies and answers of the pooling routes: vectors in OpenAI's format, scores and ranks in vLLM's, Jina's and Cohere's."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from api.schemas.requests import MAX_INT32, TokenId, TokenIds
from api.schemas.responses import Usage

T = TypeVar("T")


class PoolingRequest(msgspec.Struct, kw_only=True):
    """Fields of all pooling requests."""

    model: Annotated[str, Meta(description="A name from /v1/models; default: the first of them.")] | None = None
    priority: Annotated[int, Meta(ge=-MAX_INT32, le=MAX_INT32, description="Lower runs first, within limits.")] | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400, description="Seconds from arrival to the complete answer.")] | None = None
    user: str | None = None
    return_token_ids: Annotated[bool, Meta(description="Also return the token ids of each prompt.")] | None = None
    truncate_prompt_tokens: (
        Annotated[
            int,
            Meta(ge=-1, le=MAX_INT32, description="Keep only the last tokens of each prompt; -1: as many as fit."),
        ]
        | None
    ) = None


Text = Annotated[str, Meta(min_length=1)]
UseActivation = Annotated[bool, Meta(description="false: raw scores of the model.")]
ScoreTexts = Annotated[list[str], Meta(min_length=1)]


class PooledInput(msgspec.Struct, kw_only=True):
    """Prompts; a conversation (`api.schemas.requests.Conversation`) may be sent instead."""

    input: Annotated[
        Text | Annotated[list[TokenId | Text | TokenIds], Meta(min_length=1)],
        Meta(description="Text, token ids, a list of texts, or a list of lists of token ids."),
    ]
    add_special_tokens: bool | None = None


class EmbeddingRequest(PoolingRequest, kw_only=True):
    encoding_format: Annotated[Literal["float", "base64"], Meta(description="base64: little-endian float32.")] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_INT32, description="Keep only the first values.")] | None = None
    embed_dtype: Annotated[Literal["float32"], Meta(description="Only this value is supported.")] | None = None
    endianness: Annotated[Literal["native", "little"], Meta(description="For base64; no other is supported.")] | None = None
    normalize: Annotated[bool, Meta(description="Normalize to length 1; default: the setting of the model.")] | None = None


class PoolRequest(EmbeddingRequest, kw_only=True):
    """Prompts for the output of the model: vectors, or scores of its labels."""

    task: Annotated[Literal["embed", "classify"], Meta(description="Default: the task of the model.")] | None = None
    use_activation: UseActivation | None = None


class ClassificationRequest(PoolingRequest, kw_only=True):
    use_activation: UseActivation | None = None


class DocumentText(msgspec.Struct, kw_only=True):
    text: str


Document = str | DocumentText


class RerankRequest(PoolingRequest, kw_only=True):
    query: Text
    documents: Annotated[list[Document], Meta(min_length=1, description="An empty document has score 0 and comes last.")]
    top_n: Annotated[int, Meta(ge=0, le=MAX_INT32, description="0: all.")] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[None, Meta(description="Not supported: longer prompts are rejected.")] = None
    use_activation: UseActivation | None = None


class ScoreRequest(PoolingRequest, kw_only=True):
    """One text to compare with each of several, or two lists of the same length. A pair with an empty text has the score 0."""

    text_1: Annotated[str | ScoreTexts, Meta(description="One, or as many as text_2.")]
    text_2: str | ScoreTexts
    use_activation: UseActivation | None = None


class PoolingList(msgspec.Struct, Generic[T], kw_only=True):
    """Results for several texts, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[T]
    usage: Usage
    weight_version: str


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    prompt_token_ids: list[int] | UnsetType = UNSET


class EmbeddingList(PoolingList[Embedding]):
    pass


class Pooled(msgspec.Struct, kw_only=True):
    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | str
    prompt_token_ids: list[int] | UnsetType = UNSET


class PooledList(PoolingList[Pooled]):
    pass


class Classification(msgspec.Struct, kw_only=True):
    index: int
    label: Annotated[str, Meta(description="Label with the highest score.")]
    probs: Annotated[list[float], Meta(description="Scores in the order of the labels.")]
    num_classes: int
    prompt_token_ids: list[int] | UnsetType = UNSET


class ClassificationList(PoolingList[Classification]):
    pass


class RankedDocument(msgspec.Struct, kw_only=True):
    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Ranking(msgspec.Struct, kw_only=True):
    id: str
    model: str
    results: Annotated[list[RankedDocument], Meta(description="Best first.")]
    usage: Usage
    weight_version: str


class Score(msgspec.Struct, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float
    prompt_token_ids: list[int] | UnsetType = UNSET


class ScoreList(PoolingList[Score]):
    pass
