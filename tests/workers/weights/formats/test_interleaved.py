"""Experts of gpt-oss, stored as one tensor for each layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.errors import CheckpointError
from ops.weight_format import WeightFormat, float32
from tests.workers.checkpoints import drawn_tensors, to_gpt_oss_layout, write_config, write_safetensors
from tests.workers.test_variants import VARIANTS
from tests.workers.variants import dequantized
from tests.workers.weights.formats.quantizers import FORMATS, write_tensors
from workers.models import declare_model
from workers.weights.reader import Checkpoint

CONFIG = VARIANTS["gpt_oss mxfp4"]["config"]
BLOCKS, SCALES = (f"model.layers.0.mlp.experts.gate_up_proj_{part}" for part in ("blocks", "scales"))


def published(path: Path) -> dict[str, np.ndarray]:
    return to_gpt_oss_layout(drawn_tensors(write_config(path, CONFIG)), is_packed=True)


def checkpoint_of(path: Path, tensors: dict[str, np.ndarray]) -> Checkpoint:
    write_safetensors(path / "model.safetensors", tensors)
    config = write_config(path, CONFIG)
    return Checkpoint(path, config, declare_model(config)[1])


def test_mxfp4_is_kept_as_stored(tmp_path: Path) -> None:
    tensors, format = published(tmp_path), WeightFormat("float4", 32, scales="bfloat16")
    checkpoint = checkpoint_of(tmp_path, tensors)
    exact = dequantized(tensors[BLOCKS], tensors[SCALES])
    for expert in range(CONFIG["num_local_experts"]):
        for index, part in enumerate(("gate_proj", "up_proj")):
            name = f"model.layers.0.mlp.experts.{expert}.{part}.weight"
            assert checkpoint.kept(name) == format
            np.testing.assert_array_equal(float32(checkpoint.read_integers(name, format)), exact[expert, index::2])


@pytest.mark.parametrize("layout", ["linears", "inner list"])
def test_experts_as_linears_are_read(layout: str, tmp_path: Path) -> None:
    """Gate and up in one linear for each expert, in 4 bits, as Unsloth writes them; or as llm-compressor does."""
    format = FORMATS["nf4" if layout == "linears" else "packed 4"]()
    config = CONFIG | {"quantization_config": format.config}
    drawn = drawn_tensors(write_config(tmp_path, config))
    tensors = {name: tensor for name, tensor in drawn.items() if ".experts." not in name and ".mlp.gate." not in name}
    router = "router.linear" if layout == "linears" else "router"
    tensors |= {name.replace("gate", router): drawn[name] for name in drawn if ".mlp.gate." in name}
    worth = {}
    for name, tensor in ((name, tensor) for name, tensor in drawn.items() if ".experts." in name):
        module, _, suffix = name.rpartition(".")
        prefix, expert, part = module.rsplit(".", 2)
        if layout == "linears" and part == "up_proj":
            continue
        if layout == "linears":
            up = drawn.get(f"{prefix}.{expert}.up_proj.{suffix}")
            joined = tensor if part == "down_proj" or up is None else np.stack([tensor, up], 1).reshape(-1, *tensor.shape[1:])
            own = f"{prefix}.{'down_projs' if part == 'down_proj' else 'gate_up_projs'}.{expert}"
        else:
            joined, own = tensor, f"{prefix}.experts.{expert}.{part}"
        if suffix == "bias":
            tensors[f"{own}.bias"] = found = joined
        else:
            quantized = format.quantize(joined)
            tensors |= {f"{own}.{key}": values for key, values in quantized.stored.items()}
            found = quantized.weight
        halves = {"gate_proj": found[::2], "up_proj": found[1::2]} if layout == "linears" else {part: found}
        for half, values in ({part: found} if part == "down_proj" else halves).items():
            worth[f"{prefix}.{expert}.{half}.{suffix}"] = values
    write_tensors(tmp_path / "model.safetensors", tensors)
    model = write_config(tmp_path, config)
    checkpoint = Checkpoint(tmp_path, model, declare_model(model)[1])
    for name, expected in worth.items():
        np.testing.assert_array_equal(checkpoint.read(name), expected, err_msg=name)
        kept = checkpoint.kept(name)
        if isinstance(kept, WeightFormat):
            assert checkpoint.read_integers(name, kept).values.shape == expected.shape


@pytest.mark.parametrize("missing", [BLOCKS, SCALES])
def test_missing_half_of_mxfp4_is_an_error(missing: str, tmp_path: Path) -> None:
    tensors = published(tmp_path)
    del tensors[missing]
    with pytest.raises(CheckpointError, match=r"gate_up_proj: MXFP4 needs both .*_blocks and .*_scales"):
        checkpoint_of(tmp_path, tensors)


def test_wrong_number_of_scales_is_an_error(tmp_path: Path) -> None:
    tensors = published(tmp_path)
    tensors[SCALES] = tensors[SCALES][:, :, :-1].copy()
    with pytest.raises(CheckpointError, match=r"_blocks is U8 \[5, 192, 2, 16\] and .* U8 \[5, 192, 1\]; expected U8"):
        checkpoint_of(tmp_path, tensors)


def test_scale_without_value_is_an_error(tmp_path: Path) -> None:
    tensors = published(tmp_path)
    tensors[SCALES][1, 4, 0] = 255
    checkpoint = checkpoint_of(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"the scales of .*experts\.1\.gate_proj\.weight are NaN or infinite"):
        checkpoint.read_integers("model.layers.0.mlp.experts.1.gate_proj.weight", WeightFormat("float4", 32, scales="bfloat16"))
