"""Lists of models while adapters come and go."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx

from engine.messages import Adapter, AdaptersRecord
from engine.process.topology import SUPERVISOR
from tests.api.api_server import ApiServer
from tests.waiting import WATCHDOG_S

PATHS = ("/v1/models", "/api/tags", "/v1/models?after_id=tiny")
NUM_CALLS = 60  # of each path, while the list changes thousands of times


def test_models_are_listed_while_adapters_change(tmp_path: Path) -> None:
    adapters = tuple(
        Adapter(f"adapter-{index}", str(tmp_path), index + 1, index, f"{index:064x}", 8, 1.0) for index in range(8)
    )
    is_done = threading.Event()
    with ApiServer(tmp_path, max_loras=8, max_lora_rank=8) as server:

        def change() -> None:
            version = server.counters.counter("adapters_version", SUPERVISOR)
            while not is_done.is_set():
                for served in (adapters, ()):
                    server.run.write_adapters(AdaptersRecord(8, served))
                    version.add(1)

        changes = threading.Thread(target=change)
        changes.start()
        try:
            with httpx.Client(base_url=server.url, timeout=WATCHDOG_S) as client:
                counts = set()
                for path in PATHS * NUM_CALLS:
                    headers = {"anthropic-version": "2023-06-01"} if "after_id" in path else {}
                    answer = client.get(path, headers=headers)
                    assert answer.status_code == 200, (path, answer.text)
                    models = answer.json().get("data", answer.json().get("models"))
                    counts.add(len(models) - (2 if "after_id" not in path else 1))
        finally:
            is_done.set()
            changes.join()
    assert counts == {0, 8}
