"""What only a card can show: read `rows.py`, which `tools/test --device gpu --rows` runs. And what its steps cost the host, on
what is no card (`host.py`)."""
