"""The HTTP edge: sockets, OpenAI's protocol, and the truth about every open request.

    client/     open requests, and how they survive a crash behind the edge
    openai/     chat, completions, their streams
    schemas/    bodies in and out

Read `client/client.py` first, then `server.py` (the actor), `app.py` (routes and what every request passes through),
`schemas/requests.py`, `openai/completions.py` and `openai/chat.py`.
"""
