"""Untrusted links: fetched in parallel, returned in order, and only from where a server may be led."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from datetime import datetime, timezone
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.media.addresses import Addresses
from api.media.download import PIECES_OF_A_TURN, RECEIVE_BYTES, Fetcher, download, read_content
from api.media.object_store import ObjectStore, signed
from engine.config import EngineConfig
from engine.errors import RequestError
from tests.api.media.file_server import CONTENT, FileServer
from tests.api.media.loop_turns import run_and_count
from tests.configurations import engine_config
from tests.waiting import WATCHDOG_S

LOCAL = ("127.0.0.0/8", "::1/128")


@pytest.fixture(scope="module")
def files() -> Iterator[FileServer]:
    with FileServer().running() as server:
        yield server


def config(**options: Any) -> EngineConfig:
    fields: dict[str, Any] = {"allowed_media_networks": LOCAL}
    return engine_config(model="", max_model_len=8, num_kv_blocks=8, run_id="", run_dir="", **(fields | options))


async def until(predicate: Callable[[], bool]) -> None:
    async def slots() -> None:
        while not predicate():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(slots(), WATCHDOG_S)


def fetched(link: str, max_bytes: int = 1 << 20, **options: Any) -> bytes:
    """Fetch a link as a server with these options does. RequestError."""

    async def fetch() -> bytes:
        fetcher = Fetcher(config(**options))
        try:
            return bytes(await asyncio.wait_for(fetcher.fetch(link, max_bytes), WATCHDOG_S))
        finally:
            await fetcher.close()

    return asyncio.run(fetch())


def refused(link: str, max_bytes: int = 1 << 20, **options: Any) -> tuple[str, str]:
    """Return code and message of the error."""
    with pytest.raises(RequestError) as caught:
        fetched(link, max_bytes, **options)
    assert caught.value.status == 400
    return caught.value.code, caught.value.message


# ---------------------------------------------------------------------------------------------------- many at once


class Jobs:
    """Jobs of `download`; the test ends them in any order."""

    def __init__(self, failing: Sequence[str] = ()) -> None:
        self.failing = failing
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.cancelled: list[str] = []
        self.max_under_way = 0
        self.waits: Callable[[str], Awaitable[None]] = lambda link: asyncio.sleep(0)

    async def fetch(self, link: str) -> str:
        self.begun.append(link)
        self.max_under_way = max(self.max_under_way, len(self.begun) - len(self.ended) - len(self.cancelled))
        try:
            await self.waits(link)
        except asyncio.CancelledError:
            self.cancelled.append(link)
            raise
        self.ended.append(link)
        if link in self.failing:
            raise RequestError(link)
        return link.upper()

    async def results(self, links: Sequence[str] | str, max_workers: int = 8, most: int = 1 << 30) -> list[str | RequestError]:
        found: list[str | RequestError] = []
        async with aclosing(download(links, self.fetch, max_workers)) as results:
            async for result in results:
                found.append(result)
                if len(found) == most:
                    break
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
        return found


@given(seed=st.integers(0, 1 << 16), num_links=st.integers(0, 20), max_workers=st.integers(1, 9))
@settings(deadline=None, max_examples=50)
def test_results_keep_the_order_of_links(seed: int, num_links: int, max_workers: int) -> None:
    jobs, chance = Jobs(), random.Random(seed)

    async def slots(link: str) -> None:
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)

    jobs.waits = slots
    links = [f"l{index}" for index in range(num_links)]
    assert asyncio.run(jobs.results(links, max_workers)) == [link.upper() for link in links]
    assert jobs.begun == links
    assert jobs.max_under_way <= max_workers


def test_parallel_serial_and_single_links() -> None:
    links = [f"l{index}" for index in range(20)]
    asyncio.run((jobs := Jobs()).results(links))
    assert jobs.max_under_way == 8
    assert asyncio.run((serial := Jobs()).results(links, 1)) == [link.upper() for link in links]
    assert (serial.max_under_way, serial.ended) == (1, links)
    assert asyncio.run(Jobs().results("one")) == ["ONE"]


@given(first=st.integers(0, 9), max_workers=st.integers(1, 9))
@settings(deadline=None, max_examples=40)
def test_first_failure_ends_the_results(first: int, max_workers: int) -> None:
    links = [f"l{index}" for index in range(20)]
    jobs = Jobs(failing=links[first::3])

    async def waits(link: str) -> None:
        if int(link[1:]) > first:
            await asyncio.Event().wait()

    jobs.waits = waits
    *good, last = asyncio.run(jobs.results(links, max_workers))
    assert good == [link.upper() for link in links[:first]]
    assert isinstance(last, RequestError)
    assert last.message == links[first]
    assert set(jobs.cancelled) == set(jobs.begun) - set(links[: first + 1])
    assert len(jobs.begun) <= first + max_workers


def test_early_stop_begins_no_more_links() -> None:
    jobs = Jobs()
    assert asyncio.run(jobs.results([f"l{index}" for index in range(20)], 4, most=1)) == ["L0"]
    assert len(jobs.begun) <= 5


def test_retry_that_succeeds_continues_with_the_rest(files: FileServer) -> None:
    async def all_of() -> list[Any]:
        fetcher = Fetcher(config())
        links = [f"{files.url}/file/a", f"{files.url}/flaky/1/b", f"{files.url}/file/c"]
        try:
            return [result async for result in download(links, lambda link: fetcher.fetch(link, 1 << 20), 2)]
        finally:
            await fetcher.close()

    assert asyncio.run(all_of()) == [CONTENT] * 3
    assert files.num_heard("/flaky/1/b") == 2
    assert refused(f"{files.url}/flaky/9/d")[0] == "failed_to_download_image"
    assert files.num_heard("/flaky/9/d") == 2


# ------------------------------------------------------------------------------------------------------------- one link


def test_a_link_is_fetched_without_anything_of_ours(files: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert fetched(f"http://localhost:{files.port}/file/plain?q=a%20b#part") == CONTENT
    path, headers = files.heard[-1]
    assert path == "/file/plain?q=a%20b"
    assert headers["host"] == f"localhost:{files.port}"
    assert headers["accept-encoding"] == "identity"
    assert not headers.keys() & {"cookie", "authorization", "referer"}


INNER = (
    "127.0.0.1 127.9.9.9 0.0.0.0 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254 100.64.0.1 100.127.255.255 "
    "192.0.0.1 192.0.2.1 192.88.99.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255 "
    ":: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::ffff:169.254.169.254 64:ff9b::a00:1 64:ff9b::8.8.8.8 64:ff9b:1::1 "
    "2002:7f00:1::1 2002:808:808::1 2001::1 2001:db8::1 fc00::1 fd12:3456::1 fe80::1 fec0::1 ff02::1 100::1"
)


@pytest.mark.parametrize("address", INNER.split())
def test_inner_addresses_are_out_of_reach(address: str) -> None:
    assert not Addresses(()).may_reach(ip_address(address))
    host = f"[{address}]" if ":" in address else address
    code, message = refused(f"http://{host}:9/x", allowed_media_networks=())
    assert (code, "not a public host" in message) == ("invalid_image_url", True)
    assert Addresses([f"{address}/{128 if ':' in address else 32}"]).may_reach(ip_address(address))


def test_public_addresses_are_reached() -> None:
    for address in ("8.8.8.8", "1.1.1.1", "151.101.1.69", "2606:4700::1111", "2a00:1450:4001::2004"):
        assert Addresses(()).may_reach(ip_address(address))


def test_name_is_resolved_once_and_addresses_are_checked(files: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second lookup could give another answer."""
    answers = [["127.0.0.1"], ["127.0.0.1", "10.0.0.1"], ["10.0.0.1"]]
    asked: list[str] = []

    def getaddrinfo(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if not host.endswith(".example"):  # an address that is connected to
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answers[len(asked) - 1]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert fetched(f"http://pictures.example:{files.port}/file/x") == CONTENT
    assert asked == ["pictures.example"]
    assert files.heard[-1][1]["host"] == f"pictures.example:{files.port}"
    code, message = refused(f"http://pictures.example:{files.port}/file/x")
    assert code == "invalid_image_url"
    assert not any(address in message for address in ("127.0.0.1", "10.0.0.1"))
    assert len(asked) == 2


WRONG = [
    "ftp://example.com/x",
    "gopher://example.com/x",
    "/etc/passwd",
    "javascript:alert(1)",
    "http:///x",
    "http://",
    "http://user@example.com/x",
    "http://user:word@example.com/x",
    "http://example.com\\@evil.example/x",
    "http://example.com/a b",
    "http://example.com/a\nHost: x",
    "http://example.com:0/x",
    "http://example.com:99999/x",
    "http://[::1/x",
    "http://[fe80::1%25eth0]/x",
    "http://example.com/" + "x" * 9000,
    "http://example.com/" + "\u4e2d" * 8000,  # nine characters each on the way
    "s3://bucket/key",
    "bos://bucket/key",
    "s3://bucket",
    "file:///etc/passwd",
]


@pytest.mark.parametrize("link", WRONG)
def test_links_that_are_none_of_ours(link: str) -> None:
    code, message = refused(link)
    assert code == "invalid_image_url"
    assert len(message) < 300


@pytest.mark.parametrize("host", ["127.1", "0x7f.1", "2130706433", "0177.0.0.1", "localhost", "localhost."])
def test_however_an_address_is_written(host: str) -> None:
    assert refused(f"http://{host}:9/x", allowed_media_networks=())[0] == "invalid_image_url"


def test_redirects_obey_the_rules_of_links(files: FileServer) -> None:
    here = f"{files.url}/redirect?to="

    assert fetched(f"{here}/file/end&status=307") == CONTENT
    assert fetched(f"{here}{files.url}/file/end") == CONTENT
    for to in (
        "http://10.0.0.1/x",
        "http://169.254.169.254/latest",
        "file:///etc/passwd",
        "ftp://a/b",
        "http://u@localhost/",
        "http://[x/",
    ):
        code, message = refused(f"{here}{to}")
        assert code == "invalid_image_url", (to, message)
    assert fetched(f"{here}/redirect?to=/redirect?to=/file/end") == CONTENT
    code, message = refused(f"{here}/redirect?to=/redirect?to=/redirect?to=/file/end")
    assert (code, "more than 3" in message) == ("invalid_image_url", True)


def test_allowed_domains_hold_for_redirects_too(files: FileServer) -> None:
    link = f"http://localhost:{files.port}/file/x"
    assert fetched(link, allowed_media_domains=("LocalHost",)) == CONTENT
    assert refused(link, allowed_media_domains=("pictures.example",))[0] == "invalid_image_url"
    away = f"http://localhost:{files.port}/redirect?to={files.url}/file/x"
    code, message = refused(away, allowed_media_domains=("localhost",))
    assert (code, "--allowed-media-domains" in message) == ("invalid_image_url", True)


@pytest.mark.parametrize("status", [204, 304, 401, 403, 404, 410, 500])
def test_error_status_is_reported(files: FileServer, status: int) -> None:
    code, message = refused(f"{files.url}/status/{status}")
    assert (code, str(status) in message) == ("failed_to_download_image", True)
    assert files.num_heard(f"/status/{status}") == 1


def test_broken_or_unreachable_links_are_reported(files: FileServer) -> None:
    assert refused(f"{files.url}/broken")[0] == "failed_to_download_image"
    assert refused(f"{files.url}/gzip")[0] == "failed_to_download_image"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    code, message = refused(f"http://localhost:{port}/x")
    assert (code, "could not be reached" in message, "127.0.0.1" in message) == ("failed_to_download_image", True, False)


def test_size_and_time_limits_hold_while_downloading(files: FileServer) -> None:
    assert fetched(f"{files.url}/file/x", len(CONTENT)) == CONTENT
    code, message = refused(f"{files.url}/file/x", len(CONTENT) - 1)
    assert (code, str(len(CONTENT)) in message) == ("image_file_too_large", True)
    assert refused(f"{files.url}/endless", 1 << 16)[0] == "image_file_too_large"
    code, message = refused(f"{files.url}/gate/x", media_fetch_timeout_s=0.2)
    assert (code, "0.2 s" in message) == ("failed_to_download_image", True)


def test_slow_source_leaves_slots_for_others(files: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow links of one source leave room for those of others; a link that gets no slot in time fails with an error that says
    so."""
    monkeypatch.setattr("api.media.download.MAX_LINKS", 4)
    files.gate.clear()

    async def scenario() -> None:
        fetcher = Fetcher(config(media_fetch_timeout_s=WATCHDOG_S))
        slow = [asyncio.ensure_future(fetcher.fetch(f"{files.url}/gate/{index}", 1 << 20, source="slow")) for index in range(9)]
        await until(lambda: sum(files.num_heard(f"/gate/{index}") for index in range(9)) == 3)
        assert await asyncio.wait_for(fetcher.fetch(f"{files.url}/file/x", 1 << 20, source="quick"), WATCHDOG_S) == CONTENT
        fetcher._timeout_s = 0.1
        with pytest.raises(RequestError) as caught:
            await fetcher.fetch(f"{files.url}/file/y", 1 << 20, source="slow")
        assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
        assert files.num_heard("/file/y") == 0
        files.gate.set()
        assert await asyncio.gather(*slow) == [CONTENT] * 9
        await fetcher.close()

    asyncio.run(scenario())


def test_timeout_of_a_link_begins_with_its_slot(files: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that waited for others and then met a slow server failed because of that server: no 429."""
    monkeypatch.setattr("api.media.download.MAX_LINKS", 1)
    files.gate.clear()

    async def scenario() -> None:
        fetcher = Fetcher(config(media_fetch_timeout_s=0.2))
        for _ in range(20):  # again where this machine was too busy to give it its turn in time
            slot = await fetcher._links.take("another", WATCHDOG_S)
            fetch = asyncio.ensure_future(fetcher.fetch(f"{files.url}/gate/x", 1 << 20))
            await asyncio.sleep(0)
            assert len(fetcher._links._waiting) == 1
            slot.release()
            with pytest.raises(RequestError) as caught:
                await fetch
            if caught.value.status != 429:
                break
        assert (caught.value.status, caught.value.code) == (400, "failed_to_download_image")
        assert "did not answer completely within 0.2 s" in caught.value.message
        await fetcher.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_slow_names_and_files_block_no_others(files: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop's default executor has few threads, which all blocking calls of the process share."""
    gate, resolve, asked = threading.Event(), socket.getaddrinfo, []

    def getaddrinfo(host: str, *others: Any, **options: Any) -> list[Any]:
        if host.endswith(".example"):
            asked.append(threading.current_thread().name)
            gate.wait(WATCHDOG_S)
            host = "127.0.0.1"
        return resolve(host, *others, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    (tmp_path / "a").write_bytes(CONTENT)

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        fetcher = Fetcher(config(allowed_local_media_path=str(tmp_path), media_fetch_timeout_s=WATCHDOG_S))
        links = [f"http://slow{index}.example:{files.port}/file/x" for index in range(40)]
        slow = [asyncio.ensure_future(fetcher.fetch(link, 1 << 20, source="slow")) for link in links]
        await until(lambda: len(asked) == 40)
        quick = [
            fetcher.fetch(f"http://localhost:{files.port}/file/x", 1 << 20),
            fetcher.fetch(f"file://{tmp_path}/a", 1 << 20),
        ]
        assert await asyncio.wait_for(asyncio.gather(*quick), WATCHDOG_S) == [CONTENT] * 2
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), WATCHDOG_S) == 1
        gate.set()
        assert await asyncio.gather(*slow) == [CONTENT] * 40
        await fetcher.close()

    asyncio.run(scenario())


def test_connection_to_an_address_sends_the_host_name(tmp_path: Path) -> None:
    """TLS sends the name, and the certificate must match it; this one is not trusted."""
    key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate]
    subprocess.run(command + names, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    seen: list[str | None] = []
    context.sni_callback = lambda _, name, __: seen.append(name)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WATCHDOG_S)

        def serve() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=serve)
        thread.start()
        link = f"https://localhost:{server.getsockname()[1]}/x"
        assert refused(link)[0] == "failed_to_download_image"  # tried twice
        thread.join(WATCHDOG_S)
    assert seen == ["localhost"] * 2


