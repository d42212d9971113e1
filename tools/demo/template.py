"""The chat template of the demonstration model, and rendered conversations.

Called by `batches.py` and `examine.py`, and by `checkpoint.py`, which puts the template into the checkpoint. Tools are shown as
signatures, `get_weather(city: string, unit?: celsius|fahrenheit): Get the weather of a city.`, since JSON schemas would take
most of so small a model's context. Reasoning is off unless `enable_thinking` is set; then the prompt opens it, so that the
model never has to decide.
"""

import json
from functools import cache
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tools.demo.conversations import Conversation

CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
{%- if content is string %}{{ content }}{% elif content %}{% for part in content %}{{ part['text'] }}{% endfor %}{% endif -%}
{%- endmacro -%}
{%- macro type_of(schema) -%}
{%- if schema is mapping and schema.enum and schema.enum is sequence %}{{ schema.enum | join('|') }}
{%- elif schema is mapping and schema.type is string %}{{ schema.type }}
{%- elif schema is mapping and schema.type and schema.type is sequence %}{{ schema.type | join('|') }}
{%- else %}any{% endif -%}
{%- endmacro -%}
{%- macro signature_of(function) -%}
{%- set parameters = function.parameters if function.parameters is mapping else {} -%}
{%- set schemas = parameters.properties if parameters.properties is mapping else {} -%}
{%- set required = parameters.required if parameters.required and parameters.required is sequence else [] -%}
{{- function.name + '(' -}}
{%- for name in schemas %}
{{- ', ' if not loop.first }}{{ name }}{{ '?' if name not in required }}: {{ type_of(schemas[name]) }}
{%- endfor -%}
{{- ')' ~ (': ' ~ function.description if function.description else '') -}}
{%- endmacro -%}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{ text_of(messages[0]['content']) + '\\n\\n' }}{% endif %}
{{- 'Tools:' }}
{%- for tool in tools %}{{ '\\n' + signature_of(tool['function']) }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message['role'] == 'system') %}
{%- set text = text_of(message['content']) %}
{%- if message['role'] == 'assistant' and '</think>' in text %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + text }}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n' if text or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking else '') }}{% endif %}
"""


@cache
def _template() -> Template:
    """Return the template, set up as in transformers and the engine."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


def prompt_of(messages: list[dict[str, Any]], tools: tuple[dict[str, Any], ...] = (), thinks: bool = False) -> str:
    """Return the prompt of an answer."""
    return _template().render(messages=messages, tools=list(tools), add_generation_prompt=True, enable_thinking=thinks)


def rendered(conversation: Conversation) -> str:
    """Return a finished conversation, with reasoning only in the last answer: the template removes earlier reasoning."""
    prompt = prompt_of(conversation.messages[:-1], conversation.tools, thinks=conversation.thought is not None)
    thought = "" if conversation.thought is None else f"{conversation.thought}\n</think>\n\n"
    return f"{prompt}{thought}{conversation.answer}<|im_end|>\n"
