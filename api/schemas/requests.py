"""Request bodies: what the HTTP API accepts, with all ranges, defined once.

Used by the api process's route handlers (`parse`) and by the OpenAPI document, which is generated from the same structs.
Unknown fields are ignored, as vLLM does; `null` means "not given" wherever a field has a default. Every error is a 400 that
names the parameter.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson
from msgspec import Meta

from api.schemas.accepted import NOTHING, Step, accepted
from api.schemas.formats import FormatFields
from engine.config import MAX_LOGPROBS
from engine.errors import RequestError
from engine.messages.control import WeightMode

MAX_SEQUENCES_PER_PROMPT = 128
MAX_INT32 = 2**31 - 1

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
NumTokens = Annotated[int, Meta(ge=0, le=MAX_INT32)]
NumSequences = Annotated[int, Meta(ge=1, le=MAX_SEQUENCES_PER_PROMPT)]
NumTopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS, description="At most --max-logprobs.")]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="-1: random.")]
Word = Annotated[str, Meta(min_length=1, max_length=1024)]
Words = Annotated[list[Word], Meta(max_length=64)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
LogitBias = Annotated[dict[TokenId, Bias], Meta(extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}})]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class MediaOptions(msgspec.Struct, kw_only=True):
    """How images and video of a prompt are read, within the server's limits."""

    mm_processor_kwargs: (
        Annotated[dict[str, Any], Meta(description="Such as max_pixels; below the server's limits.")] | None
    ) = None
    media_io_kwargs: Annotated[dict[str, Any], Meta(description="How files are read, per modality.")] | None = None


class RepetitionDetection(msgspec.Struct, kw_only=True):
    """An answer ends when its last tokens are one pattern of some size, repeated `min_count` times."""

    max_pattern_size: Annotated[int, Meta(ge=0, le=256, description="0: no pattern detection.")] = 0
    min_pattern_size: Annotated[int, Meta(ge=0, le=256)] = 0
    min_count: Annotated[int, Meta(ge=0, le=65536, description="At least 2 if max_pattern_size is set.")] = 0


class SamplingFields(FormatFields, kw_only=True):
    """Sampling parameters. Every protocol that is translated to chat accepts these names in addition to its own."""

    min_tokens: NumTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2, description="0: greedy.")] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT32, description="-1 or 0: all tokens.")] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Words | None = None
    stop: Word | Words | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: (
        Annotated[
            int,
            Meta(ge=-MAX_INT32, le=MAX_INT32, description="Lower runs first, within limits: waiting counts too."),
        ]
        | None
    ) = None
    timeout: Annotated[float, Meta(gt=0, le=86400, description="Seconds from arrival to the last token.")] | None = None
    cache_salt: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=1024,
                description="Cached prefixes are shared only between requests with the same salt.",
            ),
        ]
        | None
    ) = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, le=MAX_INT32, description="Keep only the last tokens; -1: as many as fit.")] | None
    ) = None
    top_n_sigma: (
        Annotated[float, Meta(ge=-1, le=100, description="Standard deviations below the largest logit; 0 or less: off.")] | None
    ) = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    xtc_probability: Annotated[float, Meta(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100, description="0: off.")] | None = None
    dry_base: Annotated[float, Meta(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=0, le=MAX_INT32)] | None = None
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=MAX_INT32, description="Tokens to look back; -1: all.")] | None = None
    dry_sequence_breakers: Annotated[Words, Meta(description="Texts that end a repetition.")] | None = None


