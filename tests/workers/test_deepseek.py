"""DeepSeek-V3 with other shapes and options than the golden one, compared with its paper's formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import CheckpointError
from engine.messages import SamplingParams
from tests.workers.checkpoints import drawn_tensors, write_checkpoint, write_safetensors
from tests.workers.deepseek import CONFIG, DeepseekForward
from tests.workers.serving import ServedSequence, Serving, make_runner
from tests.workers.weights.formats.quantizers import Format, fp8_blocks, pack_quantized, write_quantized
from workers.engine.runner import ModelRunner

PROMPT = np.random.default_rng(3).integers(0, 96, 70).tolist()
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}

VARIANTS: dict[str, dict[str, Any]] = {
    "queries as they are, one group, no dense layer": {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    },
    "odd sizes, no shared expert": {
        "hidden_size": 30,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 17,
        "kv_lora_rank": 37,
        "qk_nope_head_dim": 11,
        "qk_rope_head_dim": 6,
        "v_head_dim": 13,
        "n_shared_experts": 0,
        "norm_topk_prob": False,
    },
    "halves, biases, yarn, 16 experts in 4 groups": {
        "rope_interleave": False,
        "attention_bias": True,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        "n_routed_experts": 16,
        "n_group": 4,
    },
    "wide latents, many heads, all dense, older yarn": {
        "kv_lora_rank": 96,
        "qk_rope_head_dim": 64,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "first_k_dense_replace": 3,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "mscale_all_dim": 1.0},
    },
}


def answer(runner: ModelRunner, chunk: int) -> ServedSequence:
    sampling = SamplingParams(temperature=0.0, num_logprobs=3, num_prompt_logprobs=0)
    sequence = ServedSequence(PROMPT, sampling, num_outputs=6)
    serving = Serving(runner, chunk=chunk)
    serving.place(sequence, 3)
    serving.run([sequence])
    return sequence


def errors(sequence: ServedSequence, logprobs: np.ndarray) -> np.ndarray:
    of_prompt = [abs(value - logprobs[place - 1, PROMPT[place]]) for place, value in sequence.prompt_logprobs.items()]
    of_answer = [
        abs(value - logprobs[len(PROMPT) - 1 + index, token_id])
        for index, (token_ids, values) in enumerate(sequence.tops)
        for token_id, value in zip(token_ids, values, strict=True)
    ]
    assert len(of_prompt) == len(PROMPT) - 1
    assert len(of_answer) == 18
    return np.array(of_prompt + of_answer)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_shapes_agree_with_the_reference(variant: str, tmp_path: Path) -> None:
    config = CONFIG | VARIANTS[variant]
    model = write_checkpoint(tmp_path, config)
    forward = DeepseekForward(config, model, drawn_tensors(model))
    for options in ({"ops": "reference", "plan": "eager"}, {"ops": "native", "plan": "tape", "threads": 2}):
        runner = make_runner(tmp_path, **options)
        sequence = answer(runner, 512)
        assert errors(sequence, forward.logprobs(sequence.tokens)).max() < 2e-5
        assert answer(runner, 16).answer() == sequence.answer()


# How far most log-probabilities may be from those of float32, with weights as large as these. A few are far: of rows that come
# to have another expert.
PRECISIONS: list[tuple[dict[str, str], float]] = [
    ({"kv_cache_dtype": "bfloat16"}, 0.01),
    ({"kv_cache_dtype": "int8"}, 0.02),
    ({"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, 0.02),
    ({"quantization": "wint8", "kv_cache_dtype": "int8"}, 0.1),
    ({"quantization": "wint4", "dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, 0.6),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DeepseekForward]:
    path = tmp_path_factory.mktemp("deepseek")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "q_lora_rank": 32, "v_head_dim": 16}
    config = CONFIG | sizes
    model = write_checkpoint(path, config)
    return path, DeepseekForward(config, model, drawn_tensors(model))


@pytest.mark.slow
@pytest.mark.parametrize(("options", "limit"), PRECISIONS, ids=str)
def test_precisions_stay_near_float32(options: dict[str, str], limit: float, checkpoint: tuple[Path, DeepseekForward]) -> None:
    """Near float32, and the same bits in chunks."""
    path, forward = checkpoint
    runner = make_runner(path, ops="native", plan="tape", **options)
    sequence = answer(runner, 512)
    assert np.median(errors(sequence, forward.logprobs(sequence.tokens))) < limit
    assert answer(runner, 11).answer() == sequence.answer()


@pytest.mark.parametrize(
    ("format", "limit"), [(fp8_blocks(16, 32), 1e-5), (pack_quantized(4, 32), 0.1)], ids=["fp8 blocks", "packed 4"]
)
def test_quantized_latents_use_stored_integers(
    format: Format, limit: float, checkpoint: tuple[Path, DeepseekForward], tmp_path: Path
) -> None:
    """The stored integers are used, also where a linear is split for the heads."""
    forward = checkpoint[1]
    worth = write_quantized(tmp_path, forward.config, forward.tensors, format)
    sequence = answer(make_runner(tmp_path), 512)
    assert np.median(errors(sequence, DeepseekForward(forward.config, forward.model, worth).logprobs(sequence.tokens))) < limit


def test_packed_weights_give_the_same_answers(checkpoint: tuple[Path, DeepseekForward], tmp_path: Path) -> None:
    """Stored in a file, and mapped from it."""
    answers = []
    for outcome in ("miss", "hit"):
        runner = make_runner(checkpoint[0], dtype="bfloat16", weight_cache_dir=str(tmp_path), weight_cache_limit=1 << 30)
        assert runner.weights.cache == outcome
        answers.append(answer(runner, 64).answer())
    assert answers[0] == answers[1]


def test_too_wide_latents_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG | {"num_hidden_layers": 1, "kv_lora_rank": 514})
    with pytest.raises(CheckpointError, match="latents have 514 elements, the limit of the native ops is 512; use --ops ref"):
        make_runner(tmp_path)


def test_mtp_layers_are_ignored_without_the_option(tmp_path: Path) -> None:
    """Layers that predict further tokens are ignored; tensors that no option explains are refused."""
    config = CONFIG | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    model = write_checkpoint(tmp_path, config)
    tensors = drawn_tensors(model)
    further = {"eh_proj": (48, 96), "shared_head.norm": (48,), "mlp.gate": (12, 48)}
    for index, is_refused in ((2, False), (3, True)):
        more = {f"model.layers.{index}.{name}.weight": np.ones(shape, np.float32) for name, shape in further.items()}
        write_safetensors(tmp_path / "model.safetensors", tensors | more)
        if is_refused:
            with pytest.raises(CheckpointError, match=r"model\.layers\.3\.eh_proj\.weight \[48, 96\] is unexpected"):
                make_runner(tmp_path)
        else:
            make_runner(tmp_path)
