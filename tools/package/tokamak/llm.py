"""`LLM`: a private engine with the methods of vLLM's class.

The engine runs in separate processes (`launched.py`), and this process is its client, which may be a notebook, a thread, or a
script that is killed: the engine ends with it. Several can run at once.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import orjson

from tokamak.answers import chat_output, completion_output, embedding_output, error_of, scoring_outputs
from tokamak.asking import MAX_CONCURRENCY, Asker, InOrder, LostError
from tokamak.beams import BeamSearchOutput, BeamSearchParams, search
from tokamak.connection import Server
from tokamak.inputs import Message, Prompt, conversations_of, prompts_of
from tokamak.launched import EngineDeadError, LaunchedEngine
from tokamak.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from tokamak.parameters import PoolingParams, SamplingParams
from tokamak.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokamak.metrics import Metric

P = TypeVar("P")

_PATIENCE_S = 120.0  # if the engine is alive but does not respond
_PAIRS_OF_A_REQUEST = 16
_SEED_STEP = 0x9E3779B97F4A7C15
_DEFAULTS = {  # answers are not parsed, as in vLLM; templates are the user's own
    "tool_call_parser": "none",
    "reasoning_parser": "none",
    "trust_request_chat_template": True,
}


class _Question(NamedTuple):
    """Request, and the position of its input in the user's arguments."""

    path: str
    body: dict[str, Any]
    where: str
    params: Any = None
    prompt: Prompt | None = None


