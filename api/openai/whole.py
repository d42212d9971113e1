"""A whole answer, written choice by choice: encoding many sequences at once would block the event loop for seconds.

Used by the handlers of the api process. Each choice, or vector, is encoded when it is built, with a turn of the loop in
between.
"""

from __future__ import annotations

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.schemas.responses import encoder


class WholeAnswer(Response):
    media_type = "application/json"

    def __init__(
        self,
        answer: msgspec.Struct,
        choices: list[bytes],
        headers: dict[str, str],
        name: str = "choices",
    ) -> None:
        """`answer`: everything except the list `name`, such as its `choices`, which are already encoded."""
        empty = b'"%b":[]' % name.encode()  # occurs in no text of an answer: quotes are escaped there
        head, mark, tail = encoder.encode(answer).partition(empty)
        self._parts = [head + mark[:-1], *(choices[:1]), *(b"," + choice for choice in choices[1:]), b"]" + tail]
        super().__init__(headers=headers)
        self.headers["content-length"] = str(sum(map(len, self._parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for number, part in enumerate(self._parts, start=1):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(self._parts)})
