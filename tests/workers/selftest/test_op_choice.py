"""A rank with fused ops checks them at its start, and its steps once the weights are loaded. On Paddle's CPU place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from engine.checkpoint.record import ModelRecord
from engine.errors import OptionError
from engine.options.resolve_pooling import resolve_pooling
from ops.paddle import fused, reference
from ops.paddle.fused import Candidate
from ops.table import OpTable
from tests.pooled import write_checkpoint
from tests.workers.on_card import on_card
from tests.workers.serving import make_runner
from tests.workers.test_pooling import ASKED, pooled
from tests.workers.test_runners import answers, core_of
from workers.runners import cpu_runner, xpu_runner


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "ernie4_5_moe"])
def test_answers_do_not_depend_on_the_batch(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The same tokens as the reference, the same bits on both runners, and rejected ops are logged once."""
    core = core_of(xpu_runner, name, ops="fused")
    assert ("rotary", "fused_rotary_position_embedding") in core.device.fallbacks
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("rotary: ")]
    assert len(said) == 1
    assert said[0].startswith("rotary: fused_rotary_position_embedding is not used on cpu: heads of ")
    found = answers(core)
    assert found == answers(core_of(cpu_runner, name, ops="fused"))
    assert [answer[0] for answer in found] == [answer[0] for answer in answers(core_of(cpu_runner, name))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert mean, normalized", "xlm-roberta classifier"])
def test_text_encoders_agree_on_all_ops(name: str, tmp_path: Path) -> None:
    """Their positions are looked up; with CUDA's rows as well."""
    path = write_checkpoint(name, tmp_path / "model")
    pooling, record = resolve_pooling(ASKED, ModelRecord.read(path))
    kinds: list[dict[str, Any]] = [{"ops": ops, "kind": xpu_runner} for ops in ("reference", "fused")]
    found = []
    for kind in (*kinds, on_card()):
        ops = kind["ops"]
        options = {"plan": "eager", "pooling": pooling, "num_kv_blocks": 64, "max_model_len": 32, **kind}
        runner = make_runner(path, model=record.config, **options)
        assert runner.device.ops.name == ops
        found.append(pooled(runner, [{"token_ids": [5, 9, 3, 7] * 4}])[0])
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-5)


def test_no_correct_linear_is_an_option_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rows(table: OpTable) -> OpTable:
        return replace(table, linear=lambda x, module: reference.TABLE.linear(x, module) + 1e-7 * x.shape[0])

    monkeypatch.setitem(fused.CANDIDATES, "linear", (Candidate("tiles_of_128", by_rows),))
    with pytest.raises(
        OptionError, match=r"^--ops fused: on cpu answers would be wrong or depend .*--allow-variant-ops if they only"
    ):
        core_of(cpu_runner, ops="fused")
    # it is taken then, and steps are allowed to differ as well
    core = core_of(cpu_runner, ops="fused", allow_variant_ops=True)
    assert core.device.fallbacks[0] == ("linear", "tiles_of_128")


def test_step_depending_on_its_batch_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No case of an op reveals it: attention that is wrong with more tiles."""

    def attention(step: Any, *others: Any) -> Any:
        return reference.attention(step, *others) + 1e-6 * step.inputs.num_tiles

    def with_attention(table: OpTable) -> OpTable:
        return replace(table, attention=attention)

    monkeypatch.setitem(fused.CANDIDATES, "activation", (Candidate("swiglu", with_attention),))
    with pytest.raises(OptionError, match=r"--ops fused: on cpu \d+ of 100 rows of a prompt, the first at position \d+, have"):
        core_of(cpu_runner, ops="fused")
    core_of(cpu_runner, ops="fused", allow_variant_ops=True)
    assert "have different bits in chunks of a batch" in caplog.text
