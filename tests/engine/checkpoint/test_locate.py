"""Resolution of a model's name: local directories, and a hub that runs here."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

from engine.checkpoint.hubs import huggingface
from engine.checkpoint.hubs.huggingface import HuggingFace
from engine.checkpoint.locate import resolve_model, resolve_tokenizer
from engine.errors import CheckpointError
from tests.ggufs import as_type, original_metadata, write_gguf
from tests.paths import REPOSITORY
from tools.pull import main

DEMO = REPOSITORY / "tools" / "demo" / "model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"not wanted",
    "consolidated.safetensors": b"not wanted",
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


class FalseHub(Hub):
    """Hub that gives other answers than it should: `answers` by part of the path, as status, body and headers."""

    answers: dict[str, tuple[int, bytes, dict[str, str]]] = {}

    def do_GET(self) -> None:
        for part, answer in self.answers.items():
            if part in self.path:
                self._answer(*answer)
                return
        super().do_GET()

    do_HEAD = do_GET


class EndlessHub(Hub):
    """Hub that announces a size and sends more, without a length."""

    num_sent = 0

    def do_GET(self) -> None:
        if not self.is_endless():
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        with contextlib.suppress(OSError):
            while EndlessHub.num_sent < 256 << 20:
                EndlessHub.num_sent += self.wfile.write(bytes(1 << 20))

    do_HEAD = do_GET

    def is_endless(self) -> bool:
        return self.command != "HEAD" and "resolve" in self.path


class RedirectingHub(Hub):
    """Mirror that redirects to files, without a header that has their size."""

    def do_GET(self) -> None:
        place = self.path.partition("?")[0]
        if "/resolve/" in place:
            name = place.split(f"{COMMIT}/")[1]
            self._answer(302, b"", {"X-Repo-Commit": COMMIT, "ETag": f'"{name}-1"', "Location": f"{self.elsewhere}/{name}"})
        elif place.startswith("/files/"):
            self._answer(200, FILES[place.removeprefix("/files/")])
        else:
            super().do_GET()

    do_HEAD = do_GET
    elsewhere = ""


class ModelScopeHub(BaseHTTPRequestHandler):
    """ModelScope as its client sees it, with one repository."""

    requested: list[str] = []
    has_sizes = True

    def do_GET(self) -> None:
        self.requested.append(self.path)
        place = urlsplit(self.path)
        query = dict(parse_qsl(place.query))
        if query.get("Revision") not in ("master", "v2") or not place.path.startswith("/api/v1/models/owner/tiny/repo"):
            self._answer(404, b'{"Code": 10010205001, "Message": "not found"}')
        elif place.path.endswith("/files"):
            entries = [
                {"Path": name, "Name": name, "Size": len(data), "Type": "blob", "Sha256": sha256(data).hexdigest()}
                for name, data in FILES.items()
            ]
            if not self.has_sizes:
                entries = [{"Path": entry["Path"], "Name": entry["Name"], "Type": "blob"} for entry in entries]
            self._answer(200, json.dumps({"Code": 200, "Success": True, "Data": {"Files": entries}}).encode())
        else:
            self._answer(200, FILES[query["FilePath"]])

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve until the end of the block; yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Environment of a client of ModelScope that lives as long as the test."""
    ModelScopeHub.requested = []
    with serving(ModelScopeHub) as url:
        environment = {"MODELSCOPE_ENDPOINT": url, "MODELSCOPE_CACHE": str(tmp_path), "MODELSCOPE_HOME": str(tmp_path)}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield environment


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HuggingFace]:
    """A hub that lives as long as the test, with a cache of its own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    Hub.requested = []
    with serving(Hub) as url:
        yield HuggingFace(url)


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


def test_hub(hub: HuggingFace) -> None:
    """No files but those of the checkpoint are downloaded."""
    path = resolve_model("owner/tiny", hub)
    found = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert found == {name: FILES[name] for name in ("config.json", "model.safetensors", "tokenizer.json")}


def test_hub_revision(hub: HuggingFace) -> None:
    assert resolve_model(f"owner/tiny@{COMMIT}", hub).name == COMMIT
    with pytest.raises(CheckpointError, match="no revision 'other'"):
        resolve_model("owner/tiny@other", hub)


def test_second_time_from_the_cache(hub: HuggingFace) -> None:
    first = resolve_model("owner/tiny", hub)
    num_requests = len(Hub.requested)
    assert resolve_model("owner/tiny", hub) == first
    assert not [path for path in Hub.requested[num_requests:] if "/resolve/" in path and path.endswith(".safetensors")]


def test_no_such_repository(hub: HuggingFace) -> None:
    with pytest.raises(CheckpointError, match="owner/other: neither a directory nor a repository on the hub"):
        resolve_model("owner/other", hub)


def test_gated(hub: HuggingFace) -> None:
    with pytest.raises(CheckpointError, match="owner/gated is gated"):
        resolve_model("owner/gated", hub)


@pytest.mark.parametrize("address", ["http://127.0.0.1:99999", "http://[::1", "127.0.0.1", "ftp://127.0.0.1"])
def test_wrong_address_of_a_hub_is_an_error(hub: HuggingFace, address: str) -> None:
    with pytest.raises(CheckpointError, match=r"HF_ENDPOINT") as caught:
        resolve_model("owner/tiny", HuggingFace(address))
    assert "\n" not in str(caught.value)


def test_hub_not_reachable(hub: HuggingFace) -> None:
    with pytest.raises(CheckpointError, match="cannot be reached"):
        resolve_model("owner/tiny", HuggingFace("http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("part", "status", "body", "headers", "message"),
    [
        ("/api/", 200, "[]", {}, "does not answer as the Hugging Face hub does .*; check HF_ENDPOINT"),
        ("/api/", 200, "null", {}, "does not answer as the Hugging Face hub does"),
        ("/api/", 200, "{}", {}, "does not answer as the Hugging Face hub does"),
        ("/api/", 200, "no JSON", {"Content-Type": "text/plain"}, "cannot be downloaded: Expecting value"),
        ("/api/", 200, '{"id": "owner/tiny", "sha": "../../x"}', {}, "answered with sha '../../x', which leads out"),
        ("/api/", 401, "{}", {}, "cannot be downloaded: Client error '401 Unauthorized'"),
        ("/api/", 500, "{}", {}, "cannot be downloaded: Server error '500"),
        ("/resolve/", 200, "{}", {"X-Repo-Commit": COMMIT}, "cannot be downloaded: Distant resource does not have an ETag"),
        (
            "/resolve/",
            200,
            "{}",
            {"X-Repo-Commit": COMMIT, "ETag": '"../../../out"'},
            "etag '../../../out', which leads",
        ),
        (
            "/resolve/",
            200,
            "{}",
            {"X-Repo-Commit": "../../out", "ETag": '"a"'},
            "x-repo-commit '../../out', which leads",
        ),
    ],
)
def test_false_answers_are_refused(
    part: str, status: int, body: str, headers: dict[str, str], message: str, hub: HuggingFace, tmp_path: Path
) -> None:
    """Nothing is written outside of the cache."""
    FalseHub.answers = {part: (status, body.encode(), headers)}
    with serving(FalseHub) as url, pytest.raises(CheckpointError, match=message) as caught:
        resolve_model("owner/tiny", HuggingFace(url))
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}
    assert not list(tmp_path.rglob("out*"))


def test_more_bytes_than_announced_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While they arrive, so that they fill no disk."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with (
        serving(EndlessHub) as url,
        pytest.raises(CheckpointError, match=r"cannot be downloaded: 127\.0\.0\.1 sends more than the \d+ bytes"),
    ):
        resolve_model("owner/tiny", HuggingFace(url))
    assert EndlessHub.num_sent < 128 << 20


def test_mirror_may_redirect_without_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files may then be larger than other answers: their own answer has the length."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serving(RedirectingHub) as url:
        monkeypatch.setattr(RedirectingHub, "elsewhere", f"{url.replace('127.0.0.1', 'localhost')}/files")
        monkeypatch.setattr(huggingface, "_MAX_ANSWER_BYTES", 1 << 10)
        monkeypatch.setitem(FILES, "model.safetensors", bytes(2 << 10))
        assert (resolve_model("owner/tiny", HuggingFace(url)) / "model.safetensors").read_bytes() == bytes(2 << 10)


def test_endless_answer_of_a_hub_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is no file of a model."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface, "_MAX_ANSWER_BYTES", 4 << 20)
    monkeypatch.setattr(EndlessHub, "num_sent", 0)
    monkeypatch.setattr(EndlessHub, "is_endless", lambda self: True)
    with (
        serving(EndlessHub) as url,
        pytest.raises(CheckpointError, match=r"127\.0\.0\.1 sends more than the 4194304 bytes that are the limit"),
    ):
        resolve_model("owner/tiny", HuggingFace(url))
    assert EndlessHub.num_sent < 128 << 20


def test_gguf_file_is_chosen_by_quantization(hub: HuggingFace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(CheckpointError, match=r"Q8_0 is incomplete: Big-Q8_0-00002-of-00002\.gguf is missing"):
        resolve_model("owner/several:Q8_0", hub)
    with pytest.raises(CheckpointError, match="nor a repository"):
        resolve_model("owner/none:Q4_K_M", hub)


def test_all_gguf_parts_are_downloaded(hub: HuggingFace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    write_gguf(tmp_path / "demo-F16.gguf", DEMO, as_type("F16"), tensors_per_part=12, **original_metadata(DEMO))
    parts = sorted(tmp_path.glob("demo-F16-*.gguf"))
    Hub.ggufs = {f"F16/{part.name}": part.read_bytes() for part in parts} | {
        "F16/mmproj-F16.gguf": b"",
        "x/demo-Q8_0.gguf": b"",
    }
    path = resolve_model("owner/several:F16", hub)
    assert [link.read_bytes() for link in sorted(path.glob("model.gguf*"))] == [part.read_bytes() for part in parts]
    Hub.ggufs["other/demo-Q8_0.gguf"] = b""
    with pytest.raises(CheckpointError, match=r"several files for Q8_0: other/demo-Q8_0, x/demo-Q8_0; choose one"):
        resolve_model("owner/several:Q8_0", hub)


def test_a_tokenizer_of_the_hub_brings_no_weights(hub: HuggingFace, tmp_path: Path) -> None:
    path = resolve_tokenizer("owner/tiny", hub)
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "tokenizer.json"]
    assert resolve_tokenizer(str(tmp_path)) == tmp_path.resolve()
    with pytest.raises(CheckpointError, match="not a directory"):
        resolve_tokenizer("./nothing")


def test_modelscope(modelscope: dict[str, str]) -> None:
    """Only the checkpoint's own files, once, and from the cache without a connection."""
    path = resolve_model("owner/tiny", "modelscope")
    found = {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith(".")}
    assert found == {name: FILES[name] for name in ("config.json", "model.safetensors", "tokenizer.json")}
    assert (resolve_model("owner/tiny@v2", "modelscope") / "config.json").read_bytes() == FILES["config.json"]
    with pytest.raises(CheckpointError, match=r"owner/other: neither a directory nor a repository on ModelScope"):
        resolve_model("owner/other", "modelscope")
    with pytest.raises(CheckpointError, match=r"neither a directory nor a repository at revision 'v3' on ModelScope"):
        resolve_model("owner/tiny@v3", "modelscope")


