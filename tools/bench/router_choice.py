"""Time that a tokenizer takes to choose among many replicas. Used by `python -m tools.bench.routers`.

Runs in this process, on the shared memory of a run whose other processes do not exist.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from array import array
from pathlib import Path

from engine.block_keys import hash_blocks
from engine.messages import SamplingParams, SequencePart, SharedPart, TextOptions, TokenizedPrompt, TokensPrompt
from engine.options.read import read_options
from engine.options.resolve import resolve
from engine.process.context import ActorContext
from engine.process.run_directory import Run
from engine.process.segments import RunSegments, unlink_segments
from engine.process.topology import CACHE, SCHEDULER, default_plan, names_of
from engine.tokenizer.ready import ReadyPrompt, ReadyRequest, ReadySequence
from engine.tokenizer.replicas import Replicas
from shm.counters import State
from shm.fingerprints import KIND, FingerprintWriter, fingerprint_of
from shm.segment import Segment, segment_name
from tools.demo import MODEL

NUM_REPLICAS, NUM_TOKENS, NUM_CHOICES = 32, 4096, 200


def show_choice() -> None:
    """Print the median time of a choice for a prompt that no replica has cached, and for one that all have."""
    given = f"--model {MODEL} --data-parallel-size {NUM_REPLICAS} --num-kv-blocks 512 --threads 1"
    config, _ = resolve(read_options(given.split(), {}))
    names = [plan.name for plan in default_plan(config)]
    with tempfile.TemporaryDirectory(prefix="tokamak-bench-") as directory:
        segments = RunSegments.of(config, names)
        try:
            for name in names:
                segments.counters.actor(name).set_state(State.READY)
            for scheduler in names_of(SCHEDULER, NUM_REPLICAS):
                segments.counters.counter("num_free_slots", scheduler).set(64)
                segments.counters.counter("num_free_kv_blocks", scheduler).set(512)
            context = ActorContext(Run(config.run_id, Path(directory)), config, "tokenizer0", 1)
            replicas = Replicas(context)
            tokens = array("i", random.Random(1).choices(range(1, 1000), k=NUM_TOKENS))
            nowhere = _median_ms(replicas, _sequence(tokens))
            keys: list[bytes] = []
            hash_blocks(tokens, config.block_size, keys, len(tokens))
            for cache in names_of(CACHE, NUM_REPLICAS):
                writer = FingerprintWriter(Segment.attach(segment_name(config.run_id, KIND, cache)))
                writer.add_all(map(fingerprint_of, keys))
                writer.close()
            everywhere = _median_ms(replicas, _sequence(tokens))
            text = f"{nowhere:.2f} ms cached nowhere, {everywhere:.2f} ms cached everywhere"
            print(f"\nchoice among {NUM_REPLICAS} replicas for {NUM_TOKENS} tokens: {text}")
            replicas.close()
            context.close()
        finally:
            segments.close()
            unlink_segments(config.run_id)


def _sequence(tokens: array[int]) -> ReadySequence:
    shared = SharedPart("key", "api0", 1, SamplingParams(), TextOptions())
    prompt = ReadyPrompt.of(TokensPrompt(tokens.tobytes()), TokenizedPrompt(tokens.tobytes(), len(tokens)))
    return ReadySequence(ReadyRequest.of(shared, shared.sampling), prompt, SequencePart("r"))


def _median_ms(replicas: Replicas, sequence: ReadySequence) -> float:
    times = []
    for _ in range(NUM_CHOICES):
        begin_s = time.perf_counter()
        replicas.choose(sequence)
        times.append(time.perf_counter() - begin_s)
    return 1e3 * statistics.median(times)
