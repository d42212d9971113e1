"""The table of the kernels' resources on a card, from what ptxas prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ops.cuda import resources
from ops.cuda.compiler import Compiler, find_nvrtc
from ops.cuda.library import SOURCES
from tests.paths import REPOSITORY

_LOG = """ptxas info    : Compiling entry function '_ZN52_GLOBAL__N__1d_9_ro_cu_92e5ba616rotateE14RotateAndStore' for 'sm_90'
ptxas info    : Function properties for x
    8 bytes stack frame, {spilled} bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 8192 bytes smem
ptxas info    : Compile time = 12.0 ms
ptxas info    : Compiling entry function '_ZN52_GLOBAL__N__1d_9_sample_cu_92e5ba616sampleE6Sample' for 'sm_80'
ptxas info    : Function properties for y
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers
"""


def _log(spilled: int) -> str:
    return _LOG.format(spilled=spilled).replace("4 bytes spill loads", "0 bytes spill loads")


def test_a_spill_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(resources, "logs", lambda names, compilers: [_LOG.format(spilled=4)])
    assert resources.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1:] for line in lines[4:]] == [
        ["sm_90", "40", "8192", "8", "8 |"],
        ["sm_80", "48", "0", "0", "0 |"],
    ]


@pytest.mark.parametrize("spilling", ["sm_120", "no card"])
def test_targets_have_a_line_each(spilling: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def logs(names: list[str], compilers: list[Compiler]) -> list[str]:
        return [_log(8 if compilers[0].target == spilling else 0)]

    monkeypatch.setattr(resources, "logs", logs)
    path = find_nvrtc()
    assert resources.print_targets([path]) == (spilling == "sm_120")
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[4:]]
    about = Compiler(path, (9, 0), Path("/nowhere")).version, str(len(resources.kernel_names()))
    assert rows == [
        [target, *about, "48", "8192", "8", "8" if target == spilling else "0"]
        for target in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_103", "sm_120")
    ]


def test_kernels_without_spills() -> None:
    found = resources.resources_of(2 * _log(0))
    assert {each.spilled_bytes for each in found} == {0}
    assert len(resources.table(found).splitlines()) == 4


def test_stored_table_is_of_these_sources() -> None:
    """A kernel that spills fails here, without a compiler that takes minutes; `tools/test` runs it for changed sources."""
    text = (REPOSITORY / ".github" / "DEVICES.md").read_text()
    of_sources, _, rest = text.partition("Sources `")[2].partition("`")
    rows = re.findall(r"^\| (\w+) \| sm_(\w+) \|.* (\d+) \|$", rest, re.MULTILINE)
    sources = "".join(path.read_text() for path in SOURCES.glob("*.cu"))
    kernels = set(re.findall(r"^__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(", sources, re.MULTILINE))
    cards = [str(10 * major + minor) for major, minor in resources.CAPABILITIES]
    assert {(kernel, card) for kernel, card, _ in rows} == {(kernel, card) for kernel in kernels for card in cards}
    assert {spilled for _, _, spilled in rows} == {"0"}
    assert resources.is_kept(), f"ptxas was asked of {of_sources}: run `python -m ops.cuda.resources`, its table is to be kept"
