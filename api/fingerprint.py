"""`system_fingerprint`: a hash of all that the same tokens depend on besides the request, as OpenAI's answers carry it.

Weights, kernels, precision and the version of the engine. Runs in the api process.
"""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.errors import TokamakError
from engine.installation import package_version
from engine.messages import WeightsRecord
from engine.process.run_directory import Run
from shm.blake2 import blake2b


class Fingerprints:
    def __init__(self, config: EngineConfig, run: Run) -> None:
        self._run = run
        self._engine = (
            package_version(),
            config.device,
            config.ops,
            config.kernels_text,
            config.dtype,
            config.quantization,
            config.kv_cache_dtype,
            config.tensor_parallel_size,
        )
        self._path = config.model
        self._known: dict[str, str] = {}  # by the version of the weights
        self._contents: dict[int, str] = {}  # digests of weights, by version: the record forgets those that are out of use

    def of(self, weight_version: str) -> str:
        """Return the fingerprint of answers made by one weight version or several (`1,2`); empty before one is known."""
        found = self._known.get(weight_version)
        if found is None:
            found = self._made(weight_version)
        return found

    def current(self) -> str:
        """Return the fingerprint of the weights in use."""
        record = self._record()
        return self.of(str(record.version)) if record is not None else ""

    def _made(self, weight_version: str) -> str:
        record = self._record()
        if not weight_version or record is None:
            return ""
        numbers = [int(number) for number in weight_version.split(",")]
        self._contents |= record.contents
        known = [self._contents[number] for number in numbers if number in self._contents]
        weights = [*dict.fromkeys(known)] or [self._path]  # equal ones count once
        digest = blake2b(msgspec.json.encode((self._engine, weights)), digest_size=8).hexdigest()
        if len(known) == len(numbers):  # else a rank has still to say what it loaded
            self._known[weight_version] = f"fp_{digest}"
        return f"fp_{digest}"

    def _record(self) -> WeightsRecord | None:
        try:
            return self._run.weights()
        except TokamakError:  # the next answer looks again
            return None
