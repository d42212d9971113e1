"""The HTTP side: sockets, OpenAI's and Anthropic's protocols, and the truth about every open request.

    client/     open requests, and how they survive a crash behind the api process
    schemas/    bodies in and out
    openai/     chat, completions and their chunks
    responses/  OpenAI's `/v1/responses`, translated into chat (`translation.py`)
    anthropic/  Anthropic's `/v1/messages`, translated into chat
    ollama/     Ollama's `/api/chat`, `/api/generate` and `/api/embed`
    pooling/    embeddings, classes, scores and ranks
    batches/    `/v1/batches`: requests of a file, run in the background
    files/      `/v1/files`: what batches read and write
    media/      pictures and video of requests: links, uploads, limits
    page/       the web page: HTML, CSS and JavaScript

Read `client/client.py` first, then `server.py` (the actor), `app.py` (routes and what every request passes through),
`schemas/requests.py`, `openai/completions.py` and `openai/chat.py`.
"""
