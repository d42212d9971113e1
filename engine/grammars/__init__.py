"""Structured output: formats of requests as Lark grammars, and matchers that find the allowed tokens. Uses llguidance, which is
imported when a request first needs it.

`formats.py` (tokenizer: format to Lark), `tokens.py` (the vocabulary, from the tokenizer to the ranks), `matching.py` (both).
"""
