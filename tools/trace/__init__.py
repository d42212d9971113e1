"""`tokamak trace`: records the work of every actor to a file for https://ui.perfetto.dev. Read `command.py` first (sources and
duration), then `perfetto.py` (format).
"""
