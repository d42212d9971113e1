"""llama.cpp's library as a peer of `tokamak bench compare` (peers.md), behind plain_server.py.

Run with an interpreter that has llama-cpp-python, starlette, uvicorn and orjson:

    PYTHONPATH=. python -m tools.bench.llama_server FILE.gguf PORT [SEQUENCES CONTEXT [UNIFIED]]

Continuous batching as in its own server: each step decodes a token of every stream and as much of the prompts as fits in the
batch. LLAMA_CPP_LIB_PATH is the folder of a separately built libllama.so. The sequences divide the context among
them, or share it (UNIFIED is 1).
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

import llama_cpp
import numpy as np

from tools.bench.plain_server import Engine, Stream, serve

NUM_THREADS = 2
NUM_SEQUENCES, CONTEXT = 32, 20480
BATCH = 2048  # as in its own server


@dataclass(slots=True)
class Sequence:
    """Sequence of a stream in the cache: `pending` tokens are to be computed from `position` on."""

    number: int
    pending: list[int]
    position: int = 0
    output_row: int = -1  # row of the step's batch with logits


class Library(Engine):
    def __init__(self, path: str, num_sequences: int = NUM_SEQUENCES, context: int = CONTEXT, unified: int = 0) -> None:
        super().__init__()
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        assert self._model, f"{path} was not loaded"
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max = context, BATCH, num_sequences
        options.kv_unified, options.swa_full = bool(unified), False  # the latter as in its own server
        options.n_threads = options.n_threads_batch = NUM_THREADS
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(self._vocabulary)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._free = list(range(num_sequences))
        self._streams: list[Stream] = []

    def run(self) -> None:
        while True:
            while not self._streams or (self._free and not self.incoming.empty()):
                self._add(self.incoming.get())
            self._step()
            for stream in list(self._streams):
                self._deliver(stream)

    def _add(self, stream: Stream) -> None:
        text = stream.prompt.encode()
        tokens = (ctypes.c_int32 * (len(text) + 8))()
        count = llama_cpp.llama_tokenize(self._vocabulary, text, len(text), tokens, len(tokens), False, True)
        stream.num_prompt_tokens = count
        stream.state = Sequence(self._free.pop(), list(tokens[:count]))
        self._streams.append(stream)

    def _step(self) -> None:
        batch, row = self._batch, 0
        for stream in sorted(self._streams, key=lambda stream: len(stream.state.pending)):  # decoding sequences come first
            sequence: Sequence = stream.state
            count = min(len(sequence.pending), BATCH - row)
            for token_id in sequence.pending[:count]:
                batch.token[row], batch.pos[row] = token_id, sequence.position
                batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, sequence.number, 0
                sequence.position, row = sequence.position + 1, row + 1
            del sequence.pending[:count]
            sequence.output_row = -1
            if count and not sequence.pending:
                batch.logits[row - 1], sequence.output_row = 1, row - 1
        batch.n_tokens = row
        code = llama_cpp.llama_decode(self._context, batch)
        assert code == 0, f"llama_decode: {code}"

    def _deliver(self, stream: Stream) -> None:
        sequence: Sequence = stream.state
        if sequence.output_row < 0:
            return
        logits = llama_cpp.llama_get_logits_ith(self._context, sequence.output_row)
        token_id = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
        stream.token_ids.append(token_id)
        sequence.pending.append(token_id)
        piece = ctypes.create_string_buffer(64)
        size = llama_cpp.llama_token_to_piece(self._vocabulary, token_id, piece, len(piece), 0, True)
        stream.put((piece.raw[: max(size, 0)].decode(errors="replace"), 1))
        if len(stream.token_ids) == stream.max_tokens:
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), sequence.number, -1, -1)
            self._free.append(sequence.number)
            stream.put(None)
            self._streams.remove(stream)


if __name__ == "__main__":
    serve(Library(sys.argv[1], *map(int, sys.argv[3:])), int(sys.argv[2]))
