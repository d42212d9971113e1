"""Every message that crosses a process boundary. Used by all actors; they share nothing else.

One msgspec tagged struct per message, encoded as MessagePack by `encode` and decoded by `decode`; arrays travel inside as raw
little-endian bytes (int32 token ids and block ids, float32 log-probabilities), made and read with numpy. Nothing here is ever
pickled. Read in the order in which a request travels: `request.py`, `media.py`, `step.py`, `answer.py`, `cache.py`; then
`control.py`.
"""

from __future__ import annotations

import functools
from typing import TypeVar, cast

import msgspec

from engine.messages.answer import Delta as Delta
from engine.messages.answer import Deltas as Deltas
from engine.messages.answer import Detokenized as Detokenized
from engine.messages.answer import Output as Output
from engine.messages.answer import Outputs as Outputs
from engine.messages.answer import Part as Part
from engine.messages.answer import Rejected as Rejected
from engine.messages.answer import Tokenized as Tokenized
from engine.messages.cache import BlocksCleared as BlocksCleared
from engine.messages.cache import BlocksMove as BlocksMove
from engine.messages.cache import BlocksMoved as BlocksMoved
from engine.messages.cache import BlocksRemoved as BlocksRemoved
from engine.messages.cache import BlocksStored as BlocksStored
from engine.messages.cache import StatesRemoved as StatesRemoved
from engine.messages.cache import StatesStored as StatesStored
from engine.messages.control import AbortRequest as AbortRequest
from engine.messages.control import ActorState as ActorState
from engine.messages.control import Adapter as Adapter
from engine.messages.control import AdaptersRecord as AdaptersRecord
from engine.messages.control import Command as Command
from engine.messages.control import Details as Details
from engine.messages.control import DropWeights as DropWeights
from engine.messages.control import EngineRecord as EngineRecord
from engine.messages.control import ListActors as ListActors
from engine.messages.control import LoadAdapter as LoadAdapter
from engine.messages.control import Membership as Membership
from engine.messages.control import Order as Order
from engine.messages.control import Pause as Pause
from engine.messages.control import RebalanceExperts as RebalanceExperts
from engine.messages.control import ReloadWeights as ReloadWeights
from engine.messages.control import Reply as Reply
from engine.messages.control import ResetEncoderCache as ResetEncoderCache
from engine.messages.control import ResetPrefixCache as ResetPrefixCache
from engine.messages.control import RestartActor as RestartActor
from engine.messages.control import Resume as Resume
from engine.messages.control import ReturnToWeights as ReturnToWeights
from engine.messages.control import RouterOrder as RouterOrder
from engine.messages.control import Shutdown as Shutdown
from engine.messages.control import Undo as Undo
from engine.messages.control import UnloadAdapter as UnloadAdapter
from engine.messages.control import WeightsRecord as WeightsRecord
from engine.messages.control import WeightsState as WeightsState
from engine.messages.media import Encode as Encode
from engine.messages.media import EncoderCall as EncoderCall
from engine.messages.media import MediaItem as MediaItem
from engine.messages.media import MediaSource as MediaSource
from engine.messages.media import MediaUnit as MediaUnit
from engine.messages.media import Pixels as Pixels
from engine.messages.media import PixelsDone as PixelsDone
from engine.messages.media import PixelsFailed as PixelsFailed
from engine.messages.media import Prepare as Prepare
from engine.messages.media import Prepared as Prepared
from engine.messages.media import WantPixels as WantPixels
from engine.messages.request import Abort as Abort
from engine.messages.request import Detokenize as Detokenize
from engine.messages.request import Request as Request
from engine.messages.request import SequencePart as SequencePart
from engine.messages.request import SequenceRequest as SequenceRequest
from engine.messages.request import SharedPart as SharedPart
from engine.messages.request import Submit as Submit
from engine.messages.request import Tokenize as Tokenize
from engine.messages.request import TokenizedPrompt as TokenizedPrompt
from engine.messages.sampling import AdapterUse as AdapterUse
from engine.messages.sampling import AnswerFormat as AnswerFormat
from engine.messages.sampling import ChatPrompt as ChatPrompt
from engine.messages.sampling import DecodedLogprobs as DecodedLogprobs
from engine.messages.sampling import Grammar as Grammar
from engine.messages.sampling import Parsing as Parsing
from engine.messages.sampling import Pooling as Pooling
from engine.messages.sampling import Prompt as Prompt
from engine.messages.sampling import PromptOptions as PromptOptions
from engine.messages.sampling import RepetitionLimits as RepetitionLimits
from engine.messages.sampling import SamplingParams as SamplingParams
from engine.messages.sampling import TextOptions as TextOptions
from engine.messages.sampling import TextPrompt as TextPrompt
from engine.messages.sampling import TokenLogprobs as TokenLogprobs
from engine.messages.sampling import TokensPrompt as TokensPrompt
from engine.messages.step import ClearWeights as ClearWeights
from engine.messages.step import CompileGrammar as CompileGrammar
from engine.messages.step import GrammarCompiled as GrammarCompiled
from engine.messages.step import Hello as Hello
from engine.messages.step import LoadWeights as LoadWeights
from engine.messages.step import PromptLogprobs as PromptLogprobs
from engine.messages.step import SlotStart as SlotStart
from engine.messages.step import Step as Step
from engine.messages.step import StepResult as StepResult
from engine.messages.step import WeightsChanged as WeightsChanged

Message = (
    Submit
    | Abort
    | Tokenize
    | Detokenize
    | Request
    | Step
    | LoadWeights
    | ClearWeights
    | WeightsChanged
    | CompileGrammar
    | GrammarCompiled
    | Hello
    | StepResult
    | Outputs
    | Rejected
    | Deltas
    | Tokenized
    | Detokenized
    | BlocksStored
    | BlocksRemoved
    | BlocksCleared
    | StatesStored
    | StatesRemoved
    | BlocksMove
    | BlocksMoved
    | Prepare
    | Prepared
    | WantPixels
    | Pixels
    | PixelsFailed
    | PixelsDone
)
Control = Command | Reply | ActorState | Membership

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


@functools.cache
def _message_decoder() -> msgspec.msgpack.Decoder[Message]:
    """Return the decoder of messages, made on first use: building it takes a few milliseconds, and the supervisor never needs
    it."""
    return msgspec.msgpack.Decoder(Message)


@functools.cache
def _control_decoder() -> msgspec.msgpack.Decoder[Control]:
    return msgspec.msgpack.Decoder(Control)


def encode(message: Message | Control) -> bytes:
    """Encode a message as MessagePack bytes."""
    return _encoder.encode(message)


def encoded_part(part: T) -> tuple[T, int]:
    """Encode a part once so that any number of messages can carry it; return it with its size in bytes. The returned part
    cannot be read any more."""
    data = _encoder.encode(part)
    return cast(T, msgspec.Raw(data)), len(data)


def decode(data: bytes | memoryview) -> Message:
    """Decode a ring record. Raises msgspec.DecodeError (a bug of ours) if it is not a message."""
    return _message_decoder().decode(data)


def decode_control(data: bytes | memoryview) -> Control:
    """Decode a control record or frame."""
    return _control_decoder().decode(data)
