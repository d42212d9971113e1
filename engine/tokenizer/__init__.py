"""The tokenizer process: turns the text of requests into tokens, and the tokens of answers into text.

Read `actor.py` first; then `lanes.py` and `helper.py` (work on text, outside the loop), `preparation.py`, `prompt_encoder.py`
and `sampling_rules.py` (that work), `openings.py` (opening streams of prepared sequences), `text_stream.py` and
`detokenizer.py` (tokens to text), `vocabulary.py` and `token_bytes.py` (the bytes of a token), `chat/` (conversations to text).
"""
