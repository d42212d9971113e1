"""`tokamak trace`: what every actor did, as a file that https://ui.perfetto.dev shows. Read `command.py` first (whose events,
and for how long), then `perfetto.py` (how they are drawn)."""
