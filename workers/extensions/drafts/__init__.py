"""Draft tokens, which the rank verifies. Read `drafter.py` first, then `drafting.py` and `mtp.py`."""
