"""The table of the drafters' share of a step."""

from __future__ import annotations

import json

import pytest

from tools.bench.drafters import main, text_of


def test_every_method_and_kind_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokens", "40,90", "--slots", "2", "--steps", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["method"] for each in found} == {"ngram", "suffix"}
    assert len(found) == 2 * 5 * 2
    assert all(each["by_step"] > 0 < each["by_row"] for each in found)
    assert main(["--tokens", "40", "--slots", "1", "--steps", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2 * 5


@pytest.mark.parametrize(
    ("options", "message"), [(["--steps", "5000"], "5000: from 2 to 819"), (["--tokens", "0"], "0 is no number of tokens")]
)
def test_invalid_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err


def test_texts_are_alike_each_time() -> None:
    assert (text_of("repeated", 2500, 1)[:1000] == text_of("repeated", 2500, 1)[1000:2000]).all()
    assert set(text_of("a few", 500, 2)) == {0, 1, 2}
