"""The namespace: which engines give the same bytes."""

from __future__ import annotations

import msgspec
import pytest

from engine.cluster.namespace import facts_text, namespace_of
from tests.configurations import engine_config

CONFIG = {"model": "/none", "max_model_len": 64, "num_kv_blocks": 4, "run_id": "0badcafe", "run_dir": "/none"}
DIFFERENT = {
    "dtype": "bfloat16",
    "quantization": "wint4",
    "quantization_group_size": 32,
    "kv_cache_dtype": "int8",
    "cpu_kernels": {"base": "portable"},
    "vision_quantization": "wint8",
    "block_size": 64,
    "max_model_len": 77,
    "ops": "cuda",
    "device": "gpu",
}
SAME = {
    "max_num_seqs": 3,
    "tensor_parallel_size": 2,
    "data_parallel_size": 2,
    "num_kv_blocks": 77,
    "host": "10.0.0.9",
    "threads": 9,
    "model": "/elsewhere/model",
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_changes_bytes_changes_the_namespace(name: str) -> None:
    config = engine_config(**CONFIG)
    other = msgspec.structs.replace(config, **{name: DIFFERENT[name]})
    assert namespace_of(other) != namespace_of(config)
    assert facts_text(other) != facts_text(config)


@pytest.mark.parametrize("name", SAME)
def test_what_changes_no_byte_does_not(name: str) -> None:
    config = engine_config(**CONFIG)
    assert namespace_of(msgspec.structs.replace(config, **{name: SAME[name]})) == namespace_of(config)