class GenerationRequest(SamplingFields, kw_only=True):
    """Fields of `/v1/completions` and `/v1/chat/completions`."""

    model: Annotated[str, Meta(description="A name from /v1/models; default: the first of them.")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: NumTokens | None = None
    fit_max_tokens: (
        Annotated[bool, Meta(description="true (default): lower max_tokens to the free context; false: reject the request.")]
        | None
    ) = None
    n: NumSequences | None = None
    best_of: (
        Annotated[int, Meta(ge=1, le=MAX_SEQUENCES_PER_PROMPT, description="Generate this many, return the n likeliest.")]
        | None
    ) = None
    prompt_logprobs: NumTopLogprobs | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    logprob_token_ids: (
        Annotated[
            list[TokenId],
            Meta(
                min_length=1,
                max_length=MAX_LOGPROBS,
                description="Return log-probabilities of these tokens instead of the best.",
            ),
        ]
        | None
    ) = None
    return_tokens_as_token_ids: bool | None = None
    logprobs_by_id: (
        Annotated[bool, Meta(description="Return log-probabilities by token id, as in `prompt_logprobs`.")] | None
    ) = None
    repetition_detection: RepetitionDetection | None = None
    timings: Annotated[bool, Meta(description="Include timings in the answer.")] | None = None
    timings_per_token: Annotated[bool, Meta(description="Include timings in every event of a stream.")] | None = None
    return_progress: Annotated[bool, Meta(description="Send events with the progress of the prompt.")] | None = None


GridSide = Annotated[int, Meta(ge=1, le=1 << 20)]
Grid = Annotated[list[GridSide], Meta(min_length=3, max_length=3, description="Number of patches in time, height and width.")]
MaskBound = Annotated[int, Meta(ge=0, le=MAX_INT32)]


class MultiModalData(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    image: str | list[str] | None = None
    video: str | list[str] | None = None


class CompletionMedia(MediaOptions, kw_only=True):
    """Media for the placeholders of a bare prompt, in order, and the attention of its tokens: common to `/v1/completions` and
    `/tokenize`."""

    multi_modal_data: Annotated[MultiModalData, Meta(description="Links (also data:) per modality.")] | None = None
    image_feature_urls: Annotated[list[str] | str, Meta(description="Encoded images: npy or safetensors.")] | None = None
    image_grid_thws: list[Grid] | None = None
    video_feature_urls: list[str] | str | None = None
    video_grid_thws: list[Grid] | None = None
    attention_mask_offset: (
        Annotated[
            list[MaskBound | Annotated[list[MaskBound], Meta(min_length=2, max_length=2)]],
            Meta(description="For each prompt token the last key it attends to, or the first and the last."),
        ]
        | None
    ) = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: Annotated[
        str | Annotated[list[TokenId | str | TokenIds], Meta(min_length=1)],
        Meta(description="Text, token ids, a list of texts, or a list of lists of token ids."),
    ]
    logprobs: NumTopLogprobs | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: Annotated[str, Meta(description="Text after the gap; for models with fill-in-the-middle tokens.")] | None = None


class MediaLink(msgspec.Struct, kw_only=True):
    url: Annotated[str, Meta(description="http, https or data:; also s3:, bos: and file: if enabled.")]
    detail: str | None = None


class ImageFeatures(msgspec.Struct, kw_only=True):
    image_embeds: Annotated[str, Meta(description="Base64 or a link to npy or safetensors.")]
    image_grid_thw: Grid | None = None


class VideoFeatures(msgspec.Struct, kw_only=True):
    video_embeds: str
    video_grid_thw: Grid | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: Annotated[
        Literal["text", "input_text", "output_text", "refusal", "image_url", "video_url", "image_embeds", "video_embeds"],
        Meta(description="Anything but text needs a vision-language model."),
    ]
    text: str | None = None
    refusal: str | None = None
    image_url: MediaLink | str | None = None
    video_url: MediaLink | str | None = None
    image_embeds: ImageFeatures | str | None = None
    video_embeds: VideoFeatures | str | None = None
    image_grid_thw: Grid | None = None
    video_grid_thw: Grid | None = None
    uuid: Annotated[str, Meta(description="Accepted without effect.")] | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: Annotated[str | dict[str, Any] | None, Meta(description="JSON text or an object.")] = None


class CustomCall(msgspec.Struct, kw_only=True):
    name: str
    input: str


class ToolCall(msgspec.Struct, kw_only=True):
    function: Annotated[FunctionCall | None, Meta(description="Of a function.")] = None
    custom: Annotated[CustomCall | None, Meta(description="Of a custom tool.")] = None
    id: str | None = None
    type: str | None = None


FunctionName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$")]


class FunctionDefinition(msgspec.Struct, kw_only=True):
    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="JSON schema of type object.")] = None
    strict: Annotated[bool | None, Meta(description="Calls follow `parameters` exactly.")] = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class TextToolFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    pass


class ToolGrammar(msgspec.Struct, kw_only=True):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1)]


class GrammarToolFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="grammar"):
    grammar: ToolGrammar


