"""The chunks of a stream in OpenAI's format. Runs in the api process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import msgspec

from api.client.generation import Generation, OpenSequence
from api.errors import error_body
from api.fingerprint import Fingerprints
from api.openai.usage import progress_of, timings_of, usage_of
from api.schemas.requests import GenerationRequest, StreamOptions
from api.schemas.responses import encoder
from api.sse import EventWriter
from engine.errors import RequestError
from engine.messages import Delta

DONE = b"data: [DONE]\n\n"


class ChunkWriter(EventWriter):
    """Writes the events of one stream. `head` has the common fields: id, object, created and model."""

    def __init__(self, head: msgspec.Struct, request: GenerationRequest, fingerprints: Fingerprints) -> None:
        options = request.stream_options or StreamOptions()
        self._prefix = b"data: " + encoder.encode(head)[:-1] + b',"choices":['
        self._fingerprints = fingerprints
        self._has_usage = bool(options.include_usage)
        self._has_continuous_usage = bool(options.include_usage and options.continuous_usage_stats)
        self._has_progress = bool(request.return_progress)
        self._has_timings = bool(request.timings)
        self._has_continuous_timings = bool(request.timings_per_token)

    @abstractmethod
    def choices(self, index: int, sequence: OpenSequence, delta: Delta) -> Sequence[msgspec.Struct]:
        """Return what `delta` adds to the choice `index`, one event each."""

    def take(self, generation: Generation) -> bytes:
        """Return the events for everything since the last call; after the last, usage if wanted and the end mark."""
        events = [self._progress(generation)] if self._has_progress and generation.take_progress() else []
        events += [
            self._event(generation, index, sequence) for index, sequence in enumerate(generation.sequences) if sequence.pending
        ]
        if generation.is_finished:
            if self._has_usage:
                events.append(self._tail(generation))
            events.append(DONE)
        return b"".join(events)

    def _event(self, generation: Generation, index: int, sequence: OpenSequence) -> bytes:
        tail = b"]"
        if self._has_continuous_usage:
            tail += b',"usage":' + encoder.encode(usage_of(generation))
        elif self._has_usage:
            tail += b',"usage":null'
        if self._has_continuous_timings or (
            self._has_timings and generation.is_finished and sequence is generation.sequences[-1]
        ):
            tail += b',"timings":' + encoder.encode(timings_of(generation))
        if sequence.is_finished:
            tail += b',"weight_version":"%s"' % sequence.weight_version.encode()
        tail += b',"system_fingerprint":"%s"' % self._fingerprints.of(sequence.weight_version, generation.adapter).encode()
        choices = self.choices(index, sequence, sequence.take())
        if len(choices) == 1:  # nearly always
            return b"%b%b%b}\n\n" % (self._prefix, encoder.encode(choices[0]), tail)
        return b"".join(b"%b%b%b}\n\n" % (self._prefix, encoder.encode(choice), tail) for choice in choices)

    def _progress(self, generation: Generation) -> bytes:
        """Return the progress of the prompts, in an event without choices."""
        return b'%s],"prompt_progress":%s}\n\n' % (self._prefix, encoder.encode(progress_of(generation)))

    def _tail(self, generation: Generation) -> bytes:
        usage = encoder.encode(usage_of(generation))
        return b'%s],"usage":%s,"weight_version":"%s","system_fingerprint":"%s"}\n\n' % (
            self._prefix,
            usage,
            generation.weight_version.encode(),
            self._fingerprints.of(generation.weight_version, generation.adapter).encode(),
        )

    def failed(self, error: RequestError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n" + DONE
