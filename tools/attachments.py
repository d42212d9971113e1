"""Files sent with a question, as parts of a chat message. Used by `tokamak chat` and `tokamak bench serve`."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from engine.errors import OptionError

_KINDS = (  # signatures of files: (offset, bytes)
    (0, b"\x89PNG", "image/png"),
    (0, b"\xff\xd8", "image/jpeg"),
    (0, b"GIF8", "image/gif"),
    (0, b"BM", "image/bmp"),
    (0, b"II*\0", "image/tiff"),
    (0, b"MM\0*", "image/tiff"),
    (8, b"WEBP", "image/webp"),
    (4, b"ftyp", "video/mp4"),
    (0, b"\x1a\x45\xdf\xa3", "video/webm"),
    (8, b"AVI ", "video/avi"),
)


def attachment(path: str) -> dict[str, Any]:
    """Return the message part of a picture or video. OptionError if the file is neither, or cannot be read."""
    try:
        content = Path(path).expanduser().read_bytes()
    except (OSError, RuntimeError) as error:
        raise OptionError(f"{path} cannot be read: {error}") from error
    kinds = [kind for place, magic, kind in _KINDS if content[place : place + len(magic)] == magic]
    if not kinds:
        raise OptionError(f"{path} is not an image or video; use PNG, JPEG, WebP, GIF, BMP, TIFF, MP4, WebM or AVI")
    return part(content, kinds[0])


def part(content: bytes, kind: str) -> dict[str, Any]:
    """`kind`: the media type."""
    name = f"{kind.partition('/')[0]}_url"
    return {"type": name, name: {"url": f"data:{kind};base64,{base64.b64encode(content).decode()}"}}
