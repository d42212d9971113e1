"""What is wrong with a file: an answer for its client, raised wherever it is found."""

from __future__ import annotations

from engine.errors import RequestError

LIMIT_DEATHS = 2  # of the media process, before the file that it had in hands is refused

_NAMES = {"image": "picture", "video": "video"}


def refuse(message: str, code: str) -> RequestError:
    return RequestError(message, code=code)


def parse_error(kind: str, cause: str) -> RequestError:
    """The file is none, or is damaged. OpenAI has a name for pictures alone."""
    return refuse(f"the {_NAMES[kind]} cannot be decoded: {cause}", "image_parse_error" if kind == "image" else "invalid_video")
