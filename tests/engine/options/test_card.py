"""Size of the KV cache on a card with known memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.checkpoint.families.experts import ExpertsConfig
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.stored_weights import StoredWeights
from engine.config import EngineConfig
from engine.errors import OptionError
from engine.options.read import read_options
from engine.options.resolve import resolve
from engine.options.resolve_card import CardNeeds, card_blocks, card_needs
from engine.options.resolve_device import InstalledPaddle
from tests.paths import GOLDEN
from tests.workers.checkpoints import write_config
from tools.demo import MODEL
from workers.models import declare_model
from workers.rank_group.share import TensorShare

GIB = 1 << 30
NEEDS = CardNeeds(weights=3 * GIB, inputs=GIB, step=2 * GIB, graphs=GIB)

DENSE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
MIXTURE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
SHAPES = {
    "dense": DENSE,
    "one KV head": {**DENSE, "num_key_value_heads": 1},
    "wide norms": {**DENSE, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]},
    "experts": MIXTURE,
}


def configure(*arguments: str, memory: int = 2 * GIB) -> EngineConfig:
    cards = InstalledPaddle("3.3.1", {"gpu": 1, "npu": 1}, memory={"gpu": memory} if memory else {})
    return resolve(read_options([str(MODEL), *arguments], {}), ask_paddle=lambda: cards)[0]


@pytest.mark.parametrize(("card", "share", "block"), [(80 * GIB, 0.9, 1 << 20), (10 * GIB, 1.0, 3 << 20), (16 * GIB, 0.5, 7)])
def test_all_that_is_left_is_blocks(card: int, share: float, block: int) -> None:
    found = card_blocks(card, share, NEEDS, block)
    assert (found + 1) * block + NEEDS.total <= card * share < (found + 2) * block + NEEDS.total


def test_no_room_is_an_error_with_each_part() -> None:
    with pytest.raises(OptionError) as error:
        card_blocks(8 * GIB, 0.8, NEEDS, 1 << 20)
    assert str(error.value).startswith(
        "--gpu-memory-utilization 0.8 of 8 GiB GPU memory leaves no room for a KV cache: weights 3 GiB, inputs 1 GiB, "
        "step 2 GiB, graphs 1 GiB, and 2 MiB for two blocks; raise it, lower --max-num-batched-tokens"
    )


def test_requested_cache_must_fit_the_card() -> None:
    assert configure("--device", "gpu", "--kv-cache-memory", "1GiB").kv_cache_bytes > 0.9 * GIB
    with pytest.raises(OptionError, match=r"of GPU memory \(KV cache 4 GiB, weights .*, but 2 GiB are there; lower --num-kv-"):
        configure("--device", "gpu", "--kv-cache-memory", "4GiB")
    assert configure("--device", "gpu", "--kv-cache-memory", "4GiB", "--no-check-memory").kv_cache_bytes > 3 * GIB


def test_weights_are_counted_in_the_files(tmp_path: Path) -> None:
    assert StoredWeights.read(tmp_path) == StoredWeights()
    stored = sum(path.stat().st_size for path in MODEL.glob("*.safetensors"))
    assert stored / 4.1 < StoredWeights.read(MODEL).num_values < stored
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert StoredWeights.read(tmp_path) == StoredWeights(), "the loader reports the error"


def test_cache_gets_the_remaining_memory() -> None:
    config = configure("--device", "gpu")
    assert config.is_cache_estimated
    smaller = configure("--device", "gpu", "--gpu-memory-utilization", "0.6")
    bytes_per_block = config.kv_cache_bytes / (config.num_kv_blocks + 1)
    assert (config.num_kv_blocks - smaller.num_kv_blocks) * bytes_per_block == pytest.approx(0.3 * 2 * GIB, rel=0.01)
    captured = configure("--device", "gpu", "--plan", "captured")
    assert captured.num_kv_blocks < config.num_kv_blocks, "graphs take a part"
    assert configure("--device", "gpu", "--max-num-batched-tokens", "2048").num_kv_blocks < config.num_kv_blocks


def test_rounded_weights_leave_more_of_it() -> None:
    """A value is a byte or less; embeddings are floats, and their head has a copy of its own."""
    model, values, count = ModelConfig.read(MODEL), read_options([str(MODEL)], {}).values, StoredWeights.read(MODEL).num_values
    embedding = model.vocab_size * model.hidden_size
    assert model.tie_word_embeddings
    found = {}
    for name in ("none", "wint8", "wint4"):
        found[name] = card_needs(model, count, values | {"quantization": name}, 512, 0).weights - 4 * embedding
    assert found["none"] == 4 * count
    assert found["wint8"] == count
    assert found["wint4"] == pytest.approx(embedding + 0.625 * (count - embedding), abs=1)


@pytest.mark.parametrize(("size", "shares_experts"), [(1, False), (2, False), (8, False), (1, True), (4, True)])
@pytest.mark.parametrize("name", SHAPES)
def test_weights_are_those_that_a_rank_holds(name: str, size: int, shares_experts: bool, tmp_path: Path) -> None:
    """The models declare which columns a rank computes."""
    model = write_config(tmp_path, SHAPES[name])
    whole, _ = num_held(model, TensorShare())
    held, embedding = num_held(model, TensorShare(0, size, shares_experts))
    values = read_options([str(MODEL)], {}).values | {"tensor_parallel_size": size, "enable_expert_parallel": shares_experts}
    values |= {"data_parallel_size": 2}
    found = card_needs(model, whole + embedding, values, 512, 0)
    assert 0.999 * (held + embedding) <= found.weights / 4 <= 1.02 * (held + embedding)
    assert (found.exchange > 0) == (size > 1 or (shares_experts and model.experts is not None))


def num_held(model: ModelConfig, share: TensorShare) -> tuple[int, int]:
    """Return the numbers of weights in a rank's matrices, and in the embedding."""
    _, weights = declare_model(model, share)
    linears = [*weights.linears, *weights.encoder_linears, *(router.linear for router in weights.routers)]
    linears += [linear for mixture in weights.mixtures for part in mixture.parts.values() for linear in part]
    outputs = (sum(end - begin for begin, end in linear.columns) or linear.width for linear in linears)
    num_values = sum(linear.num_inputs * count for linear, count in zip(linears, outputs, strict=True))
    return num_values, sum(embedding.num_rows * embedding.width for embedding in weights.embeddings)