# ---------------------------------------------------------------------------------------------------------- files and stores


def test_files_only_beneath_the_allowed_directory(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in side", tmp_path / "in side too"
    (inside / "deep").mkdir(parents=True)
    outside.mkdir()
    (inside / "deep" / "a b.png").write_bytes(CONTENT)
    (outside / "secret").write_bytes(b"secret")
    (inside / "link").symlink_to(outside / "secret")
    (inside / "way").symlink_to(outside)
    (inside / "short").symlink_to(inside / "deep" / "a b.png")
    os.mkfifo(inside / "pipe")
    root = {"allowed_local_media_path": str(inside)}
    quoted = str(inside).replace(" ", "%20")
    for good in (
        f"file://{quoted}/deep/a%20b.png",
        f"file://localhost{quoted}/short",
        f"file://{quoted}/deep/../deep/a%20b.png",
    ):
        assert fetched(good, **root) == CONTENT
    beyond = ["link", "way/secret", "../in%20side%20too/secret", "%2e%2e/in%20side%20too/secret"]
    for bad in (*beyond, "pipe", "deep", "none", "%00"):
        assert refused(f"file://{quoted}/{bad}", **root)[0] == "invalid_image_url", bad
    assert refused(f"file://elsewhere{quoted}/short", **root)[0] == "invalid_image_url"
    assert refused(f"file://{quoted}/short", 100, **root)[0] == "image_file_too_large"
    code, message = refused(f"file://{quoted}/short")
    assert (code, "--allowed-local-media-path" in message) == ("invalid_image_url", True)


@pytest.mark.parametrize("swapped", ["deep/a", "deep"])
def test_file_swapped_during_its_check_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapped: str) -> None:
    """The file, or a directory above it, becomes a link to the outside between the check of its path and its opening."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for directory in (inside / "deep", outside / "deep"):
        directory.mkdir(parents=True)
        (directory / "a").write_bytes(CONTENT)
    link, opened = f"file://{inside}/deep/a", os.open
    assert fetched(link, allowed_local_media_path=str(inside)) == CONTENT

    def open_after_swap(path: Any, *others: Any, **options: Any) -> int:
        if path == str(inside / "deep" / "a"):
            (inside / swapped).rename(tmp_path / "away")
            (inside / swapped).symlink_to(outside / swapped)
        return opened(path, *others, **options)

    monkeypatch.setattr(os, "open", open_after_swap)
    code, message = refused(link, allowed_local_media_path=str(inside))
    assert (code, "not a regular file inside" in message) == ("invalid_image_url", True)


def test_kernel_buffers_of_downloads_are_small(files: FileServer) -> None:
    buffers: list[int] = []

    def came(_: int) -> None:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as end:
                if end.family == socket.AF_INET and end.getpeername()[1] == files.port:
                    buffers.append(end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))

    async def scenario() -> None:
        fetcher = Fetcher(config())
        assert await fetcher.fetch(f"{files.url}/file/x", 1 << 20, came=came) == CONTENT
        await fetcher.close()

    asyncio.run(scenario())
    assert set(buffers) == {2 * RECEIVE_BYTES}  # the kernel counts its own of it twice


def test_only_the_configured_store_may_be_private(files: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose part of the host of a bucket link without a configured endpoint, so the host must be public."""
    asked: list[str] = []

    def getaddrinfo(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", files.port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    keys = {"object_store_access_key": "key", "object_store_secret_key": "secret", "allowed_object_buckets": ("bucket",)}
    code, message = refused("s3://bucket/key", allowed_media_networks=(), **keys)
    assert (code, "not a public host" in message) == ("invalid_image_url", True)
    assert len(asked) == 1


def test_presigned_link_matches_amazons_example() -> None:
    """The example of "Authenticating Requests: Using Query Parameters (AWS Signature Version 4)"."""
    store = ObjectStore(
        "", "", access_key="AKIAIOSFODNN7EXAMPLE", secret_key="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", session_token=""
    )
    link = "https://examplebucket.s3.amazonaws.com/test.txt"
    assert signed(link, store, "us-east-1", datetime(2013, 5, 24, tzinfo=timezone.utc), expires_s=86400) == (
        "https://examplebucket.s3.amazonaws.com/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential="
        "AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400"
        "&X-Amz-SignedHeaders=host&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    )


@pytest.mark.parametrize("scheme", ["s3", "bos"])
def test_objects_are_fetched_from_the_operators_store(files: FileServer, scheme: str) -> None:
    options = {
        "object_store_endpoint": f"{files.url}/file",
        "object_store_access_key": "key",
        "object_store_secret_key": "secret",
        "object_store_session_token": "token/1",
        "allowed_object_buckets": ("other", "buck.et"),
    }
    assert fetched(f"{scheme}://buck.et/a/b c%2B.png".replace(" ", "%20"), allowed_media_networks=(), **options) == CONTENT
    path, headers = files.heard[-1]
    assert path.startswith("/file/buck.et/a/b%20c%2B.png?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=key%2F")
    assert "X-Amz-Security-Token=token%2F1" in path
    assert "secret" not in path
    assert headers["host"] == f"127.0.0.1:{files.port}"


@pytest.mark.parametrize("scheme", ["s3", "bos"])
@pytest.mark.parametrize(
    ("link", "allowed", "is_allowed"),
    [
        ("bucket/key", (), False),
        ("bucket/key", ("bucket",), True),
        ("bucket/key", ("*",), True),
        ("bucket2/key", ("bucket",), False),
        ("bucket/public/key", ("other", "bucket/public/"), True),
        ("bucket/private/key", ("bucket/public/",), False),
        ("bucket/public%2Fkey", ("bucket/public/",), True),
        ("bucket/public/../private/key", ("bucket/public/",), False),
        ("bucket/public/%2e%2e/private/key", ("*",), False),
        ("../bucket/key", ("*",), False),
    ],
)
def test_only_allowed_buckets_are_read(
    files: FileServer, scheme: str, link: str, allowed: tuple[str, ...], is_allowed: bool
) -> None:
    options = {
        "object_store_endpoint": f"{files.url}/file",
        "object_store_access_key": "key",
        "object_store_secret_key": "secret",
        "allowed_object_buckets": allowed,
    }
    num_before = len(files.heard)
    if is_allowed:
        assert fetched(f"{scheme}://{link}", **options) == CONTENT
    else:
        code, message = refused(f"{scheme}://{link}", **options)
        assert code == "invalid_image_url"
        assert "--allowed-object-buckets" in message or '"."' in message
        assert len(files.heard) == num_before


def test_thousands_of_pieces_leave_the_loop_turns() -> None:
    """A server may send chunks of one byte, and the kernel hands over thousands of them at once."""
    num_pieces = 20 * PIECES_OF_A_TURN

    class Pieces(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for _ in range(num_pieces):
                yield b"x"

    response = httpx2.Response(200, stream=Pieces())
    found, slots = run_and_count(read_content(response, num_pieces, lambda count: None))
    assert found == b"x" * num_pieces
    assert slots >= num_pieces // PIECES_OF_A_TURN
