"""Ollama's protocol: `/api/chat`, `/api/generate`, `/api/embed` and requests about models.

`requests.py` has the request bodies, `conversation.py` turns them into a chat request or a bare prompt, `lines.py` turns an
answer's parts into lines, `routes.py` has the routes that generate, `vectors.py` those that embed, `models.py` the others. Read
`routes.py` first.
"""
