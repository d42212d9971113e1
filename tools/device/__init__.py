"""Checks that need a card. Read `rows.py`, which `tools/test --device gpu --rows` runs, and `evidence.py`, which
`tools/device/card` runs; `tools/device/pack` (`folder.py`) makes a folder for that on a machine without network."""
