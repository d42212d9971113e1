"""Places images and video in a prompt: expands placeholders to as many tokens as their items take, and finds the units with
their positions.

Used by the tokenizer processes (`prompt_encoder.py`). Pure. An item is one **span** of tokens or, for models with frame times
in the text, one span per frame:

    <|vision_start|> <|image_pad|> <|vision_end|>                      an image: its token is repeated
    <|vision_start|> <|video_pad|> <|vision_end|>                      a video: the same, or
    <0.5 seconds><|vision_start|>..<|vision_end|><1.5 seconds><|vision_start|>..<|vision_end|>    frame by frame

The start and end tokens around a video's single token are replaced by those of the frames, as in the prompts that the model was
trained on (transformers 4.57; from 5.10 on an outer pair stays around the frames, two tokens that were not in training).

Items are assigned in order to runs of their kind's token. A run of one token is expanded; a run with exactly the span's length
stays.
"""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from engine.checkpoint.families import media_rules
from engine.checkpoint.vision_config import VisionConfig
from engine.errors import RequestError
from engine.messages import MediaItem, MediaUnit

_MAX_NOTED = 32
_MAX_TIME = 1 << 24  # on the time axis, for all videos of a prompt: float32 cannot distinguish later positions


class Placed(msgspec.Struct, frozen=True):
    """A prompt with its media in place; units in the prompt's order."""

    token_ids: array[int]
    units: tuple[MediaUnit, ...] = ()
    num_item_tokens: tuple[int, ...] = ()  # of each item
    second_start: int = 0  # first token of the second of two texts that the model distinguishes; 0: there is one text

    @property
    def note(self) -> str:
        """Number of media tokens, as text for error messages."""
        return _note(self.num_item_tokens)


class Span(msgspec.Struct, frozen=True):
    item: int
    label: str  # text before its start token
    first_unit: int
    num_units: int
    num_tokens: int


class _Run(msgspec.Struct, frozen=True):
    token_id: int
    start: int
    length: int