def test_mixture_needs_memory_beside_its_rows() -> None:
    """Memory for its weights, at most 64 MiB of them, and for the results of all experts of each row."""
    model, values = ModelConfig.read(GOLDEN / "qwen3_moe"), read_options([str(MODEL)], {}).values

    def step_of(experts: ExpertsConfig | None) -> int:
        return card_needs(msgspec.structs.replace(model, experts=experts), 0, values, 512, 0).step

    experts, dense = model.experts, step_of(None)
    assert experts is not None
    assert step_of(experts) - dense == 4 * 8 * 2 * 48 * 64
    large = msgspec.structs.replace(experts, num_experts=4000, num_chosen=100)
    assert step_of(large) - dense > (64 << 20) + 4 * 512 * 100 * 64


def test_explicit_size_wins() -> None:
    for arguments in (["--num-kv-blocks", "77"], ["--kv-cache-memory", "8MiB", "--gpu-memory-utilization", "0.2"]):
        config = configure("--device", "gpu", *arguments)
        assert not config.is_cache_estimated
        assert config.kv_cache_bytes <= 8 << 20 or config.num_kv_blocks == 77


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--device", "cpu", "--ops", "reference"], "the engine runs on the CPU"),
        (["--device", "cpu"], "the engine runs on the CPU"),
        (["--device", "npu"], "does not report the memory of npu"),
        (["--device", "gpu", "--num-kv-blocks", "77"], "the size of the KV cache is set"),
    ],
)
def test_ineffective_memory_share_is_noted(arguments: list[str], why: str) -> None:
    cards = InstalledPaddle("3.3.1", {"gpu": 1, "npu": 1}, memory={"gpu": 2 * GIB})
    options = read_options([str(MODEL), "--gpu-memory-utilization", "0.5", *arguments], {})
    resolve(options, ask_paddle=lambda: cards)
    assert [note for note in options.notes if "has no effect" in note and why in note], options.notes
    plain = read_options([str(MODEL), *arguments], {})
    resolve(plain, ask_paddle=lambda: cards)
    assert not any("gpu-memory-utilization" in note for note in plain.notes)


def test_a_device_that_does_not_tell_its_memory() -> None:
    assert not configure("--device", "npu").is_cache_estimated
    assert configure("--device", "npu").num_kv_blocks == configure("--device", "cpu", "--ops", "reference").num_kv_blocks
    with pytest.raises(OptionError, match=r"--gpu-memory-utilization 1\.5: expected a number from 0\.05 to 1"):
        configure("--device", "gpu", "--gpu-memory-utilization", "1.5")


def test_adapters_are_counted_unless_they_are_of_experts() -> None:
    card = InstalledPaddle("", {}, memory={"gpu": 2 * GIB}, gpus=(("A100", (8, 0)),))

    def blocks(*arguments: str) -> EngineConfig:
        return resolve(read_options([str(MODEL), "--device", "gpu", *arguments], {}), ask_paddle=lambda: card)[0]

    plain, adapted = blocks(), blocks("--enable-lora", "--max-loras", "8")
    block_bytes = plain.kv_cache_bytes // (plain.num_kv_blocks + 1)
    fewer = (plain.num_kv_blocks - adapted.num_kv_blocks) * block_bytes
    assert abs(fewer - (adapted.adapter_bytes - adapted.adapter_expert_bytes)) <= block_bytes
