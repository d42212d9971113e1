"""Chat templates and vocabularies that models were published with, for tests alone.

They are other people's work, so this repository does not contain them. The source distribution of `llama-cpp-python` has them,
with the tokens of 46 texts for each vocabulary. `tools/test` runs this file, which downloads that package once for an
environment and keeps the files there. Where it cannot be had, the tests use the repository's own files alone, and their summary
says so.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
DIRECTORY = Path(sys.prefix) / "share" / f"published-{VERSION}"
TIMEOUT_SECONDS = 300
_MEMBERS = re.compile(r".*/vendor/llama\.cpp/models/(?:templates/[^/]+\.jinja|ggml-vocab-[^/]+\.gguf(?:\.inp|\.out)?)")
_TEXT_SEPARATOR = "\n__ggml_vocab_test__\n"


def published_templates() -> dict[str, str]:
    """Return the templates' texts by name; none where the package could not be fetched."""
    return {path.stem: path.read_text() for path in sorted(DIRECTORY.glob("*.jinja"))}


def published_vocabularies() -> list[Path]:
    """Return GGUF files that have a vocabulary and test vectors; none where the package could not be fetched."""
    return sorted(path for path in DIRECTORY.glob("*.gguf") if path.with_name(f"{path.name}.inp").exists())


def vectors_of(vocabulary: Path) -> list[tuple[str, list[int]]]:
    """Return texts with the tokens that llama.cpp's authors took from the models' own tokenizers."""
    texts = vocabulary.with_name(f"{vocabulary.name}.inp").read_bytes().decode().split(_TEXT_SEPARATOR)
    lines = vocabulary.with_name(f"{vocabulary.name}.out").read_text().splitlines()
    return [(text, [int(number) for number in line.split()]) for text, line in zip(texts, lines, strict=False)]


def fetch() -> None:
    """Download the package, let pip verify its checksum, and keep these files. Raises CalledProcessError, TimeoutExpired."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        requirement = directory / "requirements.txt"
        requirement.write_text(f"llama-cpp-python=={VERSION} --hash=sha256:{SHA256}\n")
        options = ["--quiet", "--no-deps", "--no-binary", "llama-cpp-python", "--require-hashes", "--dest", name]
        command = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(requirement)]
        subprocess.run(command, check=True, timeout=TIMEOUT_SECONDS, stdin=subprocess.DEVNULL)
        (archive,) = directory.glob("*.tar.gz")
        DIRECTORY.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=DIRECTORY.parent) as made:
            _extract(archive, Path(made, "files"))
            Path(made, "files").rename(DIRECTORY)


def _extract(archive: Path, directory: Path) -> None:
    directory.mkdir()
    with tarfile.open(archive) as packed:
        for member in packed:
            content = packed.extractfile(member) if _MEMBERS.fullmatch(member.name) else None
            if content is not None:
                (directory / Path(member.name).name).write_bytes(content.read())


if __name__ == "__main__" and not DIRECTORY.exists():
    fetch()
