"""Resolving a model's name: local directories, and a hub that runs here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.checkpoint.locate import resolve_model
from engine.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"not wanted",
    "onnx/model.safetensors": b"not wanted",
}


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of a hub for a snapshot, for two repositories: one open, one gated."""

    requested: list[str] = []

    def do_GET(self) -> None:
        self.requested.append(self.path)
        if "gated" in self.path:
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "/revision/other" in self.path:
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif self.path.startswith(f"/api/models/owner/tiny/tree/{COMMIT}"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in FILES.items()]
            self._answer(200, json.dumps(tree).encode())
        elif self.path.startswith("/api/models/owner/tiny"):
            siblings = [{"rfilename": name} for name in FILES]
            body = {"id": "owner/tiny", "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            self._answer(200, json.dumps(body).encode())
        elif self.path.startswith(f"/owner/tiny/resolve/{COMMIT}/"):
            name = self.path.split(f"{COMMIT}/")[1].partition("?")[0]
            self._answer(200, FILES[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{name}-1"'})
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The endpoint of a hub that lives as long as the test, with a cache of its own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    Hub.requested = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_local_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_local_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file; give the directory"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["/no/such/directory", "./nothing", "a b", "x/y/z", ""])
def test_neither_path_nor_hub_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        resolve_model(name)


def test_hub(hub: str) -> None:
    """The files of a checkpoint, and no others."""
    path = resolve_model("owner/tiny", hub)
    found = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert found == {name: FILES[name] for name in ("config.json", "model.safetensors", "tokenizer.json")}


def test_hub_revision(hub: str) -> None:
    assert resolve_model(f"owner/tiny@{COMMIT}", hub).name == COMMIT
    with pytest.raises(CheckpointError, match="no revision 'other'"):
        resolve_model("owner/tiny@other", hub)


def test_second_time_from_the_cache(hub: str) -> None:
    first = resolve_model("owner/tiny", hub)
    num_requests = len(Hub.requested)
    assert resolve_model("owner/tiny", hub) == first
    assert not [path for path in Hub.requested[num_requests:] if "/resolve/" in path and path.endswith(".safetensors")]


def test_no_such_repository(hub: str) -> None:
    with pytest.raises(CheckpointError, match="owner/other: no such directory here and no such repository on the hub"):
        resolve_model("owner/other", hub)


def test_gated(hub: str) -> None:
    with pytest.raises(CheckpointError, match="owner/gated is gated"):
        resolve_model("owner/gated", hub)


def test_hub_not_reachable(hub: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be reached"):
        resolve_model("owner/tiny", "http://127.0.0.1:9")
