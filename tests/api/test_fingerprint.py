"""The hash of what an answer depends on besides its request."""

from __future__ import annotations

from pathlib import Path

import msgspec

from api.fingerprint import Fingerprints
from engine.messages import AdapterUse, WeightsRecord
from engine.process.run_directory import Run
from tests.configurations import engine_config


def test_fingerprint_follows_weights_and_precision(tmp_path: Path) -> None:
    sizes = {"max_model_len": 64, "num_kv_blocks": 8}
    config, run = engine_config(model="m", run_id="r", run_dir=str(tmp_path), **sizes), Run("r", tmp_path)
    first = WeightsRecord.of_start(config)
    run.write_weights(msgspec.structs.replace(first, last_version=3, version=3, contents={1: "a", 2: "b", 3: "a"}))
    found = Fingerprints(config, run)
    assert found.of("1").startswith("fp_")
    assert found.of("1") == found.of("3") == found.current()  # loaded again from the same files
    assert len({found.of("1"), found.of("2"), found.of("1,2")}) == 3
    other = msgspec.structs.replace(config, kv_cache_dtype="other")
    assert Fingerprints(other, run).of("1") != found.of("1")
    several = msgspec.structs.replace(config, tensor_parallel_size=2)
    assert Fingerprints(several, run).of("1") == found.of("1")  # ranks change no byte
    for other in ({"quantization_group_size": 32}, {"calibration_digest": "c"}, {"vision_quantization": "wint8"}):
        assert Fingerprints(msgspec.structs.replace(config, **other), run).of("1") != found.of("1")
    assert found.of("1,3") == found.of("1")  # an answer across a reload of equal weights
    assert found.of("") == ""


def test_fingerprint_tells_adapters_apart_and_knows_all_replicas(tmp_path: Path) -> None:
    sizes = {"max_model_len": 64, "num_kv_blocks": 8, "data_parallel_size": 2}
    config, run = engine_config(model="m", run_id="r", run_dir=str(tmp_path), **sizes), Run("r", tmp_path)
    first = WeightsRecord.of_start(config)
    run.write_weights(msgspec.structs.replace(first, contents={1: "a"}), "scheduler0")
    run.write_weights(msgspec.structs.replace(first, last_version=2, version=2, contents={1: "a", 2: "b"}), "scheduler1")
    found = Fingerprints(config, run)
    assert found.current() == found.of("2") != found.of("1")
    adapters = [None, AdapterUse(1, 0, "c"), AdapterUse(2, 1, "d")]
    assert len({found.of("1", adapter) for adapter in adapters}) == 3
    assert found.of("1", AdapterUse(3, 0, "c")) == found.of("1", adapters[1])  # loaded again
