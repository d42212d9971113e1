"""Text of this server's that clients keep and send back as `encrypted_content`; it is theirs, and no secret."""

from __future__ import annotations

import base64


def seal(text: str) -> str:
    return base64.b64encode(text.encode("utf-8", "replace")).decode()


def unseal(sealed: str) -> str:
    """The text; ValueError where another server sealed it: what is encrypted is no UTF-8."""
    if not sealed:
        raise ValueError("nothing is sealed")
    return base64.b64decode(sealed, validate=True).decode()
