"""tools/setup.sh: the packages that it installs for given options, and when it builds again."""

from __future__ import annotations

import fcntl
import select
import subprocess
import sys
from pathlib import Path

import pytest

from engine.options.resolve_device import WHEELS
from tests.paths import REPOSITORY

IS_BUILT = "level=best; is_up_to_date || true; is_native_built && echo built || echo not"
PATH = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
MODULES = ("shm/_native.cpython-311-x86_64-linux-gnu.so", "ops/_cpu.cpython-311-x86_64-linux-gnu.so")
SETUP = 'source "$0/tools/setup.sh"; '


def shell(
    code: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    directory: Path = REPOSITORY,
    caller: Path | None = None,
) -> str:
    """Return the output of `code` after sourcing the copy of tools/setup.sh in `directory`, for a `caller` there or
    elsewhere."""
    command = ["bash", "-c", SETUP + code, str(directory), *arguments]
    variables = PATH | (environment or {})
    done = subprocess.run(
        command, cwd=caller or directory, env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else f"exit {done.returncode}: {done.stderr}"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Smallest checkout for tools/setup.sh, with an environment without packages."""
    directory = tmp_path / "a checkout"
    for place in ("tools", "shm/native", "ops/cpu/native", "build/python3.11", ".venv/bin", ".venv/lib/python3.11"):
        (directory / place).mkdir(parents=True)
    (directory / "tools" / "setup.sh").write_text((REPOSITORY / "tools" / "setup.sh").read_text())
    for name in ("CMakeLists.txt", "pyproject.toml", ".venv/.tokamak-made"):
        (directory / name).write_text("")
    (directory / ".venv" / "bin" / "python").symlink_to(sys.executable)
    return directory


def install(checkout: Path) -> None:
    """Leave what a setup leaves that has installed everything."""
    for name in MODULES:
        (checkout / name).write_text("a module")
    packages, native = shell("echo $(package_fingerprint) $(native_fingerprint)", directory=checkout).split()
    (checkout / ".venv" / ".tokamak-base").write_text(packages)
    listed = shell("native_build=build/python3.11; list_modules", directory=checkout)
    (checkout / "build" / "python3.11" / "tokamak-native").write_text(f"best {native}\n{listed}\n")


@pytest.mark.parametrize(
    ("arguments", "environment", "file", "expected"),
    [
        ([], {}, "", ""),
        (["--model", "reference", "--ops", "native"], {"TOKAMAK_OPS": "reference"}, "", ""),
        (["--ops", "reference"], {}, "", "cpu"),
        (["MODEL", "--ops=reference"], {}, "", "cpu"),
        ([], {"TOKAMAK_OPS": "reference"}, "", "cpu"),
        ([], {}, "model: x\nops: reference\n", "cpu"),
        ([], {}, '{"ops": "reference", "port": 1}', "cpu"),
        ([], {}, '{"port": 1, "ops": "reference"}', "cpu"),
        ([], {}, "{port: 1, ops: reference}", "cpu"),
        ([], {}, "port: 1\nops: 'reference'  # plain Paddle\n", "cpu"),
        ([], {}, '{"ops":\r\n "reference"\r\n}', "cpu"),
        ([], {}, "port: 1\ndevice: gpu", "cuda"),
        ([], {}, '{"port": 1, "device":"gpu"}', "cuda"),
        ([], {}, '{"port": 1, "device":"gpu", "ops": "fused"}', "gpu"),
        ([], {"TOKAMAK_OPS": "native"}, "ops: reference\n", ""),
        ([], {}, "model: x # ops: reference\n", ""),
        ([], {}, "model: reference\nops: native\n", ""),
        ([], {}, "served-model-name: {drops: reference, ops: reference-2}", ""),
        (["--ops", "auto"], {}, "ops: reference\n", ""),
        ([], {}, "model: ops\n# reference\n", ""),
        (["--device", "gpu", "--ops", "reference"], {}, "", "gpu"),
        ([], {"TOKAMAK_DEVICE": "xpu"}, "", "xpu"),
        ([], {"TOKAMAK_EXTRA": "cpu"}, "", "cpu"),
    ],
)
def test_paddle_is_installed_if_options_need_it(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], file: str, expected: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(file)
    for given in (["--config", str(config)], [f"--config={config}"]):
        assert shell('paddle_build "$@"', *(given if file else []), *arguments, environment=environment) == expected
    if file:
        environment = {**environment, "TOKAMAK_CONFIG": config.name}
        assert shell('paddle_build "$@"', *arguments, environment=environment, caller=tmp_path) == expected


def test_device_builds_use_their_index() -> None:
    """The same indexes as error messages name."""
    for device in ("cpu", "gpu", "xpu"):
        index = WHEELS[device][1]
        assert shell('paddle_index base "$@"', device).split() == (["--extra-index-url", index] if index else [])


@pytest.mark.parametrize(
    ("wanted", "built", "will_do"),
    [
        ("best", "best", True),
        ("best", "runnable", True),
        ("runnable", "best", False),
        ("all", "runnable", False),
        ("best", "all", True),
    ],
)
def test_more_kernels_than_wanted_will_do(wanted: str, built: str, will_do: bool) -> None:
    assert shell('has_level "$@" && echo yes || echo no', wanted, built) == ("yes" if will_do else "no")


def test_changed_sources_rebuild_native_modules(checkout: Path) -> None:
    seen = {shell("native_fingerprint", directory=checkout)}
    assert seen == {shell("native_fingerprint", directory=checkout)}
    for number, (name, content) in enumerate(
        {
            "CMakeLists.txt": "changed",
            "shm/native/a.cpp": "changed",
            "ops/cpu/native/b.inc": "changed",
            "ops/cpu/native/c.h": "changed",
            "pyproject.toml": 'requires = ["nanobind>=3"]',
        }.items(),
        start=2,
    ):
        (checkout / name).write_text(content)
        seen.add(shell("native_fingerprint", directory=checkout))
        assert len(seen) == number
    (checkout / "shm" / "ring.py").write_text("used in place")
    (checkout / "pyproject.toml").write_text('requires = ["nanobind>=3"]\ndependencies = ["rich"]')
    seen.add(shell("native_fingerprint", directory=checkout))
    assert len(seen) == 6


def test_environments_of_one_python_share_modules(checkout: Path, tmp_path: Path) -> None:
    """Modules are built beside the sources. Those of another Python have other names, so neither overwrites the other."""
    install(checkout)
    for environment, expected in (("3.11", "built"), ("3.12", "not")):
        other = tmp_path / environment
        (other / "lib" / f"python{environment}").mkdir(parents=True)
        (other / "bin").mkdir()
        (other / "bin" / "python").symlink_to(sys.executable)
        (other / ".tokamak-made").write_text("")
        assert shell(IS_BUILT, directory=checkout, environment={"TOKAMAK_VENV": str(other)}) == expected
    assert shell("setup best; echo done", directory=checkout) == "done"


@pytest.mark.parametrize(("name", "content"), [(MODULES[0], None), (MODULES[1], ""), (MODULES[0], "a mod")])
def test_damaged_modules_are_built_again(checkout: Path, name: str, content: str | None) -> None:
    """A build begins without them, since ninja looks only at their time."""
    install(checkout)
    assert shell(IS_BUILT, directory=checkout) == "built"
    if content is None:
        (checkout / name).unlink()
    else:
        (checkout / name).write_text(content)
    assert shell(IS_BUILT, directory=checkout) == "not"
    fakes = (
        'has_cmake() { true; }; install_build_tools() { true; }; with_build_tools() { mkdir -p "$native_build"; echo "$@"; }'
    )
    assert "cmake --build" in shell(f"{IS_BUILT}; {fakes}; build_native", directory=checkout)
    assert not list(checkout.glob("*/*.so"))


@pytest.mark.parametrize("trouble", ["no python", "another python", "interrupted"])
def test_broken_environment_is_made_again(checkout: Path, trouble: str) -> None:
    """Only packages are removed: models and logs stay."""
    install(checkout)
    venv = checkout / ".venv"
    (venv / "models").mkdir()
    (venv / "lib" / "python3.11" / "site-packages").mkdir()
    (venv / "pyvenv.cfg").write_text("")
    if trouble == "no python":
        (venv / "bin" / "python").unlink()
        (venv / "bin" / "python").symlink_to("/nowhere/python3")
    elif trouble == "another python":
        (venv / "lib" / "python3.11").rename(venv / "lib" / "python3.9")
    else:
        (venv / ".tokamak-base").unlink()
        (venv / ".tokamak-unfinished").write_text("")
    code = f"make_venv() {{ ls -A '{venv}'; exit 0; }}; setup best"
    assert set(shell(code, directory=checkout).split()) & {"bin", "lib", "models", "pyvenv.cfg"} == {"models"}


def test_failed_installation_leaves_the_environment(checkout: Path) -> None:
    """An installer that ends by itself has removed nothing half; one that is killed may have."""
    install(checkout)
    (checkout / ".venv" / ".tokamak-base").unlink()
    for status, is_left in ((1, False), (137, True)):
        fakes = f"is_venv_broken() {{ false; }}; find_installer() {{ true; }}; install_packages() {{ exit {status}; }}; "
        assert "packages: failed" in shell(f"{fakes} setup best", directory=checkout)
        assert (checkout / ".venv" / ".tokamak-unfinished").exists() == is_left


@pytest.mark.parametrize(
    ("arguments", "is_there", "expected"),
    [
        (["--device", "gpu"], False, ".venv"),
        (["--device", "gpu", "--ops", "fused"], False, ".venv-gpu"),
        (["--device=xpu"], False, ".venv-xpu"),
        (["--ops", "reference"], False, ".venv"),
        ([], False, ".venv"),
        ([], True, ".venv"),
        (["--ops", "fused"], True, ".venv-gpu"),
        (["--device", "auto", "--ops", "reference"], True, ".venv-gpu"),
        (["--device", "cpu"], True, ".venv"),
        (["--device", "npu"], True, ".venv"),
        (["--ops", "native"], True, ".venv"),
    ],
)
def test_devices_have_their_own_environment(checkout: Path, arguments: list[str], is_there: bool, expected: str) -> None:
    """It is found by a later start that names no device, if there is a GPU."""
    if is_there:
        (checkout / ".venv-gpu").mkdir()
        (checkout / ".venv-gpu" / ".tokamak-gpu").write_text("")
    code = 'has_gpu() { true; }; use_venv "$(paddle_build "$@")"; echo "$venv $build_tools"'
    found = str(checkout / expected)
    assert shell(code, *arguments, directory=checkout) == f"{found} {found}/build-tools"
    environment = {"TOKAMAK_VENV": str(checkout / "own")}
    assert shell(code, *arguments, directory=checkout, environment=environment).startswith(environment["TOKAMAK_VENV"])
    file = checkout / "config.yaml"
    if not arguments:
        for text, place in (("port: 1\n", expected), ("device: cpu\n", ".venv")):
            file.write_text(text)
            assert shell(code, "--config", str(file), directory=checkout).startswith(f"{checkout / place} ")


def test_an_interpreter_may_lie_anywhere(tmp_path: Path) -> None:
    python = tmp_path / "a directory" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    assert shell("find_python", environment={"TOKAMAK_PYTHON": str(python)}) == str(python)
    assert shell("find_python", environment={"TOKAMAK_PYTHON": "a directory/python"}, caller=tmp_path) == str(python)
    assert "no Python 3.10 to 3.13 found" in shell("find_python", environment={"TOKAMAK_PYTHON": "/nowhere"})
    (tmp_path / ".tokamak-made").write_text(f"{python}\n")
    assert shell('find_pip; echo "${pip[0]}"', environment={"TOKAMAK_VENV": str(tmp_path)}) == str(python)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "https://mine/simple|file:///a https://b|/wheels,/more"),
        ({"UV_INDEX": "https://uv"}, "https://mine/simple|https://uv|/wheels,/more"),
    ],
)
def test_uv_uses_pips_indexes(tmp_path: Path, own: dict[str, str], expected: str) -> None:
    """The environment wins over the file, and uv's own settings win over both."""
    settings = tmp_path / "pip.conf"
    settings.write_text("[global]\nindex-url = https://theirs/simple\nextra-index-url =\n    file:///a\n    https://b\n")
    environment = {"PIP_CONFIG_FILE": str(settings), "PIP_INDEX_URL": "https://mine/simple", "PIP_FIND_LINKS": "/wheels /more"}
    code = 'pip=("$1" -m pip); take_over_indexes; echo "$UV_DEFAULT_INDEX|$UV_INDEX|$UV_FIND_LINKS"'
    assert shell(code, sys.executable, environment=environment | own) == expected


def test_pip_installs_without_uv(checkout: Path) -> None:
    """uv is not wanted, or this machine cannot have it, which is reported."""
    (checkout / ".venv" / ".tokamak-made").write_text(f"{sys.executable}\n")
    code = "find_installer 2>&1; declare -f install"
    asked = shell(code, directory=checkout, environment={"TOKAMAK_INSTALLER": "pip"})
    assert "pip_install" in asked
    assert "uv" not in asked
    found_none = shell(code, directory=checkout, environment={"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"})
    assert "uv could not be installed" in found_none
    assert "pip_install" in found_none


def test_environment_path_is_relative_to_the_caller(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    for given, expected in (("environment", "here/environment"), ("../other/", "other"), (str(tmp_path), "")):
        found = shell('cd /; echo "$venv"', environment={"TOKAMAK_VENV": given}, caller=tmp_path / "here")
        assert found == str(tmp_path / expected)
    assert shell('echo "$venv"', caller=tmp_path) == str(REPOSITORY / ".venv")


def test_modules_are_compiled_once(tmp_path: Path) -> None:
    """Even if a container sets PYTHONDONTWRITEBYTECODE."""
    (tmp_path / "module.py").write_text("")
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "PYTHON": sys.executable}
    assert shell('"$PYTHON" -c "import module"', environment=environment) == ""
    assert list(tmp_path.glob("__pycache__/module.*.pyc"))


def test_up_to_date_setup_needs_no_lock(checkout: Path) -> None:
    """A lock may be impossible to open: the checkout is read-only, or another user's."""
    lock = checkout / ".venv" / ".tokamak-lock"
    lock.mkdir()  # which not even root can write to
    assert "is missing or out of date and cannot be written; run this as its owner" in shell("setup best", directory=checkout)
    install(checkout)
    before = {path: path.stat().st_mtime_ns for path in checkout.rglob("*")}
    assert shell("setup best; echo done", directory=checkout) == "done"
    assert {path: path.stat().st_mtime_ns for path in checkout.rglob("*")} == before


def test_setup_without_a_wait_prints_nothing(checkout: Path) -> None:
    assert shell("lock_venv 2>&1", directory=checkout) == ""


def test_setup_waits_for_another_and_releases_the_lock(checkout: Path) -> None:
    """The second of two finds everything done, and the engine that it starts does not hold the lock."""
    venv = checkout / ".venv"
    command = ["bash", "-c", f"{SETUP} setup best; echo done; exec cat", str(checkout)]
    with (venv / ".tokamak-lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with subprocess.Popen(
            command, env=PATH, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as waiting:
            assert waiting.stdin is not None
            assert waiting.stdout is not None
            assert waiting.stderr is not None
            select.select([waiting.stderr], [], [], 60)
            install(checkout)
            fcntl.flock(other, fcntl.LOCK_UN)
            assert waiting.stdout.readline() == "done\n"
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            waiting.stdin.close()
            assert waiting.stderr.read() == (
                f"tokamak: waiting for another tools/serve or tools/test that installs into {venv}\n"
            )


def test_failed_job_ends_others_and_shows_its_log(tmp_path: Path) -> None:
    """The end of its log, without what pip says of other indexes."""
    code = "begin good sleep 100; begin bad bash -c 'echo WARNING: Location x is ignored; echo last; exit 3'; wait_for_jobs"
    printed = shell(code, environment={"TOKAMAK_VENV": str(tmp_path)})
    assert printed.startswith("exit 1:")
    assert "last" in printed
    assert "Location" not in printed
    assert str(tmp_path / "bad.log") in printed