class LLM:
    """Generates text, or computes embeddings and scores, with an engine that it starts and stops.

    `options` are those of `tokamak serve` and of `vllm serve` by their names with underscores (`dtype`, `quantization`,
    `tensor_parallel_size`, `max_model_len`, `enable_prefix_caching`, ...): `tokamak serve --vllm-flags` describes each.
    ValueError for a wrong value, TypeError for an unknown name, EngineDeadError if the engine cannot start.

    `seed` also makes requests without a seed reproducible. `tool_call_parser` and `reasoning_parser` are off: tool calls and
    reasoning are part of the text.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._seed: int | None = options.get("seed")
        self._counter = itertools.count()
        self._is_asleep = False
        self._engine = LaunchedEngine({**_DEFAULTS, **options, "model": model})
        self._server = Server(self._engine.url, self._engine.key)
        self._asker = Asker(self._server, self._engine.is_alive, _PATIENCE_S)
        self._adapters: dict[str, str] = {}  # loaded adapters: name -> path
        try:
            load = self._call("/load")
            card = self._call("/v1/models")["data"][0]
            self.model = str(card["id"])
            self._end_token_ids, self._max_model_len = set(card["end_token_ids"]), int(card["max_model_len"])
        except BaseException:
            self.shutdown()
            raise
        num_slots = sum(replica["max_num_seqs"] for replica in load["replicas"])
        self._concurrency = min(MAX_CONCURRENCY, num_slots + num_slots // 4 + 2)  # requests in flight

    # ------------------------------------------------------------------------------------------------------ answers

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts: a text, token ids, `{"prompt": ...}`, `{"prompt_token_ids": [...]}`, or a list of these. Returns an
        output for each, in order. ValueError names the wrong prompt or parameter."""
        asked = prompts_of(prompts)
        each = _sampled(sampling_params, len(asked))
        extra = _known(tokenization_kwargs, "truncate_prompt_tokens", "add_special_tokens")
        questions = []
        for index, (prompt, params) in enumerate(zip(asked, each, strict=True)):
            if params is not None and params.thinking_token_budget is not None:
                raise ValueError("thinking_token_budget is for conversations; use chat, or leave it out")
            body = {**self._fields(params), **extra, **prompt.extra, "prompt": prompt.content}
            if priority is not None:
                body["priority"] = priority[index]
            questions.append(_Question("/v1/completions", body, f"prompts[{index}]", params, prompt))
        return self._all(self._with_adapters(questions, lora_request), _completion, use_tqdm, "Processed prompts")

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several. `chat_template_content_format` has no effect: the engine detects what a template
        accepts."""
        conversations = conversations_of(messages)
        each = _sampled(sampling_params, len(conversations))
        shared = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
            "mm_processor_kwargs": mm_processor_kwargs,
        }
        shared = {name: value for name, value in shared.items() if value is not None}
        questions = []
        for index, (conversation, params) in enumerate(zip(conversations, each, strict=True)):
            body = {**self._fields(params), **shared, "messages": conversation}
            if "logprobs" in body:
                body["logprobs"], body["top_logprobs"] = True, body["logprobs"]
            questions.append(_Question("/v1/chat/completions", body, f"messages[{index}]", params))
        return self._all(self._with_adapters(questions, lora_request), self._chat_completion, use_tqdm, "Processed prompts")

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the likeliest continuations of each prompt, the best first. `concurrency_limit`: prompts at a time.
        `beam_width`: at most half of the engine's `max_logprobs`."""
        asked = prompts_of(prompts)
        questions = []
        for index, prompt in enumerate(asked):
            token_ids = prompt.token_ids or self.get_tokenizer().encode(str(prompt.content))
            body = {**prompt.extra, "prompt": token_ids}
            questions.append(_Question("/v1/completions", body, f"prompts[{index}]", prompt=prompt))
        adapters = _one_each(lora_request, len(questions), "lora_request")
        questions = self._with_adapters(questions, adapters)

        def answer(question: _Question, asker: Asker | None) -> BeamSearchOutput:
            def ask(fields: dict[str, Any]) -> Any:
                return self._call(question.path, {**question.body, **fields}, asker, question.where)

            found = search(ask, question.body["prompt"], params, self._end_token_ids, self._max_model_len)
            for sequence in found.sequences:
                sequence.text = self.get_tokenizer().decode(sequence.tokens)
                sequence.lora_request = adapters[questions.index(question)]
            return found

        return self._each(questions, answer, use_tqdm, "Beam search", concurrency_limit)

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: Any = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in order."""
        asked = prompts_of(prompts)
        each = _one_each(pooling_params, len(asked), "pooling_params")
        names = ("dimensions", "normalize", "truncate_prompt_tokens")
        questions = []
        for index, (prompt, params) in enumerate(zip(asked, each, strict=True)):
            body = {**_pooled(params, truncate_prompt_tokens, *names), "input": _bare(prompt), "encoding_format": "base64"}
            questions.append(_Question("/v1/embeddings", body, f"prompts[{index}]"))
        return self._all(self._with_adapters(questions, lora_request), _embedding, use_tqdm, "Processed prompts")

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: Any = None,
    ) -> list[ScoringRequestOutput]:
        """Return similarity scores of one text with each of several, or of pairs."""
        firsts, seconds = _texts(data_1, "data_1"), _texts(data_2, "data_2")
        if len(firsts) not in (1, len(seconds)):
            raise ValueError(f"data_1 has {len(firsts)} texts, data_2 {len(seconds)}; give one against several, or as many")
        firsts = firsts * (len(seconds) // len(firsts)) if firsts else firsts
        fields = _pooled(pooling_params, truncate_prompt_tokens, "use_activation", "truncate_prompt_tokens")
        questions = []
        for start in range(0, len(seconds), _PAIRS_OF_A_REQUEST):
            part = slice(start, start + _PAIRS_OF_A_REQUEST)
            body = {**fields, "text_1": firsts[part], "text_2": seconds[part]}
            questions.append(_Question("/v1/score", body, f"data_2[{start}:{start + len(seconds[part])}]"))
        found = self._all(self._with_adapters(questions, lora_request), _scores, use_tqdm, "Processed pairs")
        return [output for outputs in found for output in outputs]

    # ----------------------------------------------------------------------------------------------------- commands

    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer(self._call)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters used if `sampling_params` is None and the model's files have none."""
        return SamplingParams()

    def get_metrics(self) -> list[Metric]:
        """Return the present counters, gauges and histograms of the engine."""
        from tokamak.metrics import metrics_of  # a parser that few need

        reply = self._asker.ask("GET", "/metrics")
        if reply.status != 200:
            raise error_of(reply, "/metrics")
        return metrics_of(reply.body.decode())

    def sleep(self, level: int = 1) -> None:
        """Release the memory of the weights until `wake_up`, and clear caches. Both levels do the same."""
        self._call("/admin/sleep", {})
        self._is_asleep = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Load the weights again. `tags` has no effect: all are loaded."""
        self._call("/admin/wake", {})
        self._is_asleep = False

    def reset_prefix_cache(self) -> bool:
        self._call("/admin/reset_prefix_cache", {})
        return True

    def shutdown(self) -> None:
        """Stop the engine. May be called again."""
        self._asker.cancel()
        self._engine.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    # ----------------------------------------------------------------------------------------------------- requests

    def _fields(self, params: SamplingParams | None) -> dict[str, Any]:
        """Return the fields of a generation request. Without parameters, those of the model's files apply."""
        fields = {"max_tokens": SamplingParams().max_tokens} if params is None else params.fields()
        fields |= {"return_token_ids": True, "timings": True}
        if "logprobs" in fields:
            fields["logprobs_by_id"] = True
        if self._seed is not None and "seed" not in fields:
            fields["seed"] = (self._seed + _SEED_STEP * (1 + next(self._counter))) % (1 << 63)
        if params is not None and params.skip_reading_prefix_cache:
            fields["cache_salt"] = uuid.uuid4().hex
        return fields

    def _with_adapters(self, questions: list[_Question], lora_request: Any) -> list[_Question]:
        """Set the model of each question: an adapter has `lora_name` and `lora_path`, and is loaded on first use."""
        adapters = _one_each(lora_request, len(questions), "lora_request")
        for question, adapter in zip(questions, adapters, strict=True):
            if adapter is not None:
                self._load_adapter(adapter.lora_name, str(adapter.lora_path))
                question.body["model"] = adapter.lora_name
        return questions

    def _load_adapter(self, name: str, path: str) -> None:
        if path and self._adapters.get(name) != path:
            self._call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, "load_inplace": True})
            self._adapters[name] = path

    def _all(self, questions: list[_Question], read: Callable[[_Question, Any], P], use_tqdm: Any, what: str) -> list[P]:
        """Return `read` of each answer, in order."""
        return self._each(questions, lambda question, asker: self._ask(question, read, asker), use_tqdm, what)

    def _each(
        self,
        questions: list[_Question],
        answer: Callable[[_Question, Asker | None], P],
        use_tqdm: Any,
        what: str,
        concurrency_limit: int | None = None,
    ) -> list[P]:
        """Return `answer` of each question, in order."""
        if self._is_asleep:
            raise RuntimeError("the engine sleeps; call wake_up() first")
        with _progress_bar(use_tqdm, len(questions), what) as step:
            if len(questions) < 2:
                found = [answer(question, None) for question in questions]
                step()
                return found
            # separate, so that its requests can be cancelled separately
            asker = Asker(Server(self._engine.url, self._engine.key), self._engine.is_alive, _PATIENCE_S)
            threads = max(1, min(concurrency_limit or self._concurrency, self._concurrency, len(questions)))
            answers = InOrder(questions, lambda each: answer(each, asker), threads, len(questions), lambda *_: step())
            try:
                return list(answers)
            finally:  # an error, or Ctrl+C: requests in flight are useless
                asker.cancel()

    def _ask(self, question: _Question, read: Callable[[_Question, Any], P], asker: Asker | None = None) -> P:
        return read(question, self._call(question.path, question.body, asker, question.where))

    def _call(self, path: str, body: dict[str, Any] | None = None, asker: Asker | None = None, where: str = "") -> Any:
        """Return the answer of a route. ValueError if it refuses; EngineDeadError if the engine has ended."""
        try:
            content = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError as error:
            raise ValueError(f"{where or path}: {error}") from None
        try:
            reply = (asker or self._asker).ask("GET" if body is None else "POST", path, content)
        except LostError as error:
            if self._engine.is_alive():
                raise
            cause = self._engine.cause_of_death() if self._engine.stop.alive else "it was shut down"
            raise EngineDeadError(f"the engine has ended: {cause}") from error
        if reply.status == 200:
            return orjson.loads(reply.body)
        raise error_of(reply, where)

    def _chat_completion(self, question: _Question, answer: Any) -> RequestOutput:
        prompt = self._call("/detokenize", {"tokens": answer["choices"][0]["prompt_token_ids"]})["prompt"]
        return chat_output(answer, prompt, _has_text(question.params))


