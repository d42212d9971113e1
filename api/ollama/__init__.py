"""Ollama's protocol: `/api/chat`, `/api/generate`, `/api/embed` and what its clients ask about models.

`requests.py` is what clients send, `conversation.py` makes a chat request or a bare prompt of it, `lines.py` makes lines of an
answer's parts, `routes.py` has the routes that generate, `vectors.py` those that embed, `models.py` the others. Read
`routes.py` first.
"""
