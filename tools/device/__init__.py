"""Checks that need a card. Read `rows.py`, which `tools/test --device gpu --rows` runs."""
