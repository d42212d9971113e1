"""Resolution of a model's name: local directories, and a hub that runs here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.checkpoint.locate import resolve_model, resolve_tokenizer
from engine.errors import CheckpointError
from tests.ggufs import as_type, original_metadata, write_gguf
from tests.paths import REPOSITORY

DEMO = REPOSITORY / "tools" / "demo" / "model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"not wanted",
    "onnx/model.safetensors": b"not wanted",
}


class Hub(BaseHTTPRequestHandler):
    """Hub that answers huggingface_hub for a snapshot of two repositories: one open, one gated."""

    requested: list[str] = []
    ggufs: dict[str, bytes] = {}

    def do_GET(self) -> None:
        self.requested.append(self.path)
        if "gated" in self.path:
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "/revision/other" in self.path:
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif self.path.startswith(f"/api/models/owner/tiny/tree/{COMMIT}"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in FILES.items()]
            self._answer(200, json.dumps(tree).encode())
        elif self.path.startswith("/api/models/owner/several/tree/main"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in self.ggufs.items()]
            self._answer(200, json.dumps(tree).encode())
        elif self.path.startswith("/owner/several/resolve/main/"):
            name = self.path.split("/main/")[1].partition("?")[0]
            self._answer(200, self.ggufs[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{name}-1"'})
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
        """Log nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Endpoint of a hub that lives as long as the test, with a cache of its own."""
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
    with pytest.raises(CheckpointError, match="is a file; expected a directory"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["/no/such/directory", "./nothing", "a b", "x/y/z", ""])
def test_neither_path_nor_hub_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        resolve_model(name)


def test_hub(hub: str) -> None:
    """No files but those of the checkpoint are downloaded."""
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
    with pytest.raises(CheckpointError, match="owner/other: neither a directory nor a repository on the hub"):
        resolve_model("owner/other", hub)


def test_gated(hub: str) -> None:
    with pytest.raises(CheckpointError, match="owner/gated is gated"):
        resolve_model("owner/gated", hub)


def test_hub_not_reachable(hub: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be reached"):
        resolve_model("owner/tiny", "http://127.0.0.1:9")


def test_gguf_file_is_chosen_by_quantization(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    write_gguf(tmp_path / "demo.gguf", DEMO, as_type("F32"), **original_metadata(DEMO))
    data = (tmp_path / "demo.gguf").read_bytes()
    Hub.ggufs = {"Tiny-F32.gguf": data, "Tiny-Q4_K_M.gguf": b"", "mmproj-F16.gguf": b"", "Big-Q8_0-00001-of-00002.gguf": b""}
    for tag in ("F32", "f32", "Tiny-F32.gguf"):
        path = resolve_model(f"owner/several:{tag}", hub)
        assert (path / "model.gguf").read_bytes() == data
    assert not any("Q4_K_M" in asked for asked in Hub.requested if "resolve" in asked)
    with pytest.raises(CheckpointError, match="there are F32, Q4_K_M, Q8_0"):
        resolve_model("owner/several:Q2_K", hub)
    with pytest.raises(CheckpointError, match="parts; merge them"):
        resolve_model("owner/several:Q8_0", hub)
    with pytest.raises(CheckpointError, match="nor a repository"):
        resolve_model("owner/none:Q4_K_M", hub)


def test_a_tokenizer_of_the_hub_brings_no_weights(hub: str, tmp_path: Path) -> None:
    path = resolve_tokenizer("owner/tiny", hub)
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "tokenizer.json"]
    assert resolve_tokenizer(str(tmp_path)) == tmp_path.resolve()
    with pytest.raises(CheckpointError, match="not a directory"):
        resolve_tokenizer("./nothing")
