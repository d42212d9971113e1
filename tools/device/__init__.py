"""What only a card can show. Read `rows.py`, which `tools/test --device gpu --rows` runs."""
