"""Prompts with many key-value records, one of them queried: `records`, `prefix` and `in-sequence`.

A prompt reads: prologue, left room, target record, right room, question. The rooms hold the other
records among filler; `window_tokens - 1` slack tokens of filler make room for the target to move.
The three probes differ only in where the slack goes when the target moves by one token:

    records        from right behind the target to right before it: only the target moves
    prefix         from the end of the right room to the front of the left one: all records move together
    in-sequence    anywhere: the gaps are drawn anew for every prompt, so other records do not move along
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isophase.errors import IsophaseError
from isophase.probes.prompt import Prompt, Tokenizer
from isophase.probes.settings import ProbeSettings
from isophase.probes.styles import ResolvedStyle, pick_style
from isophase.probes.vocabulary import Ids, word_combinations
from isophase.probes.windows import window_starts

_ITEM_STREAM, _COLUMN_STREAM = 1, 2
_CACHED_ITEMS = 2
_DEPTH, _DEPTH_REACH = 0.65, 0.1
"""Where there is space, targets lie at this share of the room between prologue and question, and so far on
both sides of it: what stands before the target is alike at all positions and may be read once."""
_KEPT_EXACTLY_TOKENS = 128
"""Targets stay out of the last tokens before the question, which compressed memories keep exactly; where the
room is too small for that, they lie in its middle."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Item:
    """What the prompts of one item share.

    Attributes:
        start_tokens: where the target record starts in column 0.
        target: int32 [record_tokens].
        left, right: int32 [n, record_tokens], other records in order, before and behind the target.
        left_filler, slack, right_filler: int32, the filler in order.
        left_room, right_room: int32, the records among their filler (gaps as in column 0).
        question: int32, demonstrations and question.
        answer_ids: the queried value.
    """

    start_tokens: int
    target: Ids
    left: Ids
    right: Ids
    left_filler: Ids
    slack: Ids
    right_filler: Ids
    left_room: Ids
    right_room: Ids
    question: Ids
    answer_ids: tuple[int, ...]


