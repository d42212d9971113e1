"""The HTTP side: sockets, the protocols of OpenAI, Anthropic and Ollama, and the state of every open request.

    client/     open requests, and how they survive a crash of other actors
    schemas/    bodies of requests and answers
    openai/     chat, completions and their chunks
    responses/  OpenAI's `/v1/responses`, translated into chat (`translation.py`)
    anthropic/  Anthropic's `/v1/messages`, translated into chat
    ollama/     Ollama's `/api/chat`, `/api/generate` and `/api/embed`
    pooling/    embeddings, classes, scores and ranks
    batches/    `/v1/batches`: requests of a file, run in the background
    files/      `/v1/files`: input and output of batches
    media/      images and video of requests: links, uploads, limits
    page/       the web page: HTML, CSS and JavaScript

Read `client/client.py` first, then `server.py` (the actor), `app.py` (handling of every request), `schemas/requests.py`,
`openai/completions.py` and `openai/chat.py`.
"""
