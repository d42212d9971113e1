"""Encodes text that clients keep and send back as `encrypted_content`; it is their own text, and not secret."""

from __future__ import annotations

import base64


def seal(text: str) -> str:
    return base64.b64encode(text.encode("utf-8", "replace")).decode()


def unseal(sealed: str) -> str:
    """Return the text. Raises ValueError if another server sealed it: encrypted text is not UTF-8."""
    if not sealed:
        raise ValueError("nothing is sealed")
    return base64.b64decode(sealed, validate=True).decode()
