"""The cache actor: publishes KV events, and handles the tiers of KV blocks. Read `actor.py`, then `kv_events.py`."""
