"""Error about a file, answered to its client, raised wherever it is found."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import RequestError, SharedMemoryError

LIMIT_DEATHS = 2  # of the media process, before the file that it had in hands is refused

_NAMES = {"image": "picture", "video": "video"}


def refuse(message: str, code: str) -> RequestError:
    return RequestError(message, code=code)


def parse_error(kind: str, cause: str) -> RequestError:
    """The file is none, or is damaged. OpenAI has a name for pictures alone."""
    return refuse(f"the {_NAMES[kind]} cannot be decoded: {cause}", "image_parse_error" if kind == "image" else "invalid_video")


@contextmanager
def decoding(kind: str) -> Iterator[None]:
    """Turn a decoder's errors about a client's file into RequestError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (RequestError, SharedMemoryError):  # the latter: nobody waits for it any more
        raise
    except MemoryError:
        code = "image_too_large" if kind == "image" else "invalid_video"
        raise refuse(f"the {_NAMES[kind]} exceeds the memory limit of a file; make it smaller", code) from None
    except Exception as error:
        raise parse_error(kind, str(error) or type(error).__name__) from None
