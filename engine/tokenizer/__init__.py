"""The tokenizer's process: text to tokens on a request's way in, tokens to text on its answer's way out.

Read `actor.py` first; then `lanes.py` and `helper.py` (work on text, beside the loop), `preparation.py`, `prompt_encoder.py`
and `sampling_rules.py` (what is done there), `openings.py` (what is prepared becomes a stream), `text_stream.py` and
`detokenizer.py` (the way out), `vocabulary.py` and `token_bytes.py` (what a token stands for), `chat/` (conversations to text).
"""
