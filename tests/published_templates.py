"""Chat templates that models were published with, for tests alone.

They are other people's work, so this repository does not contain them. The source distribution of `llama-cpp-python` has them.
`tools/test` runs this file, which downloads that package once for an environment and keeps its templates there. Where it cannot
be had, the tests use the repository's own templates alone, and their summary says so.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
DIRECTORY = Path(sys.prefix) / "share" / f"chat-templates-{VERSION}"
TIMEOUT_SECONDS = 300
_MEMBERS = "/vendor/llama.cpp/models/templates/"


def published_templates() -> dict[str, str]:
    """Return the templates' texts by name; none where the package could not be fetched."""
    return {path.stem: path.read_text() for path in sorted(DIRECTORY.glob("*.jinja"))}


def fetch() -> None:
    """Download the package, let pip verify its checksum, and keep its templates. Raises CalledProcessError, TimeoutExpired."""
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
            _extract(archive, Path(made, "templates"))
            Path(made, "templates").rename(DIRECTORY)


def _extract(archive: Path, directory: Path) -> None:
    directory.mkdir()
    with tarfile.open(archive) as packed:
        for member in packed:
            content = packed.extractfile(member) if _MEMBERS in member.name and member.name.endswith(".jinja") else None
            if content is not None:
                (directory / Path(member.name).name).write_bytes(content.read())


if __name__ == "__main__" and not DIRECTORY.exists():
    fetch()
