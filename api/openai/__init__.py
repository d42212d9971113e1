"""OpenAI's protocol: `completions.py` and `chat.py` (requests to answers), `sse.py` (streams), `logprobs.py`, `usage.py`."""
