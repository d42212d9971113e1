"""Packages that read images and video are an extra: text models run without them, vision models name them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.engine_process import DEMO, EngineProcess
from tests.paths import REPOSITORY
from tests.waiting import WATCHDOG_S
from tools.demo import VISION_MODEL

HIDE = "import sys\nsys.modules.update(dict.fromkeys(('PIL', 'av')))\n"  # an import fails then as if they were not installed
SCRIPT = """#!/bin/sh
echo "added: $TOKAMAK_ADDED_EXTRA; script: $TOKAMAK_SERVE_SCRIPT; arguments: $*"
"""


@pytest.fixture
def without_images(tmp_path: Path) -> dict[str, str]:
    """Environment in which no process can import the packages that read images."""
    tmp_path.joinpath("sitecustomize.py").write_text(HIDE)
    return {"PYTHONPATH": str(tmp_path)}


def serve(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.cli", "serve", "--port", "0", *options]
    settings = os.environ | environment
    return subprocess.run(
        command, cwd=REPOSITORY, env=settings, capture_output=True, text=True, timeout=WATCHDOG_S, check=False
    )


def test_text_model_runs_without_image_packages(without_images: dict[str, str]) -> None:
    with EngineProcess(DEMO, environment=without_images) as engine:
        body = {"prompt": "What are you?", "max_tokens": 4}
        assert httpx.post(f"{engine.url}/v1/completions", json=body, timeout=WATCHDOG_S).status_code == 200


def test_vision_model_names_missing_image_packages(without_images: dict[str, str]) -> None:
    done = serve(without_images, "--model", str(VISION_MODEL))
    assert done.returncode == 2
    assert "this model reads images and needs pillow and av, not installed here" in done.stderr
    assert "pip install 'tokamak-serve[vision]'" in done.stderr


def test_serve_script_is_asked_for_a_missing_extra(without_images: dict[str, str], tmp_path: Path) -> None:
    """`tools/serve`, replaced by another script here, installs what its model needs."""
    script = tmp_path / "serve"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    done = serve({**without_images, "TOKAMAK_SERVE_SCRIPT": str(script)}, "--model", str(VISION_MODEL))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"added: vision; script: ; arguments: --port 0 --model {VISION_MODEL}\n"
