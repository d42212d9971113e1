"""The table of the kernels' resources on a card, from what ptxas prints."""

from __future__ import annotations

import re

import pytest

from ops.cuda import resources
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


def test_a_spill_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(resources, "logs", lambda names: [_LOG.format(spilled=4)])
    assert resources.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1:] for line in lines[4:]] == [
        ["sm_90", "40", "8192", "8", "8 |"],
        ["sm_80", "48", "0", "0", "0 |"],
    ]


def test_kernels_without_spills() -> None:
    log = (_LOG + _LOG).format(spilled=0).replace("4 bytes spill loads", "0 bytes spill loads")
    assert {each.spilled_bytes for each in resources.resources_of(log)} == {0}
    assert len(resources.table(resources.resources_of(log)).splitlines()) == 4


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
