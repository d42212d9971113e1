"""Errors about a file, sent to its client."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import RequestError, SharedMemoryError

LIMIT_DEATHS = 2  # deaths of the media process before the file that it was decoding is rejected


def refuse(message: str, code: str) -> RequestError:
    return RequestError(message, code=code)


def parse_error(kind: str, cause: str) -> RequestError:
    """Return the error for a file that is invalid or damaged. OpenAI has a code only for images."""
    return refuse(f"the {kind} cannot be decoded: {cause}", "image_parse_error" if kind == "image" else "invalid_video")


@contextmanager
def decoding(kind: str) -> Iterator[None]:
    """Turn a decoder's errors about a client's file into RequestError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (RequestError, SharedMemoryError):  # the latter: the work is no longer wanted
        raise
    except MemoryError:
        code = "image_too_large" if kind == "image" else "invalid_video"
        raise refuse(f"the {kind} exceeds the memory limit of a file; make it smaller", code) from None
    except Exception as error:
        raise parse_error(kind, str(error) or type(error).__name__) from None