def test_modelscope_files_without_a_size_are_refused(modelscope: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The client would take any number of bytes."""
    monkeypatch.setattr(ModelScopeHub, "has_sizes", False)
    with pytest.raises(CheckpointError, match=r"is larger than the 0 bytes that the hub announced"):
        resolve_model("owner/tiny", "modelscope")


def test_pull_prints_the_directory(
    modelscope: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKAMAK_HUB", "modelscop")
    command = [sys.executable, "-m", "tokamak", "pull", "--hub", "modelscope"]
    found = subprocess.run([*command, "owner/tiny"], env=os.environ | modelscope, capture_output=True, text=True, check=True)
    assert (Path(found.stdout.strip()) / "config.json").read_bytes() == FILES["config.json"]
    assert "serve owner/tiny --hub modelscope" in found.stderr
    missing = subprocess.run([*command, "owner/other"], env=os.environ | modelscope, capture_output=True, text=True)
    assert missing.returncode == 1
    assert missing.stderr.startswith("tokamak pull: error: owner/other: neither")
    with pytest.raises(SystemExit) as ended:
        main(["owner/tiny"])
    assert ended.value.code == 2
    assert "TOKAMAK_HUB=modelscop is not supported; expected one of huggingface, modelscope" in capsys.readouterr().err


def test_mirror_of_the_hub(tmp_path: Path) -> None:
    """`HF_ENDPOINT` names it."""
    with serving(Hub) as url:
        environment = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "tokamak", "pull", "owner/tiny"]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    assert path.is_relative_to(tmp_path)
    assert (path / "model.safetensors").read_bytes() == b"weights"
    environment["HF_ENDPOINT"] = "http://[::1"  # the client reads it when it is imported
    wrong = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "tokamak pull: error: huggingface_hub does not start: Invalid IPv6 URL; check HF_ENDPOINT" in wrong.stderr
    assert "Traceback" not in wrong.stderr
