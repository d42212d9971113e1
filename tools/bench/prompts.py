"""Random prompts with a given number of tokens, without the server's tokenizer.

Runs in the `tokamak bench serve` process before the clock starts. If the server has vLLM's `/tokenize`, prompts are token ids
drawn from those of `WORDS`, with exact length. Otherwise, and for chats, they are random words, calibrated by two probes:
tokens per word, and tokens added by the server.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from engine.errors import TokamakError
from tools.bench.connection import Client
from tools.bench.timeline import Usage
from tools.target import error_text

# Short, common English words: one token each in nearly every vocabulary.
_WORD_LIST = """
able about above across act add after again age ago air all also and any area arm art ask away baby back bad bag ball bank
base bed best big bird black blood blue board boat body book both box boy bring brown build bus but buy call came can car
care case catch cell city class clear close cloud coat cold come cool cost could course court cross cry cut dark data day
dead deal deep did door down draw dream drive drop dry each early east eat edge egg eight end even ever every eye face fact
fall family far farm fast father feel feet few field fight fill film find fine fire first fish five floor fly food foot
force form four free friend from front full game gave girl give glass gold good great green ground group grow half hall hand
hard hat have head hear heart heat held help here high hill hold home hope horse hot hour house how ice idea inside iron job
just keep kind king knew know lake land large last late law lay lead learn leave left leg less letter level life light like
line list live long look lost love low made main make man many map mark may mean meet men milk mind mine miss money month
moon more most mother move much music must name near need never new next night nine noise north note now number off office
oil old once one only open order other our out over own page paper part pass past pay people person phone place plan plant
play point poor power pull push put race rain ran reach read ready real red rest rich right ring rise river road rock room
rose round rule run safe said salt same sand saw say school sea seat second see seem sell send sense set seven ship shop
short should show side sign sing sister sit six size skin sky sleep slow small snow some son song soon sound south space
speak spring stand star start state stay step still stone stop story street strong such sugar sun sure table tail take talk
tall team tell ten test than that then they thing think this three time today told took top town train tree true try turn
two under unit until use very view voice wait walk wall want war warm wash watch water way week well went west what when
where white who whole wide wife will wind window winter wish with woman wood word work world would year yes yet you young
"""
WORDS = tuple(_WORD_LIST.split())

PROBE_LENGTHS = (8, 72)  # words; short, so that they fit any model
LONG_PROMPT = 8 * len(WORDS)  # tokens; from here on the second probe is each word once: a mean over 72 words is too far off


class Probe(msgspec.Struct):
    """Reply to a calibration request."""

    usage: Usage = msgspec.field(default_factory=Usage)


class Tokenization(msgspec.Struct):
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes prompts of `input_len` tokens that share the first `num_shared`."""

    endpoint: str  # "completions" | "chat"
    token_ids: tuple[int, ...] = ()  # token ids to draw from; empty: words
    tokens_per_word: float = 1.0
    num_extra_tokens: float = 0.0  # tokens that the server adds around the words

    def prompts(self, count: int, input_len: int, num_shared: int, seed: int) -> list[str] | list[list[int]]:
        """Return `count` prompts, the same for the same seed."""
        rng = random.Random(seed)
        if self.token_ids:
            shared_ids = rng.choices(self.token_ids, k=num_shared)
            return [shared_ids + rng.choices(self.token_ids, k=input_len - num_shared) for _ in range(count)]
        num_words = max(1, round((input_len - self.num_extra_tokens) / self.tokens_per_word))
        num_shared_words = min(num_words, round(num_shared / self.tokens_per_word))
        shared = rng.choices(WORDS, k=num_shared_words)
        return [" " + " ".join(shared + rng.choices(WORDS, k=num_words - num_shared_words)) for _ in range(count)]

    def body(self, prompt: str | list[int], pictures: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Return the fields of a request with the prompt, and pictures before it."""
        if self.endpoint == "chat":
            content = [*pictures, {"type": "text", "text": prompt}] if pictures else prompt
            return {"messages": [{"role": "user", "content": content}]}
        return {"prompt": prompt}


async def prepare(client: Client, model: str, endpoint: str, kind: str, input_len: int) -> PromptMaker:
    """Return a maker of prompts of `input_len` tokens for a server. `kind`: "ids", "text" or "auto" (ids if the server supports
    them)."""
    if endpoint == "completions" and kind != "text":
        token_ids = await _token_ids(client, model)
        if token_ids:
            return PromptMaker(endpoint, token_ids)
        if kind == "ids":
            raise TokamakError("the server has no /tokenize to take token ids from; use --prompts text")
    return await _calibrated(client, model, endpoint, input_len >= LONG_PROMPT)


async def _token_ids(client: Client, model: str) -> tuple[int, ...]:
    """Return the distinct token ids of WORDS; empty if the server has no /tokenize or does not accept ids."""
    question = {"model": model, "prompt": " " + " ".join(WORDS), "add_special_tokens": False}
    status, body = await client.post("/tokenize", orjson.dumps(question))
    if status != 200:
        return ()
    try:
        token_ids = sorted(set(msgspec.json.decode(body, type=Tokenization).tokens))
    except msgspec.DecodeError:
        return ()
    trial = {"model": model, "prompt": token_ids[:4], "max_tokens": 1}
    status, _ = await client.post("/v1/completions", orjson.dumps(trial))
    return tuple(token_ids) if status == 200 else ()


async def _calibrated(client: Client, model: str, endpoint: str, is_long: bool) -> PromptMaker:
    maker = PromptMaker(endpoint)
    probes = [maker.prompts(1, num_words, 0, seed=num_words)[0] for num_words in PROBE_LENGTHS]
    lengths = list(PROBE_LENGTHS)
    if is_long:
        probes[1], lengths[1] = " " + " ".join(WORDS), len(WORDS)
    path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
    num_tokens = []
    for prompt in probes:
        status, body = await client.post(path, orjson.dumps({"model": model, "max_tokens": 1, **maker.body(prompt)}))
        if status != 200:
            raise TokamakError(f"{path} answers {status}: {error_text(body)}")
        try:
            num_tokens.append(msgspec.json.decode(body, type=Probe).usage.prompt_tokens)
        except msgspec.DecodeError as error:
            raise TokamakError(f"{path} does not answer like OpenAI's API: {error}") from None
    if not all(num_tokens):
        return maker  # no usage: assume one token per word
    tokens_per_word = (num_tokens[1] - num_tokens[0]) / (lengths[1] - lengths[0])
    if tokens_per_word <= 0:
        return maker
    return PromptMaker(endpoint, (), tokens_per_word, num_tokens[0] - tokens_per_word * lengths[0])
