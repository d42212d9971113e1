"""Parsers of tool calls and reasoning in answers.

Pure; used by the tokenizer processes, and by the start, which chooses among them (`choice.py`). Read `answer_parser.py` first
(splits an answer into parts), then `reader.py` (reads a call incrementally), `family.py` (the base of a family's format), and
one family, such as `glm45.py`; most are instances of a class in `json_calls.py` or `xml_calls.py`. Formats of reasoning are in
`thinking.py`; names in `registry.py`.
"""
