"""Choice of a hub by its name. Its client is imported only then."""

from __future__ import annotations

from engine.checkpoint.hubs.hub import Hub, HubName


def hub_of(name: Hub | HubName) -> Hub:
    """Return the hub of this name; its client is imported now. Raises MissingExtraError if that is not installed."""
    if not isinstance(name, str):
        return name
    if name == "modelscope":
        from engine.checkpoint.hubs.modelscope import ModelScope

        return ModelScope()
    from engine.checkpoint.hubs.huggingface import HuggingFace

    return HuggingFace()
