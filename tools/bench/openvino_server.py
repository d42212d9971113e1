"""OpenVINO GenAI as a peer of `tokamak bench compare` (peers.md), behind plain_server.py.

Run with an interpreter that has openvino-genai, starlette, uvicorn and orjson:

    PYTHONPATH=. python -m tools.bench.openvino_server MODEL_DIRECTORY PORT

One thread drives the continuous batching pipeline.
"""

from __future__ import annotations

import itertools
import sys

import openvino_genai

from tools.bench.plain_server import Engine, Stream, serve

CACHE_GB = 3
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 256
NUM_THREADS = 2
CONTEXT_TOKENS = 4  # decoded again with each new token, for correct spaces


class Pipeline(Engine):
    """The pipeline and the streams in it."""

    def __init__(self, model: str) -> None:
        super().__init__()
        settings = openvino_genai.SchedulerConfig()
        settings.cache_size = CACHE_GB
        settings.max_num_seqs = MAX_NUM_SEQS
        settings.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        settings.dynamic_split_fuse = True
        settings.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": NUM_THREADS}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, settings, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._streams: list[Stream] = []

    def run(self) -> None:
        request_ids = itertools.count()
        while True:
            while not self._streams or not self.incoming.empty():
                self._add(self.incoming.get(), next(request_ids))
            self._pipeline.step()
            for stream in list(self._streams):
                self._deliver(stream)

    def _add(self, stream: Stream, request_id: int) -> None:
        token_ids = self._tokenizer.encode(stream.prompt).input_ids
        stream.num_prompt_tokens = token_ids.shape[1]
        generation = openvino_genai.GenerationConfig()
        generation.max_new_tokens = stream.max_tokens
        generation.do_sample = False
        generation.ignore_eos = stream.ignore_eos
        stream.state = self._pipeline.add_request(request_id, token_ids, generation)
        self._streams.append(stream)

    def _deliver(self, stream: Stream) -> None:
        num_before = len(stream.token_ids)
        while stream.state.can_read():
            for output in stream.state.read().values():
                stream.token_ids.extend(output.generated_ids)
        if len(stream.token_ids) > num_before:
            first = max(0, num_before - CONTEXT_TOKENS)
            before = self._tokenizer.decode(stream.token_ids[first:num_before]) if num_before else ""
            text = self._tokenizer.decode(stream.token_ids[first:])[len(before) :]
            stream.put((text, len(stream.token_ids) - num_before))
        if stream.state.get_status() != openvino_genai.GenerationStatus.RUNNING:
            stream.put(None)
            self._streams.remove(stream)


if __name__ == "__main__":
    serve(Pipeline(sys.argv[1]), int(sys.argv[2]))
