"""The list of engines: its format, and what happens when it changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.cluster.membership import LOOK_INTERVAL_NS, Address, EngineFile, membership_of, parse_address, parse_list
from engine.errors import OptionError
from engine.options.router import read_router_options
from tests.waiting import wait_until


def test_lists_name_each_engine_once() -> None:
    lines = ["# engines", "", " 10.0.0.1:9100  # first", "[::1]:9100", "host-2.example:1", "10.0.0.1:9100"]
    found = parse_list(lines, "list")
    assert found == (Address("10.0.0.1", 9100), Address("::1", 9100), Address("host-2.example", 1))
    assert [address.endpoint for address in found] == ["tcp://10.0.0.1:9100", "tcp://[::1]:9100", "tcp://host-2.example:1"]


@pytest.mark.parametrize("text", ["10.0.0.1", ":9100", "a:0", "a:65536", "a:x", "::1:9100", "a b:1", "a:", "a:-1", "a:\uff11"])
def test_wrong_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_address(text)
    with pytest.raises(OptionError, match="list, line 2: "):
        parse_list(["a:1", text], "list")


def test_a_list_without_engines_is_refused() -> None:
    with pytest.raises(OptionError, match="names no engine"):
        parse_list(["# nothing"], "list")


def test_changes_are_seen_once(tmp_path: Path) -> None:
    """Content, a mistake, a file that is gone and is back."""
    path = tmp_path / "engines"
    path.write_text("a:1\n")
    file = EngineFile(path)
    now_ns = 0

    def look() -> tuple[Address, ...] | None:
        nonlocal now_ns
        now_ns += LOOK_INTERVAL_NS
        return file.changed(now_ns)

    assert look() == (Address("a", 1),)
    assert look() is None
    path.write_text("a:1\nb:2\n")
    assert file.changed(now_ns + 1) is None  # not time yet
    assert look() == (Address("a", 1), Address("b", 2))
    path.write_text("a:1\nb\n")
    with pytest.raises(OptionError, match="line 2"):
        look()
    assert look() is None
    path.unlink()
    with pytest.raises(OptionError, match="No such file"):
        look()
    assert look() is None
    path.write_text("a:1\n")
    os.utime(path, ns=(1, 1))
    assert look() == (Address("a", 1),)


def test_names_are_looked_up() -> None:
    """All addresses of a name, once, until they change."""
    found = membership_of("dns:localhost:9100")
    addresses = found.read()
    assert Address("127.0.0.1", 9100) in addresses
    assert wait_until(lambda: found.changed(0), what="the thread has looked it up") == addresses
    assert found.changed(0) is None
    with pytest.raises(OptionError, match="cannot look up nowhere"):
        membership_of("dns:nowhere.invalid:1").read()


@pytest.mark.parametrize("text", ["dns:localhost", "dns::9100", "dns:a:70000"])
def test_wrong_names_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--engines"):
        membership_of(text)
    with pytest.raises(OptionError, match="--engines"):
        read_router_options(["--engines", text], {})


def test_options_of_a_router() -> None:
    """A list, in the environment too; nothing that belongs to the model; no silence longer than the time-out."""
    assert read_router_options(["--engines", "dns:a:1"], {}).values["engines"] == "dns:a:1"
    assert read_router_options([], {"TOKAMAK_ENGINES": "list", "TOKAMAK_BLOCK_SIZE": "16"}).values["engines"].endswith("/list")
    for arguments, cause in (([], "--engines is missing"), (["--engines", "a", "--peer-silence", "4"], "is longer than")):
        with pytest.raises(OptionError, match=cause):
            read_router_options(arguments, {})
    with pytest.raises(SystemExit):
        read_router_options(["--engines", "a", "--block-size", "16"], {})
