"""Guarantees of image, pod and unit, kept by an engine under the same restrictions: a read-only root, a user without
privileges, 64 MB of /dev/shm. The machine's own files replace those of the image.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import pytest

from engine.cluster.key import make_key_file
from tests.e2e.engine_process import EngineProcess
from tests.paths import REPOSITORY
from tests.tools.deploy.files import cluster_pod, container, image, service, variables_of
from tests.waiting import WATCHDOG_S, wait_until
from tools.bench.processes import free_port
from tools.deploy.containment import contained
from tools.deploy.rehearsal import environment

pytestmark = pytest.mark.slow

USER = 10001
OWN = ("cache", "cluster", "dev", "opt/tokamak", "proc", "run", "sys", "tmp", "var/cache")  # the rest is as this machine has it
SHARED_MEMORY_BYTES = 64 << 20
ASKED = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0}


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    done = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "true"], check=False)
    if done.returncode:
        pytest.skip("this machine lets nobody make namespaces (an engine as in its image)")


class ContainedEngine(EngineProcess):
    """Engine started by a command without any path of this machine."""

    def __init__(
        self,
        root: Path,
        command: Sequence[str],
        variables: Mapping[str, str],
        memory: Sequence[str],
        binds: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("")
        self.directory = root
        self.variables = {**variables, "TOKAMAK_HOST": "127.0.0.1", "TOKAMAK_PORT": str(free_port())}
        self.command = contained(
            root, command, user=USER, environment=self.variables, binds=self._lay_out(root) | dict(binds or {}), memory=memory
        )

    def _lay_out(self, root: Path) -> dict[str, str]:
        binds = {}
        for place in OWN:
            (root / place).mkdir(parents=True)
        for each in Path("/").iterdir():
            if each.is_symlink():
                (root / each.name).symlink_to(each.readlink())
            elif each.is_dir() and not (root / each.name).exists():
                (root / each.name).mkdir()
                binds[str(each)] = str(each)
        for place in (sys.base_prefix, REPOSITORY, sys.prefix):  # wherever they are
            binds[str(place)] = str(place)
        return {**binds, "/opt/tokamak": sys.prefix}

    @property
    def pid(self) -> int:
        """Pid of the contained process in the namespace of the test."""
        (child,) = Path(f"/proc/{super().pid}/task/{super().pid}/children").read_text().split()
        return int(child)

    def run_inside(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command beside the engine, with its variables, as a container runtime does."""
        spaces = ["--user", "--preserve-credentials", "--mount", "--pid", "--root", "--wd"]
        entering = ["nsenter", f"--target={self.pid}", *spaces, "env", "-i"]
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        return subprocess.run(
            [*entering, *variables, *command], capture_output=True, text=True, timeout=WATCHDOG_S, check=False
        )

    def assert_is_held(self) -> None:
        """Check from outside that the guarantees are kept."""
        inside = Path(f"/proc/{self.pid}")
        status = dict(line.split(":\t", 1) for line in (inside / "status").read_text().splitlines() if ":\t" in line)
        assert int(status["CapEff"], 16) == 0
        tried = self.run_inside(["sh", "-c", "id -u; touch /opt/tokamak/x /etc/x /x 2>&1; stat -f -c '%b %S' /dev/shm"])
        user, *refused, memory = tried.stdout.splitlines()
        assert int(user) == USER
        assert len([line for line in refused if "Read-only file system" in line]) == 3, refused
        blocks, size = memory.split()
        assert int(blocks) * int(size) == SHARED_MEMORY_BYTES


def ask(engine: ContainedEngine) -> None:
    answer = httpx.post(f"{engine.url}/v1/chat/completions", json=ASKED, timeout=WATCHDOG_S)
    assert answer.json()["choices"][0]["message"]["content"]


def test_image_serves_reports_health_and_drains(tmp_path: Path) -> None:
    (command,) = (each.command for each in image() if each.name == "ENTRYPOINT")
    (health,) = (each.command for each in image() if each.name == "HEALTHCHECK")
    memory = [mount["mountPath"] for mount in container()["volumeMounts"]]
    leave = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert leave[-1].startswith("sleep 5; ")
    with ContainedEngine(tmp_path, command, environment(image()), memory) as engine:
        engine.assert_is_held()
        ask(engine)
        assert engine.run_inside(health).returncode == 0
        lines: list[str] = []

        def read() -> None:
            asked = {"prompt": "1", "max_tokens": 1000, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{engine.url}/v1/completions", json=asked, timeout=WATCHDOG_S) as stream:
                lines.extend(line for line in stream.iter_lines() if line)

        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: bool(lines), what="the stream has begun")
        left = engine.run_inside([*leave[:-1], leave[-1].removeprefix("sleep 5; ")])
        reader.join(WATCHDOG_S)
        assert (left.returncode, left.stderr) == (0, "")
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert engine.run_inside(health).returncode == 1


def test_pods_of_a_cluster_serve_together(tmp_path: Path) -> None:
    """An engine and a router as their pods, on this machine: the name of the headless service is localhost. The key may be read
    by the pod's group."""
    (engine_root := tmp_path / "engine").mkdir()
    (router_root := tmp_path / "router").mkdir()
    (keys := tmp_path / "keys").mkdir()
    make_key_file(keys / "cluster.key")
    pods = [cluster_pod(kind)[1] for kind in ("StatefulSet", "Deployment")]
    port = str(free_port())
    engine_variables, router_variables = (environment(image()) | variables_of(pod) for pod in pods)
    engine_variables["TOKAMAK_CLUSTER_LISTEN"] = f"127.0.0.1:{port}"
    router_variables["TOKAMAK_ENGINES"] = f"dns:localhost:{port}"
    binds = {str(Path(engine_variables["TOKAMAK_CLUSTER_KEY_FILE"]).parent): str(keys)}
    memory = ["/tmp", "/cache"]
    (leave,) = (pod["lifecycle"]["preStop"]["exec"]["command"] for pod in pods[1:])
    engine = ContainedEngine(engine_root, ["tokamak", "serve"], engine_variables, memory, binds)
    router = ContainedEngine(router_root, pods[1]["command"], router_variables, memory, binds)
    with engine, router:
        router.assert_is_held()
        ask(router)
        shown = router.run_inside(["tokamak", "ctl", "engines"])
        assert "ready" in shown.stdout, shown.stderr
        left = router.run_inside([*leave[:-1], leave[-1].removeprefix("sleep 5; ")])
        assert (left.returncode, left.stderr) == (0, "")
        paused = engine.run_inside(pods[0]["lifecycle"]["preStop"]["exec"]["command"])
        assert (paused.returncode, paused.stderr) == (0, "")
        wait_until(lambda: httpx.get(f"{router.url}/health", timeout=WATCHDOG_S).status_code == 503, what="no engine is ready")


def test_a_service_runs_as_its_unit_says(tmp_path: Path) -> None:
    unit = service()
    (line,) = unit["Environment"]
    variables = dict(word.replace("%t", "/run").split("=", 1) for word in line.split())
    with ContainedEngine(tmp_path, unit["ExecStart"][0].split(), variables, ["/run", "/tmp", "/var/cache"]) as engine:
        engine.assert_is_held()
        ask(engine)
        monitor = engine.run_inside(["/opt/tokamak/bin/tokamak", "top", "--once"])
        assert "worker0" in monitor.stdout, monitor.stderr
