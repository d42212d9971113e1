"""Cases of the rows of layers that draft: integers, and copies of hidden states."""

from __future__ import annotations

import numpy as np

from ops.cuda.operands import TYPES
from tools.device.case import Case, Outcome, Values, kept, named, random, size

ROWS = ("WriteSent", "DraftRows", "PutDraft", "DraftTokens", "ReadTokens", "EntryRows", "KeepStates")
_GROUP = 3  # hidden states that are kept of a sequence


def draft_cases(is_large: bool) -> list[Case]:
    """Return cases in which each slot has two draft tokens, or two rows that are kept."""
    slots, width, vocab = (256, 4096, 151936) if is_large else (5, 40, 300)
    return [*_drafts(slots, vocab), _read_tokens(slots), *_entries(slots, width)]


def _drafts(slots: int, vocab: int) -> list[Case]:
    positions, blocks = 64, 4
    memory = np.arange((slots + 1) * (positions + blocks + 1), dtype=np.int32)
    numbers = np.arange(slots, dtype=np.int32)
    columns = np.stack([numbers, 0 * numbers + positions // 2, 1 + numbers % 2, 0 * numbers + 7, _GROUP * numbers])
    sizes = {"num_slots": slots, "num_positions": positions, "num_blocks": blocks}

    def drafts() -> Values:
        return {"columns": columns, "slots": memory.copy(), "max_drafted": slots, **sizes}

    sent = np.zeros(1 + 5 * slots + 2 * slots, np.int32)
    sent[0], written = slots, sent[1 + 5 * slots :].reshape(slots, 2)
    written[:, 0], written[:, 1] = positions * numbers, 1000 + numbers
    write = {"sent": sent, "slots": memory.copy(), "num_slots": slots}
    rows = {"drafts": drafts(), "rows": np.zeros((5, slots), np.int32), "number": 1, "num_rows": slots}
    logits = random(slots, vocab)
    put = {"drafts": drafts(), "logits": logits, "num_rows": slots, "vocab": vocab, "first": 0, "number": 1}
    tokens = {"drafts": drafts(), "tokens": np.zeros((slots, 2), np.int32), "num_rows": slots, "count": 2}
    text = f"{slots} rows"
    return [
        Case("WriteSent", f"{slots} values", write, lambda outcome: [outcome["slots"]], size(sent)),
        Case("DraftRows", text, rows, lambda outcome: [outcome["rows"]], 8 * size(columns)),
        Case("PutDraft", f"{text} of {vocab} logits", put, lambda outcome: [outcome["drafts.slots"]], size(logits)),
        Case("DraftTokens", text, tokens, lambda outcome: [outcome["tokens"]], size(columns)),
    ]


def _read_tokens(rows: int) -> Case:
    ids = np.arange(rows, dtype=np.int32)
    values = {"drawn": np.stack([ids, 2 * ids, 3 * ids]), "row_ids": ids[::-1].copy(), "kept_row_ids": 2 * ids}
    values |= {"token_ids": np.arange(2 * rows, dtype=np.int32) + 100, "lines": np.zeros((4, rows), np.int32)}
    sizes = {"num_rows": rows, "num_lines": 3}
    return Case("ReadTokens", f"{rows} rows", {**values, **sizes}, lambda outcome: [outcome["lines"]], 32 * rows)


def _entries(slots: int, width: int) -> list[Case]:
    rows = 2 * slots
    ids = np.arange(rows, dtype=np.int32)
    columns = np.stack([np.where(np.arange(slots) % 2, 9, 0), _GROUP * np.arange(slots) + 1]).astype(np.int32)
    offsets = 2 * np.arange(slots + 1, dtype=np.int32)
    of_step = {"row_ids": ids[::-1].copy(), "token_ids": ids + 100, "positions": ids % 16, "row_slots": ids // 2}
    sizes = {"num_rows": rows, "width": width, "num_slots": slots, "group": _GROUP}
    found = []
    for dtype in ("float32", "bfloat16"):
        hidden, states = kept(random(rows, width), dtype), kept(random((slots + 1) * _GROUP, width, seed=2), dtype)
        shared = {"type": TYPES[dtype], "hidden": hidden, "columns": columns, "sequence_offsets": offsets, **sizes}
        made = {"rows": np.zeros((5, rows), np.int32), "before": np.zeros_like(hidden)}
        text = f"{rows} x {width} {dtype}"

        def of_entries(outcome: Outcome, dtype: str = dtype) -> list[np.ndarray]:
            return [outcome["rows"], *named(dtype, "before")(outcome)]

        entries, keep = {**shared, "states": states, **of_step, **made}, {**shared, "states": states.copy()}
        found.append(Case("EntryRows", text, entries, of_entries, 2 * size(hidden), dtype=dtype))
        found.append(Case("KeepStates", text, keep, named(dtype, "states"), 2 * size(hidden), dtype=dtype))
    return found
