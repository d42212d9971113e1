"""`system_fingerprint`: a hash of everything except the request that determines the tokens, as in OpenAI's answers.

It covers weights, adapter, kernels, precision and the version of the engine. Runs in the api process.
"""

from __future__ import annotations

from engine.cluster.namespace import digest_of, engine_facts
from engine.config import EngineConfig
from engine.errors import TokamakError
from engine.messages import AdapterUse, WeightsRecord
from engine.process.run_directory import Run
from engine.process.topology import SCHEDULER, names_of


class Fingerprints:
    def __init__(self, config: EngineConfig, run: Run) -> None:
        self._run = run
        self._engine = engine_facts(config)
        self._path = config.model
        self._schedulers = names_of(SCHEDULER, config.num_replicas)
        self._known: dict[tuple[str, str], str] = {}  # by version of the weights and contents of the adapter
        self._contents: dict[int, str] = {}  # digests of weights by version; the record forgets unused ones

    def of(self, weight_version: str, adapter: AdapterUse | None = None) -> str:
        """Return the fingerprint of answers produced by one or several weight versions (`1,2`); empty before any is known."""
        contents = "" if adapter is None else adapter.contents
        found = self._known.get((weight_version, contents))
        if found is None:
            found = self._made(weight_version, contents)
        return found

    def current(self, adapter: AdapterUse | None = None) -> str:
        """Return the fingerprint of the weights in use."""
        records = self._records()
        return self.of(str(max(record.version for record in records)), adapter) if records else ""

    def _made(self, weight_version: str, adapter: str) -> str:
        records = self._records()
        if not weight_version or not records:
            return ""
        numbers = [int(number) for number in weight_version.split(",")]
        for record in records:
            self._contents |= record.contents
        known = [self._contents[number] for number in numbers if number in self._contents]
        weights = [*dict.fromkeys(known)] or [self._path]  # equal ones count once
        digest = digest_of(self._engine, weights, adapter)
        if len(known) == len(numbers):  # otherwise a rank has not reported yet what it loaded
            self._known[weight_version, adapter] = f"fp_{digest}"
        return f"fp_{digest}"

    def _records(self) -> list[WeightsRecord]:
        """Return the weights of each replica; a reload changes one after the other."""
        try:
            return [self._run.weights(scheduler) for scheduler in self._schedulers]
        except TokamakError:  # retried with the next answer
            return []
