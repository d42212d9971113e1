"""Structured output in a rank: masks of the tokens that may come next. Read `grammars.py` first."""
