"""The wheel: its contents and metadata, and no conflicts between our packages and a user's. It is built without native modules,
which take minutes; those of the checkout replace them.
"""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import httpx
import pytest

import tokamak
from tests.e2e.engine_process import DEMO, EngineProcess
from tests.paths import REPOSITORY
from tests.waiting import WATCHDOG_S

PACKAGES = ("api", "engine", "ops", "shm", "tools", "workers")
BUILD = "import sys; from scikit_build_core.build import build_wheel; build_wheel(sys.argv[1], {'wheel.cmake': 'false'})"
OF_A_CHECKOUT = ("native/", "tools/clients/", "tools/device/", "tools/package/", "tools/sanitized/")  # left out, with scripts
MAX_MIB = 16  # without native modules


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-c", BUILD, str(directory)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=WATCHDOG_S)
    (path,) = directory.iterdir()
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def site(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages with the wheel, the checkout's native modules, and a foreign package called `tools`."""
    directory = tmp_path_factory.mktemp("site-packages")
    wheel.extractall(directory)
    for package in ("ops", "shm"):
        for module in (REPOSITORY / package).glob("*.so"):
            (directory / "tokamak" / package / module.name).symlink_to(module)
    make_foreign(directory / "tools")
    return directory


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's directory, with packages named like ours and like our dependencies."""
    directory = tmp_path_factory.mktemp("home")
    for name in (*PACKAGES, "paddle"):
        make_foreign(directory / name)
    return directory


def make_foreign(place: Path) -> None:
    place.mkdir()
    (place / "__init__.py").write_text(f"FOREIGN = {str(place)!r}\n")


def environment(*places: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_site_packages_gets_only_tokamak(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tokamak"}
    below = {name.split("/")[1] for name in wheel.namelist() if name.startswith("tokamak/")}
    modules = {path.name for path in (REPOSITORY / "tools" / "package" / "tokamak").iterdir() if path.name != "__pycache__"}
    assert below == {*PACKAGES, *modules}


def test_every_file_that_runs_is_in_it(wheel: zipfile.ZipFile) -> None:
    """Modules, the page, the embedded models, CUDA sources, files to deploy; nothing that only a checkout uses."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *PACKAGES],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    scripts = {path.name for path in (REPOSITORY / "tools").iterdir() if path.is_file() and path.suffix not in (".py", ".md")}
    wanted = {
        f"tokamak/{name}"
        for name in tracked
        if name
        and (REPOSITORY / name).is_file()
        and not any(part in name for part in OF_A_CHECKOUT)
        and name.removeprefix("tools/") not in scripts
    }
    assert wanted
    found = {name for name in wheel.namelist() if name.startswith(tuple(f"tokamak/{package}/" for package in PACKAGES))}
    assert sorted(wanted - found) == []
    assert sorted(found - wanted) == []


def test_no_module_imports_tests(wheel: zipfile.ZipFile) -> None:
    sources = {name: wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".py")}
    assert [name for name, text in sources.items() if re.search(r"^\s*(from|import) tests\b", text, re.MULTILINE)] == []


def test_metadata(wheel: zipfile.ZipFile) -> None:
    said = metadata(wheel)
    assert said["Name"] == "tokamak-serve"
    assert said["Requires-Python"] == ">=3.10"
    needed = [text.partition(";")[0].strip() for text in said.get_all("Requires-Dist") or [] if "extra ==" not in text]
    assert not [name for name in needed if name.startswith(("paddle", "torch", "openai", "av", "pillow"))]
    (entry,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    assert "tokamak = tokamak.__main__:main" in entry.replace("=", " = ").replace("  ", " ")


def test_licences_of_its_contents_are_included(wheel: zipfile.ZipFile) -> None:
    """Ours; those of the page's scripts; and those of libraries compiled into the native modules."""
    said = metadata(wheel).get_all("License-File") or []
    assert {Path(name).name for name in said} >= {
        "LICENSE",
        "marked.LICENSE",
        "purify.LICENSE",
        "nanobind.LICENSE",
        "robin_map.LICENSE",
    }
    names = wheel.namelist()
    assert all(any(name.endswith(f"/licenses/{licence}") for name in names) for licence in said)


def test_it_stays_small(wheel: zipfile.ZipFile) -> None:
    assert sum(info.compress_size for info in wheel.infolist()) < MAX_MIB << 20


def test_import_leaves_other_modules_alone(site: Path, home: Path) -> None:
    """`import tokamak` leaves the module path unchanged and imports nothing of the engine."""
    code = """
import json, sys
before = list(sys.path)
import tokamak
import tools, api
ours = [name for name in sys.modules if name.partition(".")[0] in ("engine", "ops", "shm", "workers")]
print(json.dumps([before == sys.path, tokamak.__file__, tools.FOREIGN, api.FOREIGN, ours]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=home, env=environment(site), check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout) == [True, str(site / "tokamak" / "__init__.py"), str(home / "tools"), str(home / "api"), []]


def test_checkout_environment_has_the_same_package() -> None:
    assert Path(tokamak.__file__).parent == REPOSITORY / "tools" / "package" / "tokamak"


@pytest.mark.parametrize(("form", "safe_path"), [("script", ""), ("module", ""), ("path", ""), ("path", "1")])
def test_command_finds_its_packages(site: Path, home: Path, form: str, safe_path: str) -> None:
    """pip's script, -m, and a file, in a directory with other packages of these names, which are on PYTHONPATH too."""
    forms = {
        "script": ["-c", "import sys; from tokamak.__main__ import main; sys.exit(main())"],
        "module": ["-m", "tokamak"],
        "path": [str(site / "tokamak" / "__main__.py")],
    }
    settings = environment(home, site) | ({"PYTHONSAFEPATH": safe_path} if safe_path else {})
    command = [sys.executable, *forms[form], "serve", "--ops", "nothing"]
    done = subprocess.run(command, cwd=home, env=settings, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr.partition(":")[0]) == (2, "tokamak serve"), done.stderr


@pytest.mark.slow
def test_serves_beside_packages_of_the_same_names(site: Path, home: Path) -> None:
    """Every process of it runs the wheel's modules."""
    engine = EngineProcess(DEMO, environment=environment(home, site))
    engine.command[1:3] = ["-m", "tokamak"]
    engine.directory = home
    with engine:
        asked = {"prompt": "What are you?", "max_tokens": 4}
        answer = httpx.post(f"{engine.url}/v1/completions", json=asked, timeout=WATCHDOG_S)
        assert answer.status_code == 200
        for name, actor in engine.actors().items():
            if name == "supervisor":  # its path must not reach children that are not Python
                continue
            given = Path(f"/proc/{actor['pid']}/environ").read_bytes().split(b"\0")
            (path,) = (text.decode() for text in given if text.startswith(b"PYTHONPATH="))
            assert path.removeprefix("PYTHONPATH=").split(os.pathsep)[:2] == [str(site / "tokamak"), str(home)], name
        assert httpx.get(f"{engine.url}/page/vendor/marked.js", timeout=WATCHDOG_S).status_code == 200
