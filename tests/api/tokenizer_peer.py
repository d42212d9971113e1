"""The engine as an api process sees it: a peer at the rings that answers as `tokenizer0` would, with a "model" of two lines.

Token ids below 256 are bytes. Sample i of any prompt says `SAYING` from its i-th character on, over and over, `at_once` tokens
per delta; the log-probability of each token is -1 / (i + 1). A text prompt `!reject STATUS` is refused with that status. While
`credits` is not None, each sample gets no more than that many tokens in all, so that a test can stop time anywhere. While
`script` is not empty, samples say its parts instead, one a token (0, 1, ..), and stop; a part of no kind releases nothing.
"""

from __future__ import annotations

import codecs
import threading
from array import array
from dataclasses import dataclass, field
from functools import lru_cache

import orjson

from engine.messages import (
    Abort,
    ChatPrompt,
    DecodedLogprobs,
    Delta,
    Deltas,
    Detokenize,
    Detokenized,
    Message,
    Part,
    Prompt,
    Rejected,
    Submit,
    TextPrompt,
    Tokenize,
    Tokenized,
)
from tests.api.peer import Peer
from tests.requests import Submitted, submitted

SAYING = "Plasma glüht im Torus ⚛ "
DEFAULT_NUM_TOKENS = 200


def said(num_tokens: int, sample_index: int = 0) -> bytes:
    """Return the first tokens of sequence `sample_index`."""
    return _saying(num_tokens.bit_length(), sample_index)[:num_tokens]


