"""Models with experts, in many shapes, compared with a forward pass in numpy, float64: layers with experts, routing and
weights, shared experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.messages import SamplingParams
from tests.workers.checkpoints import drawn_tensors, write_checkpoint
from tests.workers.forward import Forward
from tests.workers.serving import ServedSequence, Serving, make_runner
from workers.models import declare_model
from workers.models.mlp import Mixture

COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
QWEN = {**COMMON, "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "moe_intermediate_size": 20}
ERNIE = {**COMMON, "architectures": ["Ernie4_5_MoeForCausalLM"], "moe_intermediate_size": 20}
SHAPES: dict[str, dict[str, Any]] = {
    "12 experts, 3 chosen, weights as they are": {**QWEN, "num_experts": 12, "num_experts_per_tok": 3},
    "every other layer, normalized": {
        **QWEN,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    },
    "first layer dense, one expert chosen, gelu, tied": {
        **QWEN,
        "num_experts": 5,
        "num_experts_per_tok": 1,
        "mlp_only_layers": [0],
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "all experts chosen": {**QWEN, "num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True},
    "no sparse layer": {**QWEN, "mlp_only_layers": [0, 1, 2]},
    "ernie, no shared experts": {**ERNIE, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 0},
    "ernie, two shared experts, every other layer": {
        **ERNIE,
        "num_hidden_layers": 5,
        "moe_num_experts": 16,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 0,
        "moe_layer_interval": 2,
        "moe_layer_end_index": 3,
        "moe_norm_min": 0.9,
    },
    "ernie, biases of all but experts, tied": {
        **ERNIE,
        "moe_num_experts": 5,
        "moe_k": 2,
        "use_bias": True,
        "moe_num_shared_experts": 1,
        "tie_word_embeddings": True,
    },
    "ernie, biases, not tied": {**ERNIE, "moe_num_experts": 4, "moe_k": 2, "use_bias": True, "tie_word_embeddings": False},
    "ernie, uncorrected": {**ERNIE, "moe_num_experts": 7, "moe_k": 3, "moe_use_aux_free": False, "moe_num_shared_experts": 1},
}
SPARSE = {  # by the models' own rules, worked out by hand
    "every other layer, normalized": [1],
    "first layer dense, one expert chosen, gelu, tied": [1, 2],
    "no sparse layer": [],
    "ernie, no shared experts": [1, 2],
    "ernie, two shared experts, every other layer": [1, 3],
    "ernie, uncorrected": [1, 2],
}
PROMPT = [5 + index * 11 % 80 for index in range(40)]


@pytest.mark.parametrize("name", SHAPES)
def test_mixture_agrees_with_numpy(name: str, tmp_path: Path) -> None:
    """Every prompt token's log-probability, and the most likely answer, of the reference and of the native ops, whole and in
    chunks."""
    config = write_checkpoint(tmp_path, SHAPES[name])
    expected = Forward(config, drawn_tensors(config)).logprobs(PROMPT)
    for options in ({"ops": "reference", "plan": "eager"}, {"ops": "native"}):
        runner = make_runner(tmp_path, max_model_len=128, num_kv_blocks=40, **options)
        answers = []
        for chunk in (512, 7):
            serving = Serving(runner, chunk=chunk)
            sequence = ServedSequence(PROMPT, SamplingParams(temperature=0.0, num_logprobs=2, num_prompt_logprobs=0), 4)
            serving.place(sequence, 1)
            serving.run([sequence])
            answers.append(sequence.answer())
        found = [sequence.prompt_logprobs[position] for position in range(1, len(PROMPT))]
        np.testing.assert_allclose(found, expected[np.arange(len(PROMPT) - 1), PROMPT[1:]], atol=2e-4)
        assert sequence.outputs[0] == expected[-1].argmax()
        assert answers[0] == answers[1]


@pytest.mark.parametrize("name", SPARSE)
def test_config_decides_which_layers_are_sparse(name: str, tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path, SHAPES[name])
    model, _ = declare_model(config)
    assert [index for index, layer in enumerate(model.layers) if isinstance(layer.mlp, Mixture)] == SPARSE[name]
