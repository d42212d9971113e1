"""Speed of llama.cpp's vision encoder: a peer of `tokamak bench step --phase encode`.

Run with an interpreter that has llama-cpp-python. LLAMA_CPP_LIB_PATH and MTMD_CPP_LIB: the build folder:

    python tools/bench/llama_encoder.py MODEL.gguf MMPROJ.gguf WIDTHxHEIGHT [REPETITIONS]
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp

NUM_THREADS = 2
PATCH_PIXELS, PATCHES_A_TOKEN = 14, 4


def main(model_path: str, projector_path: str, size: str, repetitions: str = "2") -> None:
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(model_path.encode(), llama_cpp.llama_model_default_params())
    options = mtmd_cpp.mtmd_context_params_default()
    options.use_gpu, options.warmup, options.n_threads = False, False, NUM_THREADS
    context = mtmd_cpp.mtmd_init_from_file(projector_path.encode(), model, options)
    assert context, f"{projector_path} was not loaded"
    width, height = map(int, size.split("x"))
    text = mtmd_cpp.mtmd_default_marker()
    rates = []
    for number in range(1 + int(repetitions)):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
        data = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmaps = (mtmd_cpp.mtmd_bitmap_p_ctypes * 1)(mtmd_cpp.mtmd_bitmap_init(width, height, data))
        chunks = mtmd_cpp.mtmd_input_chunks_init()
        code = mtmd_cpp.mtmd_tokenize(
            context, chunks, ctypes.byref(mtmd_cpp.mtmd_input_text(text, len(text), True, True)), bitmaps, 1
        )
        assert code == 0, f"mtmd_tokenize: {code}"
        for index in range(mtmd_cpp.mtmd_input_chunks_size(chunks)):
            chunk = mtmd_cpp.mtmd_input_chunks_get(chunks, index)
            if mtmd_cpp.mtmd_input_chunk_get_type(chunk) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE:
                begin = time.perf_counter()
                assert mtmd_cpp.mtmd_encode_chunk(context, chunk) == 0, "mtmd_encode_chunk failed"
                num_patches = PATCHES_A_TOKEN * mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk)
                rates.append(num_patches / (time.perf_counter() - begin))
    print(f"llama.cpp: {statistics.median(rates[1:]):.1f} patches/s, {num_patches} patches")


if __name__ == "__main__":
    main(*sys.argv[1:])
