"""Draft tokens, which the rank verifies. Read `drafter.py` first, then `drafting.py`, `mtp_steps.py` and `mtp.py`."""
