"""The engine: processes, their supervision and every decision that needs no device.

Read `messages.py` first (a request's way as data), then `actor.py` (what a process is), `supervisor.py` (who starts and
restarts it), `tokenizer.py`, `scheduler.py` and `cache_messenger.py` (the actors between the HTTP edge and the workers).
"""
