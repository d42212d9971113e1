"""Pictures and video in a rank: encoder calls, and the rows of prompts that read features. Read `features.py` first."""
