"""Options from the command line, the environment and a file, made into the frozen `engine/config.py`.

Used by the launcher alone. Read `table.py` first (the options), then `resolve.py` (what they come to together).
"""
