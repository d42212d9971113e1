from __future__ import annotations

import pytest

from shm.sizes import size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (24592, "24.02 KiB"),
        (512 << 20, "512 MiB"),
        (900 << 30, "900 GiB"),
        (20730777600, "19.31 GiB"),
    ],
)
def test_size_is_shown_in_its_largest_unit(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
