"""The cache actor: KV events for the outside, and the tiers that blocks move between. Read `actor.py`, then `kv_events.py`."""
