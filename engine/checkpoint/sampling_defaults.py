"""Default sampling parameters: the checkpoint's generation_config.json, as in vLLM, else the neutral values.

Read by the launcher, to check options, and by the api processes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from engine.errors import CheckpointError


class SamplingDefaults(msgspec.Struct, frozen=True):
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None  # limit for every answer, regardless of the request

    @staticmethod
    def decode(data: bytes) -> SamplingDefaults:
        """Decode a generation_config.json. Raises CheckpointError."""
        try:
            return msgspec.json.decode(data, type=SamplingDefaults)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(str(error)) from None