class Placement:
    """Placement of media in the prompts of one model."""

    def __init__(self, vision: VisionConfig, pieces: Sequence[str | None], marks: Mapping[str, str]) -> None:
        """`pieces`, `marks`: of the vocabulary."""
        self._vision, self._rules = vision, media_rules(vision.kind)
        self._token_of_kind = {"image": vision.image_token_id, "video": vision.video_token_id}
        self._token_ids = [token_id for token_id in self._token_of_kind.values() if token_id >= 0]

        def piece(token_id: int) -> str:
            return (pieces[token_id] if 0 <= token_id < len(pieces) else None) or ""

        self._start, self._end = piece(vision.start_token_id), piece(vision.end_token_id)
        self._mark = marks.get(piece(vision.video_token_id), "") if self._rules.has_times_in_text else ""
        self._lone_start: re.Pattern[str] | None = None
        if self._rules.text_around:
            names = map(piece, (vision.start_token_id, vision.image_token_id, vision.end_token_id))
            start, image, end = (marks.get(name, name) for name in names)
            self._lone_start = re.compile(f"{re.escape(start)}(?!{re.escape(image)})")
            self._surrounded = f"{self._rules.text_around}{start}{image}{end}{self._rules.text_around}"
        start, mark, end = map(re.escape, (self._start, self._mark, self._end))
        self._single_video = re.compile(f"(?:{start})?{mark}(?:{end})?")
        self._video_run = re.compile(f"(?:{start})?(?:{mark})+(?:{end})?")

    def labelled(self, text: str, items: Sequence[MediaItem], *, are_single: bool = False) -> str:
        """Return `text` with a placeholder, and the time, for each span of a video; and with the text and the tokens around the
        placeholder of an image, where a template writes the start token alone. Placeholders that are already in this format,
        and those without an item, stay as they are. `are_single`: as in `place`."""
        if self._lone_start is not None and items:
            text = self._lone_start.sub(lambda match: self._surrounded, text)
        videos = deque(index for index, item in enumerate(items) if item.kind == "video")
        if not self._mark or not videos:
            return text
        passing: list[Span] = []  # remaining spans of a video that is written span by span

        def label(match: re.Match[str]) -> str:
            if passing:
                passing.pop()
                return match[0]
            if not videos:
                return match[0]
            index = videos.popleft()
            spans = self.spans(index, items[index])
            if match[0].count(self._mark) > 1:
                passing.extend(spans[1:])
                return match[0]
            return "".join(f"{span.label}{self._start}{self._mark}{self._end}" for span in spans)

        return (self._single_video if are_single else self._video_run).sub(label, text)

    def place(
        self,
        token_ids: array[int],
        items: Sequence[MediaItem],
        *,
        param: str,
        max_tokens: int,
        encode: Callable[[str], Sequence[int]],
        is_labelled: bool = False,
        are_single: bool = False,
    ) -> Placed:
        """Return the prompt with its media. `param`: the prompt's field. `is_labelled`: every span has its own placeholder;
        otherwise a single token may stand for all frames of a video, and `encode` encodes their labels. `are_single`: every
        token is a placeholder of its own, as templates write them. Raises RequestError if runs and items do not match, or the
        items have more than `max_tokens`."""
        num_item_tokens = tuple(len(item.unit_hashes) * item.tokens_per_unit for item in items)
        _check_total(num_item_tokens, max_tokens, param)
        self._check_times(items, param)
        placed = array("i")
        units: list[MediaUnit] = []
        start_id, end_id = self._vision.start_token_id, self._vision.end_token_id
        num_taken = 0
        for run, spans, has_labels in self._bound(list(self._runs(token_ids, are_single)), items, param, is_labelled):
            start, end = run.start, run.start + run.length
            lacks_start = self._rules.adds_markers and (not start or token_ids[start - 1] != start_id)
            lacks_end = self._rules.adds_markers and (end >= len(token_ids) or token_ids[end] != end_id)
            if has_labels:  # each frame gets its own start and end
                start -= start > num_taken and token_ids[start - 1] == start_id
                end += end < len(token_ids) and token_ids[end] == end_id
            placed.extend(token_ids[num_taken:start])
            for span in spans:
                placed.extend((*encode(span.label), start_id) if has_labels else (start_id,) * lacks_start)
                units.extend(self._units(span, items[span.item], len(placed)))
                placed.extend(self._tokens_of(span, items[span.item], run))
                placed.extend((end_id,) if has_labels else (end_id,) * lacks_end)
            num_taken = end
        placed.extend(token_ids[num_taken:])
        return Placed(placed, tuple(units), num_item_tokens)

    def spans(self, index: int, item: MediaItem) -> list[Span]:
        """Return the spans of item `index`."""
        num_units = len(item.unit_hashes)
        if item.kind != "video" or not self._rules.has_times_in_text:
            return [Span(index, "", 0, num_units, num_units * item.tokens_per_unit)]
        times = item.timestamps or [unit * item.seconds_per_row for unit in range(num_units)]
        return [Span(index, f"<{seconds:.1f} seconds>", unit, 1, item.tokens_per_unit) for unit, seconds in enumerate(times)]

    # ----------------------------------------------------------------------------------------------------------- inside

    def _tokens_of(self, span: Span, item: MediaItem, run: _Run) -> array[int]:
        """Return the tokens of a span in place of a run. Where rows have tokens between them, the end token follows a single
        placeholder."""
        row_break = self._vision.tokens.row_break
        if row_break < 0:
            return array("i", [run.token_id]) * span.num_tokens
        height, width = (side // self._vision.spatial_merge_size for side in item.grid_thw[1:])
        tokens = (array("i", [run.token_id]) * width + array("i", [row_break])) * height
        tokens[-1] = self._vision.end_token_id
        return tokens if run.length == 1 else tokens[:-1]

    def _bound(
        self, runs: list[_Run], items: Sequence[MediaItem], param: str, is_labelled: bool
    ) -> Iterator[tuple[_Run, list[Span], bool]]:
        """Yield each run with its spans, and whether labels are added here."""
        waiting = {token_id: deque[Span]() for token_id in self._token_ids}
        num_runs = dict.fromkeys(self._token_ids, 0)
        num_items = dict.fromkeys(self._token_ids, 0)
        for index, item in enumerate(items):
            assert self._token_of_kind[item.kind] in waiting, "the api rejects kinds that the model does not support"
            waiting[self._token_of_kind[item.kind]].extend(self.spans(index, item))
            num_items[self._token_of_kind[item.kind]] += 1
        for run in runs:
            num_runs[run.token_id] += 1
        num_spans = {token_id: len(spans) for token_id, spans in waiting.items()}
        for run in runs:
            spans = waiting[run.token_id]
            if not spans:
                break
            bound = [spans.popleft()]
            if run.length not in (1, bound[0].num_tokens):
                raise RequestError(
                    f"the {param} has {run.length} consecutive placeholder tokens at {run.start}, but media item "
                    f"{bound[0].item + 1} has {bound[0].num_tokens} tokens; send one placeholder, or as many as it has tokens",
                    code="invalid_value",
                    param=param,
                )
            are_there = bound[0].num_tokens == 1 and num_runs[run.token_id] == num_spans[run.token_id] > num_items[run.token_id]
            has_labels = not is_labelled and run.length == 1 and bound[0].label != "" and bound[0].first_unit == 0
            if has_labels and not are_there:
                while spans and spans[0].item == bound[0].item:
                    bound.append(spans.popleft())
                yield run, bound, True
            else:
                yield run, bound, False
            num_runs[run.token_id] += len(bound) - 1
        if num_runs != num_spans:
            raise self._wrong_count(runs, items, param)

    def _units(self, span: Span, item: MediaItem, start: int) -> Iterator[MediaUnit]:
        merge = self._vision.spatial_merge_size
        height, width = item.grid_thw[1] // merge, item.grid_thw[2] // merge
        for number in range(span.num_units):
            yield MediaUnit(
                span.item,
                span.first_unit + number,
                start + number * item.tokens_per_unit,
                item.tokens_per_unit,
                height,
                width,
                self._time_of(number, item),
                number > 0,
                self._vision.sees_whole_units,
            )

    def _time_of(self, number: int, item: MediaItem) -> int:
        """Return the temporal position of a row of a span, computed in float32 as in training."""
        if item.kind == "video" and self._rules.has_times_in_positions:
            import numpy as np  # text models start without it

            seconds = np.float32(number) * np.float32(item.seconds_per_row)
            return int(seconds * np.float32(self._vision.tokens_per_second))
        return number

    def _check_times(self, items: Sequence[MediaItem], param: str) -> None:
        """Check the temporal positions before they are counted: the frame rate of a file or client may be almost 0."""
        if not self._rules.has_times_in_positions:
            return
        total = sum(len(item.unit_hashes) * item.seconds_per_row for item in items) * self._vision.tokens_per_second
        if not total <= _MAX_TIME:
            raise RequestError(
                f"the videos of the {param} have {total:.3g} temporal positions, the limit is {_MAX_TIME}; request more "
                "frames per second, or send shorter ones",
                code="invalid_video",
                param=param,
            )

    def _runs(self, token_ids: array[int], are_single: bool) -> Iterator[_Run]:
        import numpy as np

        start = end = 0
        for place in np.flatnonzero(
            np.isin(np.asarray(token_ids, np.int32), [*self._token_ids, self._vision.tokens.row_break])
        ).tolist():
            is_break = token_ids[place] == self._vision.tokens.row_break
            if is_break and (place != end or are_single or end == start):
                continue
            if place != end or (token_ids[place] != token_ids[start] and not is_break) or are_single:
                if end > start:
                    yield _Run(token_ids[start], start, end - start)
                start = place
            end = place + 1
        if end > start:
            yield _Run(token_ids[start], start, end - start)

    def _wrong_count(self, runs: list[_Run], items: Sequence[MediaItem], param: str) -> RequestError:
        numbers = [
            (sum(run.token_id == token_id for run in runs), kind, sum(item.kind == kind for item in items))
            for kind, token_id in self._token_of_kind.items()
        ]
        texts = [f"{num_runs} {kind} placeholders for {num_items} {kind} items" for num_runs, kind, num_items in numbers]
        return RequestError(
            f"the {param} has {' and '.join(texts)}; send one placeholder for each item", code="invalid_value", param=param
        )


def _check_total(num_item_tokens: tuple[int, ...], max_tokens: int, param: str) -> None:
    """Check the total before memory is allocated for it."""
    total = sum(num_item_tokens)
    if total > max_tokens:
        raise RequestError(
            f"This model's maximum context length is {max_tokens} tokens. However, the {param} has more than {total} "
            f"tokens{_note(num_item_tokens)}. Send fewer or smaller items, or start with a larger --max-model-len.",
            code="context_length_exceeded",
            param=param,
        )


def _note(num_item_tokens: tuple[int, ...]) -> str:
    if not num_item_tokens:
        return ""
    shown = ", ".join(f"item {index}: {num}" for index, num in enumerate(num_item_tokens[:_MAX_NOTED], 1))
    more = f", and {len(num_item_tokens) - _MAX_NOTED} more" if len(num_item_tokens) > _MAX_NOTED else ""
    return f" ({sum(num_item_tokens)} of them media; {shown}{more})"
