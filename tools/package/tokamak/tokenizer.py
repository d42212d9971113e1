"""The engine's tokenizer over HTTP, with the most used methods of vLLM's `get_tokenizer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Call = Callable[[str, dict[str, Any]], Any]


class Tokenizer:
    """`call` asks a route of the engine."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        return list(self._call("/tokenize", body)["tokens"])

    def decode(self, token_ids: int | Sequence[int]) -> str:
        """Return the text, including special tokens."""
        tokens = [token_ids] if isinstance(token_ids, int) else [int(token_id) for token_id in token_ids]
        return str(self._call("/detokenize", {"tokens": tokens})["prompt"])

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [self.decode(token_id) for token_id in token_ids]

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str | list[int]:
        """Return the prompt of a conversation: its token ids, or its text with `tokenize=False`."""
        body = {
            "messages": list(conversation),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "chat_template_kwargs": variables or None,
        }
        rendered = self._call("/v1/chat/completions/render", body)
        return list(rendered["token_ids"]) if tokenize else str(rendered["prompt"])

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens)}
        return {"input_ids": [self.encode(each, add_special_tokens) for each in text]}
