"""Which tools an answer may or must call, and what is searched for in it: rules that all chat protocols share.

Called by their handlers in the api process. No protocol depends on the model's format of calls; all use the parts of `Delta`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from api.model import ServedModel
from api.schemas.requests import invalid, shown
from engine.messages import Parsing


class ToolChoice(msgspec.Struct, frozen=True):
    mode: Literal["auto", "none", "required", "named"] = "auto"  # named: a call of one of `names`
    names: Sequence[str] = ()  # allowed tools; none: all


def parsing_of(
    model: ServedModel,
    tool_names: Iterable[str],
    choice: ToolChoice,
    *,
    is_parallel: bool = True,
    has_strict: bool = False,
    thinking_token_budget: int | None = None,
) -> Parsing | None:
    """Return what the engine looks for in the answer. `tool_names`: of all tools, in order. `has_strict`: one of them is
    strict. Raises RequestError if the choice is not possible."""
    known: set[str] = set()
    for name in tool_names:
        if name in known:
            raise invalid("tools", f"two functions are named {shown(name)}; names must be unique")
        known.add(name)
    is_forced = choice.mode in ("required", "named")
    if not known and (is_forced or choice.names):
        raise invalid("tool_choice", "requires a tool call, but there are no tools; send tools, or remove it")
    for name in choice.names:
        if name not in known:
            raise invalid("tool_choice", f"{shown(name)} is not one of the {len(known)} tools")
    if len(set(choice.names)) < len(choice.names):
        raise invalid("tool_choice", "names a tool twice; name each tool once")
    if is_forced and model.tool_call_parser == "none":
        raise invalid("tool_choice", "tool calls of this model cannot be parsed; start with another --tool-call-parser")
    if thinking_token_budget is not None and model.reasoning_parser == "none":
        raise invalid("thinking_token_budget", "this model has no reasoning that can be parsed; remove it")
    finds_calls = (
        bool(known) and model.tool_call_parser != "none" and (model.finds_calls or is_forced) and choice.mode != "none"
    )
    parsing = Parsing(
        finds_calls=finds_calls,
        finds_reasoning=model.reasoning_parser != "none",
        choice=choice.mode if is_forced else "auto",
        names=list(choice.names),
        is_parallel=is_parallel,
        binds=finds_calls and (is_forced or has_strict),
        thinking_token_budget=-1 if thinking_token_budget is None else thinking_token_budget,
    )
    return parsing if parsing.finds_calls or parsing.finds_reasoning else None