def _completion(question: _Question, answer: Any) -> RequestOutput:
    return completion_output(answer, question.prompt.text if question.prompt else None, _has_text(question.params))


def _embedding(question: _Question, answer: Any) -> EmbeddingRequestOutput:
    return embedding_output(answer)


def _scores(question: _Question, answer: Any) -> list[ScoringRequestOutput]:
    return scoring_outputs(answer)


def _has_text(params: SamplingParams | None) -> bool:
    return params is None or params.detokenize


def _one_each(given: Any, count: int, name: str) -> list[Any]:
    """Return one value per item, from one for all or a list."""
    if not isinstance(given, (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{name} has {len(given)} entries for {count} prompts; give one, or as many")
    return list(given)


def _sampled(given: Any, count: int) -> list[SamplingParams | None]:
    each = _one_each(given, count, "sampling_params")
    for params in each:
        if params is not None and not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params has a {type(params).__name__}, expected SamplingParams")
    return each


def _known(given: Mapping[str, Any] | None, *names: str) -> dict[str, Any]:
    for name in given or ():
        if name not in names:
            raise ValueError(f"tokenization_kwargs: {name} is not supported; known are {', '.join(names)}")
    return dict(given or {})


def _pooled(params: PoolingParams | None, truncate_prompt_tokens: int | None, *names: str) -> dict[str, Any]:
    fields = params.fields(*names) if params is not None else {}
    if truncate_prompt_tokens is not None:
        fields["truncate_prompt_tokens"] = truncate_prompt_tokens
    return {**fields, "return_token_ids": True}


def _bare(prompt: Prompt) -> str | list[int]:
    if prompt.extra:
        raise ValueError(f"{', '.join(prompt.extra)}: vectors are of texts and token ids alone; leave it out")
    return prompt.content


def _texts(given: Any, name: str) -> list[str]:
    texts = [prompt.content for prompt in prompts_of(given)]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} has token ids; pairs are of texts")
    return cast(list[str], texts)


@contextlib.contextmanager
def _progress_bar(wanted: Any, total: int, what: str) -> Iterable[Callable[[], Any]]:  # type: ignore[misc]
    """Yield a function to call for each finished item."""
    if not wanted or total == 0:
        yield lambda: None
        return
    if wanted is True:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(what, total=total)
            yield lambda: progress.advance(task)
        return
    with wanted(total=total, desc=what, dynamic_ncols=True) as bar:
        yield bar.update
