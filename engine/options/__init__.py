"""Options from the command line, the environment and a file, resolved into the frozen `EngineConfig`.

Used by the launcher alone. Read `table.py` first (the options), then `read.py` (each value by itself), then `resolve.py` (all
together).
"""
