"""Parsers of tool calls and thinking in answers.

Pure; used by the tokenizer processes, and by the start, which chooses among them (`choice.py`). Read `answer_parser.py`
first (an answer becomes parts), then `reader.py` (how a call is read as it comes), `family.py` (what a family of models says of
its format), and one family, such as `hermes.py`. Families of thinking are in `thinking.py`; names in `registry.py`.
"""
