"""Layout of recurrent states: parts do not overlap, and layers without attention take no pages."""

from __future__ import annotations

from msgspec.structs import astuple, replace

from engine.checkpoint.kv_cache_spec import KVCacheSpec, LayerPlace
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.recurrent_layer import RecurrentLayer
from engine.checkpoint.state_spec import ALIGNMENT, StateSpec
from engine.kv_groups import KvGroup
from tests.paths import GOLDEN

DELTA = RecurrentLayer(channels=96, kernel=4, matrix=(3, 16, 8), log_width=79)
CONVOLUTION = RecurrentLayer(channels=10, kernel=3)
MODEL = ModelConfig.read(GOLDEN / "qwen3")


def hybrid(layers: tuple[RecurrentLayer | None, ...], attention_layers: tuple[int, ...]) -> ModelConfig:
    return replace(
        MODEL,
        num_layers=len(layers),
        sliding_windows=(0,) * len(layers),
        recurrent_layers=layers,
        attention_layers=attention_layers,
    )


def test_parts_of_a_slot_are_aligned_and_apart() -> None:
    spec = StateSpec.of(hybrid((DELTA, None, CONVOLUTION, DELTA), (1,)), 4)
    assert spec is not None
    first, none, convolution, second = spec.places
    assert none is None
    sizes = {DELTA: (3 * 96, 3 * 16 * 8, 4 * 96, 4 * 79), CONVOLUTION: (2 * 10, 0, 4 * 10, 0)}
    end = 0
    for layer, places in ((DELTA, first), (CONVOLUTION, convolution), (DELTA, second)):
        assert places is not None
        for start, count in zip(astuple(places), sizes[layer], strict=True):
            assert start == end
            assert start % ALIGNMENT == 0
            end += -(-4 * count // ALIGNMENT) * ALIGNMENT
    assert spec.slot_bytes == end
    assert spec.arena_bytes(7) == 8 * end


def test_states_of_qwen3_next_have_48_mib() -> None:
    layer = RecurrentLayer(channels=8192, kernel=4, matrix=(32, 128, 128), log_width=8256)
    layers = tuple(None if index % 4 == 3 else layer for index in range(32))
    spec = StateSpec.of(hybrid(layers, tuple(range(3, 32, 4))), 0)
    assert spec is not None
    assert spec.slot_bytes == 24 * (32 * 128 * 128 + 3 * 8192) * 4


def test_slot_without_numbers_has_bytes() -> None:
    """Convolutions of one position need no window, but memory is divided by the size of a slot."""
    spec = StateSpec.of(hybrid((RecurrentLayer(channels=10, kernel=1), None), (1,)), 0)
    assert spec is not None
    assert spec.slot_bytes == ALIGNMENT


def test_models_without_recurrent_layers_have_no_states() -> None:
    assert StateSpec.of(MODEL, 3) is None
    assert StateSpec.of(hybrid((None, None), (0, 1)), 3) is None


def test_layers_without_attention_take_no_pages() -> None:
    model = hybrid((DELTA, None) * 4, (1, 3, 5, 7))
    spec, whole = KVCacheSpec.of(model, 16, "float32"), KVCacheSpec.of(replace(model, attention_layers=None), 16, "float32")
    assert spec.page_bytes == whole.page_bytes // 2
    assert [spec.places[layer] for layer in (1, 3, 5, 7)] == [LayerPlace(0, index) for index in range(4)]
    assert (len(spec.places), spec.num_tables) == (8, 1)


def test_windows_of_other_layers_are_theirs() -> None:
    model = replace(hybrid((DELTA, None) * 4, (1, 3, 5, 7)), sliding_windows=(0, 8, 0, 0) * 2)
    spec = KVCacheSpec.of(model, 16, "float32")
    assert spec.groups == (KvGroup(0), KvGroup(8))
    assert [spec.places[layer].table for layer in (1, 3, 5, 7)] == [1, 0, 1, 0]


def test_draft_layers_have_pages() -> None:
    model = replace(hybrid((DELTA, None) * 2, (1, 3)), num_draft_layers=1)
    spec = KVCacheSpec.of(model, 16, "float32", has_drafts=True)
    assert [spec.places[layer].index for layer in (1, 3, 4)] == [0, 1, 2]
    assert (len(spec.places), spec.layers_per_page, spec.has_marks) == (5, 3, True)


def test_model_without_attention_has_tiny_pages() -> None:
    spec = KVCacheSpec.of(hybrid((DELTA,) * 6, ()), 16, "float32")
    assert (spec.num_tables, spec.layers_per_page, len(spec.places)) == (1, 1, 6)
    assert spec.page_bytes == 16 * 4 * 4