class CustomDefinition(msgspec.Struct, kw_only=True):
    name: FunctionName
    description: str | None = None
    format: Annotated[TextToolFormat | GrammarToolFormat | None, Meta(description="Format of the input.")] = None


class ChatTool(msgspec.Struct, kw_only=True):
    """A function, called with JSON, or a custom tool, called with a text."""

    type: Literal["function", "custom"] = "function"
    function: Annotated[FunctionDefinition | None, Meta(description="For type function.")] = None
    custom: Annotated[CustomDefinition | None, Meta(description="For type custom.")] = None


class ChosenFunction(msgspec.Struct, kw_only=True):
    name: FunctionName


class NamedToolChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    function: ChosenFunction


class NamedCustomTool(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    custom: ChosenFunction


class AllowedTool(msgspec.Struct, kw_only=True):
    type: Literal["function", "custom"] = "function"
    function: ChosenFunction | None = None
    custom: ChosenFunction | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1)]


class AllowedToolChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message. Fields not listed here are passed to the chat template unchanged."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: Annotated[str | list[str | ContentPart] | None, Meta(description="Required except for assistants.")] = None
    name: str | None = None
    reasoning_content: Annotated[str | None, Meta(description="Reasoning of an assistant message.")] = None
    reasoning: Annotated[str | None, Meta(description="Newer name of the same field.")] = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1)]


