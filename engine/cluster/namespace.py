"""The namespace of an engine: everything except request and weights that determines the bytes of an answer.

Two engines of one namespace with the same weights give the same bytes, so a stream can move between them. Batches, ranks,
replicas, caches and drafts change no byte and are no part of it. Pure; `api/fingerprint.py` derives `system_fingerprint` from
the same facts.
"""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.installation import package_version
from shm.blake2 import blake2b


def engine_facts(config: EngineConfig) -> tuple[str | int, ...]:
    """Return what determines the bytes besides the weights: version, device, kernels and number formats."""
    return (
        package_version(),
        config.device,
        config.ops,
        config.kernels_text,
        config.dtype,
        config.quantization,
        config.quantization_group_size,
        config.calibration_digest,
        config.vision_quantization,
        config.kv_cache_dtype,
    )


def digest_of(*facts: object) -> str:
    """Return a digest of facts, 16 hexadecimal digits."""
    return blake2b(msgspec.json.encode(facts), digest_size=8).hexdigest()


def namespace_of(config: EngineConfig) -> str:
    """Return the namespace. The block size belongs to it because cached prefixes of two engines are compared by blocks."""
    return digest_of(engine_facts(config), config.block_size, config.max_model_len)


def namespace_without_kernels(config: EngineConfig) -> str:
    """Return what engines have in common that differ in their kernels only."""
    return namespace_of(msgspec.structs.replace(config, cpu_kernels={}))


def facts_text(config: EngineConfig) -> str:
    """Return what the namespace is made of as text, for a message that compares two."""
    version, device, ops, kernels, dtype, quantization, group, calibration, vision, kv_dtype = engine_facts(config)
    parts = {
        "version": version,
        "device": device,
        "ops": ops,
        "kernels": kernels,
        "dtype": dtype,
        "quantization": f"{quantization} {group}" if group else quantization,
        "calibration": calibration,
        "vision quantization": vision,
        "KV cache": kv_dtype,
        "block size": config.block_size,
        "context": config.max_model_len,
    }
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value)
