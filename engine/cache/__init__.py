"""The cache messenger's process: KV events for the outside, and the tiers that blocks move between. Read `actor.py`."""