class Conversation(MediaOptions, kw_only=True):
    """How a conversation becomes a prompt: common to `/v1/chat/completions` and `/tokenize`."""

    messages: Messages
    documents: Annotated[list[dict[str, Any]], Meta(description="For templates that use documents.")] | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | NamedCustomTool | AllowedToolChoice | None = None
    parallel_tool_calls: Annotated[bool, Meta(description="false: at most one call.")] | None = None
    reasoning_effort: (
        Annotated[
            Literal["none", "minimal", "low", "medium", "high", "xhigh"],
            Meta(description="For templates with degrees of reasoning, or a switch for it."),
        ]
        | None
    ) = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class PredictionPart(msgspec.Struct, kw_only=True):
    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, kw_only=True):
    """Expected answer, such as the file to edit: matching tokens are generated faster."""

    type: Literal["content"]
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest, kw_only=True):
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumTopLogprobs | None = None
    attention_mask_offset: (
        Annotated[list[int], Meta(max_length=0, description="Only supported at `/v1/completions`.")] | None
    ) = None
    prediction: Prediction | None = None
    echo: Annotated[bool, Meta(description="The answer starts with the assistant message that it continues.")] | None = None
    include_reasoning: Annotated[bool, Meta(description="false: do not return reasoning.")] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=MAX_INT32, description="Maximum reasoning tokens.")] | None = None
    separate_reasoning: Annotated[bool, Meta(description="false: leave reasoning in the content, as generated.")] | None = None
    reasoning_format: (
        Annotated[Literal["auto", "deepseek", "none"], Meta(description="none: same as `separate_reasoning` false.")] | None
    ) = None
    parse_tool_calls: Annotated[bool, Meta(description="false: leave tool calls in the content, as generated.")] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Fields of both kinds of `/tokenize`; a conversation is sent in addition, as a `Conversation`."""

    model: str | None = None
    return_token_strs: bool | None = None


class TokenizeTextRequest(TokenizeRequest, kw_only=True):
    prompt: str
    add_special_tokens: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None


class PauseRequest(msgspec.Struct, kw_only=True):
    mode: WeightMode = "abort"


class RebalanceRequest(msgspec.Struct, kw_only=True):
    force: Annotated[bool, Meta(description="Rebalance even if little is gained.")] = False


class ReloadRequest(msgspec.Struct, kw_only=True):
    path: Annotated[
        str, Meta(max_length=4096, description="Directory or .gguf file; empty: load the current weights again.")
    ] = ""
    mode: WeightMode = "requeue"
    ranks: Annotated[
        list[Annotated[int, Meta(ge=0, le=65535)]], Meta(max_length=1024, description="Empty: the whole engine.")
    ] = []


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    lora_name: Annotated[
        str,
        Meta(min_length=1, max_length=256, pattern=r"^[^\s,\x00-\x1f\x7f]+$", description="Model name that requests use."),
    ]
    lora_path: Annotated[
        str, Meta(min_length=1, max_length=4096, description="Directory of the adapter on the server's machine.")
    ]
    load_inplace: Annotated[bool, Meta(description="Replace an adapter that has the same name.")] = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
    lora_int_id: Annotated[int | None, Meta(description="Accepted as in vLLM; only the name is used.")] = None


class AbortRequestBody(msgspec.Struct, kw_only=True):
    request_id: Annotated[str, Meta(min_length=1, max_length=256)]


class EmptyRequest(msgspec.Struct, kw_only=True):
    pass


T = TypeVar("T", bound=msgspec.Struct)

_PLACE = re.compile(r"(?P<key>`key` in )?`\$(?P<path>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")


def convert(fields: dict[str, Any], type_: type[T]) -> T:
    """Convert a JSON object to a request; the error names the first field that does not fit."""
    try:
        return msgspec.convert(fields, type_, str_keys=True)
    except msgspec.ValidationError as error:
        raise _named(str(error), fields, type_) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None


def dump(value: object, param: str) -> bytes:
    """Encode a part of a body as JSON text again, for the ring."""
    try:
        return orjson.dumps(value)
    except TypeError:  # orjson encodes at most 254 levels
        raise RequestError(f"{param} is nested too deeply", param=param) from None


def dump_list(values: list[Any], param: str, max_bytes: int) -> bytes:
    """Encode a list like `dump`, but stop at `max_bytes`: no ring takes more."""
    parts: list[bytes] = []
    num_bytes = 0
    for value in values:
        parts.append(dump(value, param))
        num_bytes += len(parts[-1]) + 1
        if num_bytes > max_bytes:
            raise RequestError(
                f"{param}: exceeds the limit of {max_bytes} bytes; send less", code="context_length_exceeded", param=param
            )
    return b"[%b]" % b",".join(parts)


def invalid(param: str, message: str) -> RequestError:
    """Return the error for a value that conflicts with other fields or the model."""
    return RequestError(f"{param}: {message}", code="invalid_value", param=param)


def _named(text: str, fields: dict[str, Any], type_: type[msgspec.Struct]) -> RequestError:
    """Return the error for msgspec's `text`: the error, which may quote the value, and the place after the last " - at "."""
    what, _, place = text.rpartition(" - at ")
    match = _PLACE.fullmatch(place)
    if match is None:
        what = text
    path = match["path"].lstrip(".") if match else ""
    missing = _MISSING.fullmatch(what)
    if missing is not None:
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return RequestError(f"{param} is required", code="missing_required_parameter", param=param)
    is_key = match is not None and match["key"] is not None
    got = "" if is_key or match is None else _got(fields, match["path"])
    if got:
        wanted = accepted(type_, _steps(match["path"]) if match else (), fields)
        if wanted == NOTHING:
            what, got = "not supported", f"{got}; remove it"
        elif wanted:
            what = f"expected {wanted}"
        elif what.startswith("Expected `null`"):
            what, got = "not supported", f"{got}; remove it"
        else:
            what = what.partition(", got ")[0]
    where = f"a key of {path}" if is_key else path or "the body"
    return RequestError(f"{where}: {what[0].lower()}{_shortened(what[1:], 256)}{got}", code="invalid_value", param=path)


def _steps(path: str) -> list[Step]:
    """Split msgspec's path into its steps."""
    return [step["name"] or int(step["index"]) for step in _STEP.finditer(path)]


def _got(fields: object, path: str) -> str:
    """Return the wrong value, found by msgspec's path; nothing if the path leads through a mapping with unnamed keys."""
    value: Any = fields
    for step in _STEP.finditer(path):
        if step["name"] is not None and isinstance(value, dict) and step["name"] in value:
            value = value[step["name"]]
        elif step["index"] not in (None, "...") and isinstance(value, list):
            value = value[int(step["index"])]
        else:
            return ""
    return f", got {shown(value)}"


def shown(value: object) -> str:
    """Return a value as an error may quote it."""
    if isinstance(value, (dict, list)):
        return f"an {'object' if isinstance(value, dict) else 'array'} of {len(value)}"
    return _shortened(repr(value[:64]) if isinstance(value, str) else orjson.dumps(value).decode(), 64)


def _shortened(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."
