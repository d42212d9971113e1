"""Work of ops in profiles: bytes that must move once, and arithmetic, in the present step."""

from __future__ import annotations

import numpy as np

from ops.cpu.array import array_of
from ops.cpu.executors import Recording
from ops.cpu.table import make_table
from ops.cpu.work import Work, attention_work, bytes_of, latent_attention_work
from ops.modules import AttentionShape, LatentShape, LayerCache, Linear
from ops.table import HAS_BOUNDS
from ops.weight_format import BFLOAT16
from tests.ops.packing import pack
from tests.ops.steps import HandMadeStep


def test_bytes_of_anything() -> None:
    array = array_of(np.zeros((3, 5), np.float32))
    assert bytes_of(array, None, (array, np.zeros(7, np.int8)), 3) == 60 + 60 + 7
    assert bytes_of(array_of(np.zeros(100, np.uint8))) == 100


def test_linear_reads_weights_and_rows_once() -> None:
    counts = np.array([2], np.int32)
    recording = Recording()
    k = make_table(recording)
    module = Linear(("model.layers.0.mlp.down_proj",), 32, (48,))
    pack(k, module, weight=np.ones((48, 32), np.float32))
    x = recording.allocate(recording.rows(counts, 0, 8), 32)
    tape = recording.finish(k.linear(x, module))
    for rows in (2, 5):
        counts[0] = rows
        (op,) = tape.profile()
        assert (op.kind, op.name) == ("linear", "model.layers.0.mlp.down_proj")
        assert op.work == Work(4 * (48 * 32 + rows * (48 + 32)), 2 * rows * 48 * 32)
    assert len(tape.replay_timed()) == 1


def test_attention_counts_the_keys_that_are_seen() -> None:
    step = HandMadeStep([(2, 0, 3), (4, 70, 1), (5, 9, 0)], row_tile=1)
    queries = array_of(np.zeros((4, 32), np.float32))
    cache = LayerCache(np.zeros((40, 16 * 8 * 4), np.uint8), np.zeros((40, 16 * 8 * 4), np.uint8), 16)
    for window, num_seen, num_read in ((0, 1 + 2 + 3 + 71, 3 + 71), (2, 1 + 2 + 2 + 2, 3 + 2)):
        found = attention_work(queries, queries, step.inputs, AttentionShape(4, 1, 8, window), cache)
        assert found == Work(2 * 4 * 4 * 32 + num_read * 2 * 8 * 4, 4 * 4 * 8 * num_seen)


def test_attention_counts_within_bounds_of_keys() -> None:
    step = HandMadeStep([(2, 0, 3), (4, 70, 1)], row_tile=1)
    queries = array_of(np.zeros((4, 32), np.float32))
    cache = LayerCache(np.zeros((40, 16 * 8 * 4), np.uint8), np.zeros((40, 16 * 8 * 4), np.uint8), 16)
    step.inputs.host_counts[HAS_BOUNDS] = 1
    step.inputs.first_keys[:4] = np.array([0, 0, 1, 60], np.int32)
    step.inputs.last_keys[:4] = np.array([2, 2, 2, 70], np.int32)
    found = attention_work(queries, queries, step.inputs, AttentionShape(4, 1, 8, 0), cache)
    assert found.num_operations == 4 * 4 * 8 * (3 + 3 + 2 + 11)


def test_latents_are_keys_and_values_and_read_once() -> None:
    step = HandMadeStep([(2, 0, 3), (4, 70, 1)], row_tile=1)
    shape = LatentShape(4, 3, 8, 32, 1.0)
    cache = LayerCache(np.zeros((40, 16 * 8 * 2), np.uint8), np.zeros((40, 16 * 32 * 2), np.uint8), 16, "bfloat16")
    queries = array_of(np.zeros((4, 44), np.float32))
    found = latent_attention_work((queries,), step.inputs, shape, cache)
    num_seen, num_read = 1 + 2 + 3 + 71, 3 + 71
    assert found == Work(4 * 4 * 44 + num_read * 2 * 40, 2 * 4 * (32 + 8 + 32) * num_seen, BFLOAT16)