@lru_cache(64)
def _saying(num_bits: int, sample_index: int) -> bytes:
    return (SAYING[sample_index:] + SAYING * ((1 << num_bits) // len(SAYING) + 2)).encode()


def said_text(num_tokens: int, sample_index: int = 0) -> str:
    return said(num_tokens, sample_index).decode("utf-8", "replace")


def prompt_ids(prompt: Prompt) -> list[int]:
    if isinstance(prompt, TextPrompt):
        return list(prompt.text.encode())
    if isinstance(prompt, ChatPrompt):
        return list(orjson.dumps([message.get("content") for message in orjson.loads(prompt.messages)]))
    return array("i", prompt.token_ids).tolist()


@dataclass
class Stream:
    """One open sequence."""

    submit: Submitted
    prompt: list[int]
    num_sent: int
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    is_first: bool = True
    most: int = DEFAULT_NUM_TOKENS
    at_once: int = 1  # tokens of a delta
    script: list[Part] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        limit = self.submit.sampling.max_tokens
        if self.submit.text.is_max_tokens_cut:
            limit = min(limit, self.most)
        return self.most if limit < 0 else limit

    def next_delta(self, weight_version: int) -> Delta:
        if self.num_tokens == 0:
            return self._prompt_alone(weight_version)
        if self.script:
            return self._next_part(weight_version)
        sampling = self.submit.sampling
        tokens = said(min(self.num_sent + self.at_once, self.num_tokens), sampling.sample_index)[self.num_sent :]
        token = tokens[-1]
        self.num_sent += len(tokens)
        is_stop = token in sampling.stop_token_ids
        is_last = is_stop or self.num_sent >= self.num_tokens
        delta = Delta(
            self.submit.request_id,
            self.submit.attempt,
            list(tokens),
            self.decoder.decode(tokens, is_last),
            finish_reason="stop" if is_stop else "length" if is_last else "",
            stop_reason=token if is_stop else None,
            num_prompt_tokens=len(self.prompt),
            num_cached_tokens=len(self.prompt) // 4 * 4,
            weight_version=weight_version,
            logprobs=[entry(token, -1 / (sampling.sample_index + 1), sampling.num_logprobs) for token in tokens],
        )
        if self.is_first:
            self._add_prompt(delta)
        return delta

    def _next_part(self, weight_version: int) -> Delta:
        part = self.script[self.num_sent]
        self.num_sent += 1
        return Delta(
            self.submit.request_id,
            self.submit.attempt,
            [self.num_sent - 1],
            part.text if part.kind == "content" else "",
            logprobs=[entry(self.num_sent - 1, -1.0, self.submit.sampling.num_logprobs)],
            finish_reason="stop" if self.num_sent == len(self.script) else "",
            num_prompt_tokens=len(self.prompt),
            num_cached_tokens=len(self.prompt) // 4 * 4,
            weight_version=weight_version,
            parts=[part] if part.kind else [],
            num_reasoning_tokens=sum(part.kind == "reasoning" for part in self.script[: self.num_sent]),
        )

    def _prompt_alone(self, weight_version: int) -> Delta:
        submit = self.submit
        delta = Delta(submit.request_id, submit.attempt, [], "", "length", num_prompt_tokens=len(self.prompt))
        delta.weight_version = weight_version
        self._add_prompt(delta)
        return delta

    def _add_prompt(self, delta: Delta) -> None:
        self.is_first = False
        if self.submit.text.return_prompt_token_ids:
            delta.prompt_token_ids = array("i", self.prompt).tobytes()
        num_top = self.submit.sampling.num_prompt_logprobs
        if num_top >= 0 and not self.submit.num_scored_prompt_tokens:
            delta.prompt_logprobs = [entry(token, -0.5, num_top) for token in self.prompt[1:]]
            delta.first_prompt_token = bytes(token % 256 for token in self.prompt[:1])


def entry(token: int, logprob: float, num_top: int) -> DecodedLogprobs:
    """Return the entry of a token: always rank 2, with a best token 0.1 likelier; the last alternative is impossible."""
    if num_top < 0:
        return DecodedLogprobs(token, logprob, 2, b"")
    best = [token + 1, token, *(token + 1 + other for other in range(1, 19)), token + 40][:num_top]
    top = [logprob + 0.1, logprob, *(logprob - other for other in range(1, 19)), float("-inf")][:num_top]
    return DecodedLogprobs(
        token, logprob, 2, bytes([token % 256]), tuple(best), tuple(top), tuple(bytes([token_id % 256]) for token_id in best)
    )


class TokenizerPeer(Peer):
    """Stand-in for a tokenizer; `received` has every message, in order."""

    def __init__(self, run_id: str, name: str = "tokenizer0", api: str = "api0") -> None:
        super().__init__(run_id, name, api)
        self.received: list[Message] = []
        self.streams: dict[str, Stream] = {}
        self.credits: int | None = None
        self.script: list[Part] = []
        self.most, self.at_once = DEFAULT_NUM_TOKENS, 1  # tokens of a sample, and of a delta
        self.is_answering_calls = True
        self.weight_version = 1
        self.replica = -1  # that answers
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Forget open requests, as when the process dies."""
        super().stop()
        self.streams.clear()

    def submits(self, prefix: str = "") -> list[Submitted]:
        with self._lock:
            found = [submit for message in self.received if isinstance(message, Submit) for submit in submitted(message)]
        return [submit for submit in found if submit.request_id.startswith(prefix)]

    def aborts(self, prefix: str = "") -> list[Abort]:
        with self._lock:
            found = [message for message in self.received if isinstance(message, Abort)]
        return [abort for abort in found if abort.request_id.startswith(prefix)]

    def turn(self) -> None:
        deltas = [
            stream.next_delta(self.weight_version)
            for stream in list(self.streams.values())
            if self.credits is None or stream.num_sent < self.credits
        ]
        for delta in deltas:
            delta.replica = self.replica
            if delta.finish_reason:
                del self.streams[delta.request_id]
        if deltas:
            self.send(Deltas(deltas))

    def take(self, message: Message) -> None:
        with self._lock:
            self.received.append(message)
        if isinstance(message, Submit):
            for submit in submitted(message):
                self._open(submit)
        elif isinstance(message, Abort):
            self.streams.pop(message.request_id, None)
        elif isinstance(message, Tokenize) and self.is_answering_calls:
            token_ids = prompt_ids(message.prompt)
            self.send(Tokenized(message.call_id, array("i", token_ids).tobytes(), 256, [bytes([i]) for i in token_ids]))
        elif isinstance(message, Detokenize) and self.is_answering_calls:
            text = bytes(token_id % 256 for token_id in array("i", message.token_ids)).decode("utf-8", "replace")
            self.send(Detokenized(message.call_id, text))

    def _open(self, submit: Submitted) -> None:
        prompt = prompt_ids(submit.prompt)
        command, _, status = bytes(token_id % 256 for token_id in prompt).decode("latin-1").partition(" ")
        if command == "!reject":
            self.send(Rejected(submit.request_id, submit.attempt, submit.api, int(status), "refused", "some_code", "prompt", 7))
            return
        num_resumed = len(submit.resume_token_ids) // 4
        stream = Stream(submit, prompt, num_resumed, most=self.most, at_once=self.at_once, script=self.script)
        stream.decoder.decode(said(stream.num_sent, submit.sampling.sample_index))
        self.streams[submit.request_id] = stream
