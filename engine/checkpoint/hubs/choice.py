"""Choice of a hub by its name. Its client is imported only then."""

from __future__ import annotations

from engine.checkpoint.hubs.hub import Hub, HubName
from engine.errors import OptionError


def hub_of(name: Hub | HubName) -> Hub:
    """Return the hub of this name; its client is imported now. Raises MissingExtraError if that is not installed, and
    OptionError if it cannot read its environment variables."""
    if not isinstance(name, str):
        return name
    if name == "modelscope":
        from engine.checkpoint.hubs.modelscope import ModelScope

        return ModelScope()
    try:
        from engine.checkpoint.hubs.huggingface import HuggingFace
    except ValueError as error:
        raise OptionError(
            f"huggingface_hub does not start: {error}; check HF_ENDPOINT and other environment variables that begin with HF_"
        ) from error

    return HuggingFace()
