"""The HTTP edge: sockets, OpenAI's protocol, and the truth about every open request.

Read `client.py` first (what an open request is and how it survives a crash behind the edge), then `server.py` (the actor),
`app.py` (routes and what every request passes through), `protocol.py` and `responses.py` (bodies in and out), `completions.py`
and `chat.py`.
"""