class RecordsProbe:
    """One of the three probes made of records.

    Args:
        settings: `probe` is `records`, `prefix` or `in-sequence`.
        tokenizer: of the target; its `prefix_ids` open every prompt.

    Raises:
        IsophaseError: the records do not fit, or the tokenizer lacks words.
    """

    def __init__(self, settings: ProbeSettings, tokenizer: Tokenizer) -> None:
        if settings.probe == "completion":
            raise IsophaseError("RecordsProbe does not build 'completion' prompts.", "Use build_probe.")
        if settings.demonstrations >= settings.records:
            raise IsophaseError(
                f"{settings.demonstrations} demonstrations need as many records that are not queried, "
                f"and there are {settings.records - 1}.",
                f"Use --demonstrations {settings.records - 1} or fewer.",
            )
        self.settings = settings
        self.name: str = settings.probe
        self.items = settings.items
        self.window_tokens = settings.window_tokens
        self.style: ResolvedStyle = pick_style(settings.style, tokenizer).resolve(
            tokenizer, settings.key_tokens, settings.value_tokens
        )
        style = self.style
        self._record_tokens = len(style.record.ids)
        self._key_offset = style.record.key_at[0]
        self._span_tokens = style.record.value_at[-1] + style.value_tokens - self._key_offset
        question_tokens = len(style.opening) + settings.demonstrations * len(style.shot.ids) + len(style.question.ids)
        self._body_start = len(style.prologue)
        self._body_end = settings.length_tokens - question_tokens
        self._check_fit(question_tokens)
        style.draw_numbers(np.random.default_rng(0), settings.records)  # complain now, not at row 0
        self._starts = self._target_starts()
        self._valid_first_ids = frozenset(style.value_words.tolist())
        self._cache: OrderedDict[int, _Item] = OrderedDict()

    def __len__(self) -> int:
        """Number of prompts."""
        return self.items * self.window_tokens

    def __iter__(self) -> Iterator[Prompt]:
        """All prompts in row order, built one at a time."""
        return (self.prompt(row) for row in range(len(self)))

    def prompt(self, row: int) -> Prompt:
        """Build one prompt.

        Args:
            row: `item * window_tokens + column`, 0..len-1.

        Returns:
            The prompt; the same for the same settings, tokenizer and row.

        Raises:
            IndexError: no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is outside 0..{len(self) - 1}")
        number, column = divmod(row, self.window_tokens)
        item = self._item(number)
        parts = self._parts(item, number, column)
        ids = np.concatenate([self.style.prologue, *parts, item.question])
        assert len(ids) == self.settings.length_tokens
        return Prompt(
            ids=ids,
            answer_ids=item.answer_ids,
            item=number,
            column=column,
            position_tokens=item.start_tokens + column + self._key_offset,
            span_tokens=self._span_tokens,
            valid_first_ids=self._valid_first_ids,
            context_tokens=len(ids) - len(item.question),
        )

    def _parts(self, item: _Item, number: int, column: int) -> tuple[Ids, ...]:
        """What stands between prologue and question in one column."""
        before, behind = item.slack[:column], item.slack[column:]
        if self.name == "records":
            return item.left_room, before, item.target, behind, item.right_room
        if self.name == "prefix":
            return before, item.left_room, item.target, item.right_room, behind
        rng = np.random.default_rng([self.settings.seed, _COLUMN_STREAM, number, column])
        return (
            _scatter(rng, item.left, np.concatenate([item.left_filler, before])),
            item.target,
            _scatter(rng, item.right, np.concatenate([behind, item.right_filler])),
        )

    def _check_fit(self, question_tokens: int) -> None:
        """Refuse settings whose records do not fit at every window start."""
        settings, record_tokens = self.settings, self._record_tokens
        # One record less a token is lost where the target cuts the room in two.
        body_tokens = settings.records * record_tokens + settings.window_tokens - 1 + record_tokens - 1
        needed = self._body_start + body_tokens + question_tokens
        if needed > settings.length_tokens:
            spare = settings.length_tokens - (needed - settings.records * record_tokens)
            fitting = max(0, spare // record_tokens)
            raise IsophaseError(
                f"{settings.records} records of {record_tokens} tokens need a prompt of {needed} tokens "
                f"({self._body_start} before them, {question_tokens} of questions, "
                f"{settings.window_tokens - 1} for the window), and it has {settings.length_tokens}.",
                f"Use --length {needed} or more"
                + (f", or --records {fitting} or fewer." if fitting > settings.demonstrations else "."),
            )

    def _target_starts(self) -> npt.NDArray[np.int64]:
        """Draw where the target record of each item starts in column 0."""
        earliest = self._body_start + self._key_offset
        latest = self._body_end - self._record_tokens + self._key_offset
        room = latest - earliest
        reach = max(round(_DEPTH_REACH * room), 2 * self.window_tokens)
        spare = max(0, room // 2 - reach - _KEPT_EXACTLY_TOKENS)
        centre = (earliest + latest) // 2 + min(round((_DEPTH - 0.5) * room), spare)
        positions = window_starts(
            self.items,
            self.window_tokens,
            max(earliest, centre - reach),
            min(latest, centre + reach),
            self.settings.seed,
        )
        return positions - self._key_offset

    def _item(self, number: int) -> _Item:
        """Look up or build what an item's prompts share."""
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        item = self._build_item(number)
        self._cache[number] = item
        if len(self._cache) > _CACHED_ITEMS:
            self._cache.popitem(last=False)
        return item

    def _build_item(self, number: int) -> _Item:
        settings, style = self.settings, self.style
        rng = np.random.default_rng([settings.seed, _ITEM_STREAM, number, 0])
        key_numbers, value_numbers = style.draw_numbers(rng, settings.records)
        keys = word_combinations(style.key_words, key_numbers, style.key_tokens)
        values = word_combinations(style.value_words, value_numbers, style.value_tokens)
        records = style.record.fill(keys, values)  # [records, record_tokens]; the target is record 0

        size, slack_tokens = self._record_tokens, self.window_tokens - 1
        start = int(self._starts[number])
        left_tokens = start - self._body_start
        right_tokens = self._body_end - (start + slack_tokens + size)
        others = settings.records - 1
        share = left_tokens / max(1, left_tokens + right_tokens)
        on_left = int(rng.binomial(others, share))
        on_left = min(max(on_left, others - right_tokens // size), left_tokens // size)
        left, right = records[1 : 1 + on_left], records[1 + on_left :]

        left_spare = left_tokens - len(left) * size
        right_spare = right_tokens - len(right) * size
        filler = style.filler(rng, left_spare + slack_tokens + right_spare)
        left_filler, slack, right_filler = np.split(filler, [left_spare, left_spare + slack_tokens])
        shown = 1 + rng.permutation(others)[: settings.demonstrations]
        shots = style.shot.fill(keys[shown], values[shown])
        question = np.concatenate([style.opening, shots.reshape(-1), style.question.fill(keys[:1], values[:1])[0]])
        return _Item(
            start_tokens=start,
            target=records[0],
            left=left,
            right=right,
            left_filler=left_filler,
            slack=slack,
            right_filler=right_filler,
            left_room=_scatter(rng, left, left_filler),
            right_room=_scatter(rng, right, right_filler),
            question=question,
            answer_ids=tuple(values[0].tolist()),
        )


def _scatter(rng: np.random.Generator, records: Ids, filler: Ids) -> Ids:
    """Put records, in order, at random places into filler.

    Args:
        rng: source of randomness.
        records: int32 [n, record_tokens].
        filler: int32 [f].

    Returns:
        int32 [n * record_tokens + f].
    """
    count, size = records.shape
    before = np.sort(rng.integers(0, len(filler) + 1, size=count))
    starts = before + size * np.arange(count)
    ids = np.empty(count * size + len(filler), dtype=np.int32)
    is_filler = np.ones(len(ids), dtype=bool)
    slots = (starts[:, None] + np.arange(size)).reshape(-1)
    is_filler[slots] = False
    ids[slots] = records.reshape(-1)
    ids[is_filler] = filler
    return ids
