"""OpenAI's protocol: `completions.py` and `chat.py` (requests and answers), `sse.py` (streams), `logprobs.py`, `usage.py`."""
