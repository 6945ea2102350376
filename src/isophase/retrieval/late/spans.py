"""From a chunk rule to spans of tokens and characters. No other place of retrieval cuts.

Legend: T tokens, E chunks, D width of token vectors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from isophase.chunking import ChunkLayout, ChunkRule, FixedStride
from isophase.errors import IsophaseError
from isophase.retrieval.late.rules import TextRule
from isophase.retrieval.late.tokens import IntArray, Tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """Chunks of one text, in order; every token and every character lies in exactly one.

    Attributes:
        start_token_E: first token.
        end_token_E: one past the last.
        start_char_E: first character; 0 for the first chunk.
        end_char_E: one past the last, which is the start of the next; the text's length for the last chunk.
        shift_tokens: of the fixed grid, else 0.
    """

    start_token_E: IntArray
    end_token_E: IntArray
    start_char_E: IntArray
    end_char_E: IntArray
    shift_tokens: int = 0

    def __len__(self) -> int:
        return len(self.start_token_E)

    def text(self, tokens: Tokens, chunk: int) -> str:
        """Characters of a chunk."""
        return tokens.text[self.start_char_E[chunk] : self.end_char_E[chunk]]


def whole_layout(rule: ChunkRule, ids_T: torch.Tensor, hidden_TD: torch.Tensor | None = None) -> ChunkLayout:
    """Layout of a whole text: the last chunk closes with its last token.

    A rule that looks ahead has not decided about the newest tokens yet. The last token is repeated until it has:
    a repetition is no new maximum, and starts behind the end do not count.

    Args:
        rule: of `isophase.chunking`.
        ids_T: token ids, or what else the rule reads, long, at least one.
        hidden_TD: token vectors, for scores that read them.
    """
    length = len(ids_T)
    more = max(0, rule.lookahead_tokens)
    stream = torch.cat([ids_T, ids_T[-1:].expand(more)])[None]
    hidden = None
    if hidden_TD is not None:
        hidden = torch.cat([hidden_TD, hidden_TD[-1:].expand(more, -1)])[None]
    flags_BT, _ = rule.starts(stream, hidden)
    lookahead = rule.lookahead_tokens
    # What is known with token t speaks of token t - lookahead; a start at the text's end or behind it is none.
    known = torch.arange(flags_BT.shape[1])
    flags_BT = flags_BT & (known - lookahead < length) & (known - lookahead > 0)
    layout, open_B = ChunkLayout.from_flags(flags_BT, lookahead, 0, torch.zeros(1, dtype=torch.long))
    end = torch.tensor([[length]])
    return ChunkLayout(
        start_BE=torch.cat([layout.start_BE, open_B[:, None]], dim=1),
        end_BE=torch.cat([layout.end_BE, end], dim=1),
        close_BE=torch.cat([layout.close_BE, end - 1], dim=1),
    )


def cut(rule: ChunkRule | TextRule | None, tokens: Tokens, hidden_TD: torch.Tensor | None = None) -> Spans:
    """Chunks of a text.

    Args:
        rule: where chunks start; None for one chunk.
        tokens: the text; without tokens it has no chunks.
        hidden_TD: token vectors, for rules that read them.
    """
    if not len(tokens):
        nothing = np.zeros(0, dtype=np.int64)
        return Spans(start_token_E=nothing, end_token_E=nothing, start_char_E=nothing, end_char_E=nothing)
    if rule is None:
        start = np.zeros(1, dtype=np.int64)
    elif isinstance(rule, TextRule):
        start = whole_layout(rule.rule, torch.from_numpy(rule.marks(tokens))).start_BE[0].numpy()
    else:
        start = whole_layout(rule, torch.from_numpy(tokens.ids_T), hidden_TD).start_BE[0].numpy()
    start_char = tokens.start_T[start]
    start_char[0] = 0
    return Spans(
        start_token_E=start,
        end_token_E=np.append(start[1:], len(tokens)),
        start_char_E=start_char,
        end_char_E=np.append(start_char[1:], len(tokens.text)),
        shift_tokens=getattr(rule, "shift_tokens", 0),
    )


def needs_hidden(rule: ChunkRule | TextRule | None) -> bool:
    """Whether a rule reads token vectors."""
    return bool(getattr(getattr(rule, "score", None), "needs_hidden", False))


def shifted(rule: ChunkRule | TextRule | None, offsets: int) -> list[ChunkRule | TextRule | None]:
    """The rule on `offsets` grids, equally spaced over one stride.

    Raises:
        IsophaseError: for a rule without a grid, or more offsets than tokens in a stride.
    """
    if offsets == 1:
        return [rule]
    if not isinstance(rule, FixedStride):
        raise IsophaseError(
            f"{offsets} grid offsets need a fixed stride, and this rule follows the content.",
            "Give --rule 'fixed(128)', or one offset.",
        )
    stride = rule.stride_tokens
    if not 1 <= offsets <= stride:
        raise IsophaseError(f"{offsets} grid offsets do not fit a stride of {stride} tokens.", f"Give 1 to {stride}.")
    return [replace(rule, shift_tokens=(rule.shift_tokens + n * stride // offsets) % stride) for n in range(offsets)]
