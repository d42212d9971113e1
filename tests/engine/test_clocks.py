"""Changes of the wall clock: nothing may be early, late or stuck."""

from __future__ import annotations

import ast

from tests.paths import REPOSITORY

WALL_CLOCK_USERS = {  # where the time of day is shown, or compared with that of a file
    "api/batches",
    "api/files",
    "api/media/download.py",  # signatures of an object store
    "api/model.py",
    "api/ollama/lines.py",
    "api/openai",
    "api/pooling",
    "api/prometheus.py",
    "api/responses",
    "api/span.py",
    "api/spans.py",
    "engine/cache/kv_events.py",
    "engine/observation",
    "engine/process/log.py",
    "engine/supervisor/adapters.py",
    "engine/supervisor/launch.py",
    "engine/tokenizer/prompt_encoder.py",
    "shm/error_log.py",
    "shm/segment.py",
    "workers/weights/cache.py",
    "workers/weights/checksums.py",
}


def tells_time_of_day(tree: ast.AST) -> bool:
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return bool(names & {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"})


def test_deadlines_are_of_the_monotonic_clock() -> None:
    """Waits, deadlines and measurements use `time.monotonic_ns`; new uses of the time of day are listed here."""
    found = []
    for package in ("api", "engine", "shm", "workers", "ops"):
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            name = file.relative_to(REPOSITORY).as_posix()
            if not any(name == place or name.startswith(f"{place}/") for place in WALL_CLOCK_USERS):
                found += [name] if tells_time_of_day(ast.parse(file.read_text())) else []
    assert found == []
