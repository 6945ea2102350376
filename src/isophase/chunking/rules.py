"""Where chunks start: by a fixed stride, or by the content.

A rule reads a stream of tokens and says where chunks start. It may look ahead: whether a chunk starts at
token t is decided with token `t + lookahead_tokens`, and its answers are aligned with the tokens that
decide, so that reading a stream in any split gives the same answers. Token 0 always starts a chunk and is
never reported.

Legend: B rows, T tokens of this call, D model width, V vocabulary, R radius.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

__all__ = [
    "ChunkRule",
    "FixedStride",
    "LocalMaximum",
    "NeighbourCosine",
    "RuleState",
    "Score",
    "StackedScores",
    "Threshold",
    "TokenHash",
    "TokenRanks",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class RuleState:
    """What a rule remembers between calls.

    Attributes:
        tokens: tokens read so far.
        scores: last scores, [B, <= 2 R].
        hidden: last hidden state, [B, 1, D], where the score needs it.
        last_start: last start that the content decided, long [B].
    """

    tokens: int = 0
    scores: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    last_start: torch.Tensor | None = None

    def select(self, rows: torch.Tensor) -> RuleState:
        """The state of some rows, in the order of the long tensor `rows`."""

        def pick(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.index_select(0, rows.to(tensor.device))

        return RuleState(
            tokens=self.tokens,
            scores=pick(self.scores),
            hidden=pick(self.hidden),
            last_start=pick(self.last_start),
        )


class ChunkRule(Protocol):
    """Decides where chunks start."""

    @property
    def lookahead_tokens(self) -> int:
        """A start at token t is known with token t + this; -1: one token before it, as on a fixed grid."""

    @property
    def max_tokens(self) -> int:
        """Longest chunk."""

    def starts(
        self, ids_BT: torch.Tensor, hidden_BTD: torch.Tensor | None = None, state: RuleState | None = None
    ) -> tuple[torch.Tensor, RuleState]:
        """Read tokens.

        Args:
            ids_BT: token ids.
            hidden_BTD: states of the same tokens; only some scores read them.
            state: what the previous call returned; None at the start of a stream.

        Returns:
            bool [B, T]: with this token it is known that a chunk starts `lookahead_tokens` before it; and
            the state.
        """


@dataclass(frozen=True, kw_only=True)
class FixedStride:
    """A chunk every `stride_tokens`, the grid moved right by `shift_tokens` (the first chunk is then shorter).

    Raises:
        ValueError: for a stride below 1 or a shift outside 0..stride-1.
    """

    stride_tokens: int
    shift_tokens: int = 0

    def __post_init__(self) -> None:
        if self.stride_tokens < 1:
            raise ValueError(f"stride {self.stride_tokens} must be at least 1 token")
        if not 0 <= self.shift_tokens < self.stride_tokens:
            raise ValueError(f"shift {self.shift_tokens} must lie in 0..{self.stride_tokens - 1}")

    @property
    def lookahead_tokens(self) -> int:
        """The next start is known one token before it."""
        return -1

    @property
    def max_tokens(self) -> int:
        """Every chunk but the first has the stride's length."""
        return self.stride_tokens

    def starts(
        self, ids_BT: torch.Tensor, hidden_BTD: torch.Tensor | None = None, state: RuleState | None = None
    ) -> tuple[torch.Tensor, RuleState]:
        """As `ChunkRule.starts`; reads nothing but the number of tokens."""
        past = 0 if state is None else state.tokens
        rows, length = ids_BT.shape
        next_T = torch.arange(past + 1, past + length + 1, device=ids_BT.device)
        flags_T = (next_T - self.shift_tokens) % self.stride_tokens == 0
        return flags_T.expand(rows, length), RuleState(tokens=past + length)


class Score(Protocol):
    """How much a token wants to start a chunk. It looks at the token, and at most at the one before it."""

    @property
    def needs_hidden(self) -> bool:
        """Whether it reads states."""

    def __call__(
        self, ids_BT: torch.Tensor, hidden_BTD: torch.Tensor | None, before_B1D: torch.Tensor | None
    ) -> torch.Tensor:
        """Scores [B, T], any ordered dtype; `before_B1D` is the state of the token before the first, if any."""


@dataclass(frozen=True, kw_only=True)
class TokenHash:
    """A pseudo-random number of each token id: exact, and blind to meaning.

    Attributes:
        salt: another salt is another order of the vocabulary.
    """

    salt: int = 0
    needs_hidden: bool = field(default=False, init=False)

    def __call__(
        self,
        ids_BT: torch.Tensor,
        hidden_BTD: torch.Tensor | None = None,
        before_B1D: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hashes, int64 [B, T], in 0..2^31-1."""
        # An integer finaliser: xor-shifts and products, which stay below 2^63; the mask keeps 32 bits.
        mixed = (ids_BT.long() + 1 + self.salt * 0x9E3779B9) & 0xFFFFFFFF
        for factor, shift in ((0x45D9F3B, 16), (0x45D9F3B, 16)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
        return (mixed ^ (mixed >> 16)) >> 1


@dataclass(frozen=True, kw_only=True)
class TokenRanks:
    """Some tokens before others: delimiters, rare tokens, keys. Equal ranks fall back on the hash.

    Attributes:
        ranks: rank by token id; a higher one starts a chunk rather. Ids beyond have rank 0.
        salt: of the hash between equal ranks.
        break_ties: without, the leftmost of equals is the maximum, and tokens of rank 0 start nothing.
    """

    ranks: tuple[int, ...] = field(repr=False)
    salt: int = 0
    break_ties: bool = True
    needs_hidden: bool = field(default=False, init=False)

    def __call__(
        self,
        ids_BT: torch.Tensor,
        hidden_BTD: torch.Tensor | None = None,
        before_B1D: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rank, then hash, as one int64 [B, T]."""
        ranks_V = torch.tensor(self.ranks, dtype=torch.long, device=ids_BT.device)
        known = ids_BT < len(ranks_V)
        ranks_BT = torch.where(known, ranks_V[ids_BT.clamp(max=len(ranks_V) - 1)], 0)
        if not self.break_ties:
            return ranks_BT
        return (ranks_BT << 31) + TokenHash(salt=self.salt)(ids_BT)


@dataclass(frozen=True, kw_only=True)
class NeighbourCosine:
    """How much a state differs from the one before it, `(1 - cos) / 2`.

    On embeddings it is as exact as a hash. States of later layers depend on what stands further back, so starts
    then move with the text only nearly.

    Source: Hwang et al., H-Net (arXiv 2507.07955), without the projections.
    """

    needs_hidden: bool = field(default=True, init=False)

    def __call__(
        self, ids_BT: torch.Tensor, hidden_BTD: torch.Tensor | None, before_B1D: torch.Tensor | None
    ) -> torch.Tensor:
        """float32 [B, T], in 0..1; the first token of a stream has 1."""
        if hidden_BTD is None:
            raise ValueError("the score NeighbourCosine needs hidden states")
        states = hidden_BTD.detach().float()
        first = -states[:, :1] if before_B1D is None else before_B1D.float()
        before = torch.cat([first, states[:, :-1]], dim=1)
        cosine: torch.Tensor = torch.nn.functional.cosine_similarity(states, before, dim=-1)
        return (1 - cosine) / 2


@dataclass(frozen=True, kw_only=True)
class StackedScores:
    """Several scores at once: the first rows take the first score, as many the second, and so on.

    Attributes:
        scores: all of which need states, or none.
    """

    scores: tuple[Score, ...]

    @property
    def needs_hidden(self) -> bool:
        """Whether they read states."""
        return self.scores[0].needs_hidden

    def __call__(
        self, ids_BT: torch.Tensor, hidden_BTD: torch.Tensor | None, before_B1D: torch.Tensor | None
    ) -> torch.Tensor:
        """As `Score`; B is a multiple of the number of scores."""
        count = len(self.scores)
        none = (None,) * count
        parts = zip(
            self.scores,
            ids_BT.chunk(count),
            none if hidden_BTD is None else hidden_BTD.chunk(count),
            none if before_B1D is None else before_B1D.chunk(count),
            strict=True,
        )
        return torch.cat([score(ids, hidden, before) for score, ids, hidden, before in parts])


@dataclass(frozen=True, kw_only=True)
class LocalMaximum:
    """A chunk starts at a token whose score is the maximum within `radius_tokens` on both sides.

    Of equals the leftmost counts, so a flat stretch starts nothing; there, and wherever no start comes
    within `max_tokens`, a chunk is cut at its greatest length, counted from the last start that the content
    decided. Starts that the content decides look at `2 R + 1` tokens and nothing else, so they move with the
    text; they lie at least `R + 1` tokens apart, about `2 R + 1` on average.

    Attributes:
        score: of tokens.
        radius_tokens: R, at least 1.
        max_tokens: longest chunk, more than R.

    Raises:
        ValueError: for a radius or maximum out of range.

    Source: content-defined chunking with local maxima (Bjorner, Blass and Gurevich, 2010).
    """

    score: Score
    radius_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        if self.radius_tokens < 1:
            raise ValueError(f"radius {self.radius_tokens} must be at least 1 token")
        if self.max_tokens <= self.radius_tokens:
            raise ValueError(f"longest chunk {self.max_tokens} must exceed the radius {self.radius_tokens}")

    @property
    def lookahead_tokens(self) -> int:
        """The right half of the neighbourhood."""
        return self.radius_tokens

    def starts(
        self, ids_BT: torch.Tensor, hidden_BTD: torch.Tensor | None = None, state: RuleState | None = None
    ) -> tuple[torch.Tensor, RuleState]:
        """As `ChunkRule.starts`."""
        state = state or RuleState()
        radius, past = self.radius_tokens, state.tokens
        rows, length = ids_BT.shape
        if not length:
            return torch.zeros(rows, 0, dtype=torch.bool, device=ids_BT.device), state
        new = self.score(ids_BT, hidden_BTD, state.hidden)
        lowest = torch.finfo(new.dtype).min if new.is_floating_point() else torch.iinfo(new.dtype).min
        # Tokens past - R .. past + T - 1 - R are decided now; their neighbourhoods begin 2 R tokens back.
        known = new if state.scores is None else torch.cat([state.scores, new], dim=1)
        missing = 2 * radius + length - known.shape[1]
        scores = torch.nn.functional.pad(known, (missing, 0), value=lowest)
        around_BTN = scores.unfold(1, 2 * radius + 1, 1)
        middle_BT = around_BTN[..., radius]
        left, right = around_BTN[..., :radius].amax(-1), around_BTN[..., radius + 1 :].amax(-1)
        decided_T = torch.arange(past - radius, past - radius + length, device=ids_BT.device)
        content_BT = (middle_BT > left) & (middle_BT >= right) & (decided_T > 0)

        flags_BT, last_B = _with_cuts(content_BT, decided_T, self.max_tokens, state)
        return flags_BT, RuleState(
            tokens=past + length,
            scores=known[:, max(0, known.shape[1] - 2 * radius) :],
            hidden=hidden_BTD[:, -1:].detach() if self.score.needs_hidden and hidden_BTD is not None else None,
            last_start=last_B,
        )


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A chunk starts at a token whose score exceeds a threshold; a long stretch without one is cut.

    Attributes:
        score: of tokens.
        threshold: that a start exceeds.
        max_tokens: longest chunk, counted from the last start that the content decided, at least 1.

    Raises:
        ValueError: for a maximum below 1.
    """

    score: Score
    threshold: float
    max_tokens: int

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"longest chunk {self.max_tokens} must be at least 1 token")

    @property
    def lookahead_tokens(self) -> int:
        """A token decides for itself."""
        return 0

    def starts(
        self, ids_BT: torch.Tensor, hidden_BTD: torch.Tensor | None = None, state: RuleState | None = None
    ) -> tuple[torch.Tensor, RuleState]:
        """As `ChunkRule.starts`."""
        state = state or RuleState()
        if not ids_BT.shape[1]:
            return torch.zeros_like(ids_BT, dtype=torch.bool), state
        position_T = torch.arange(state.tokens, state.tokens + ids_BT.shape[1], device=ids_BT.device)
        scores_BT = self.score(ids_BT, hidden_BTD, state.hidden)
        flags_BT, last_B = _with_cuts(
            (scores_BT > self.threshold) & (position_T > 0), position_T, self.max_tokens, state
        )
        return flags_BT, RuleState(
            tokens=state.tokens + ids_BT.shape[1],
            scores=scores_BT[:, :0],
            hidden=hidden_BTD[:, -1:].detach() if self.score.needs_hidden and hidden_BTD is not None else None,
            last_start=last_B,
        )


def _with_cuts(
    content_BT: torch.Tensor, position_T: torch.Tensor, max_tokens: int, state: RuleState
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the cuts of stretches longer than `max_tokens` to the starts that the content decides.

    Args:
        content_BT: bool, starts at `position_T`.
        position_T: positions that are decided; negative ones come before the text.
        max_tokens: longest chunk.
        state: knows the last start before.

    Returns:
        All starts, and the last one that the content decided, long [B].
    """
    before_B = state.last_start if state.last_start is not None else position_T.new_zeros(len(content_BT))
    own_BT = torch.where(content_BT, position_T, -1)
    last_BT = torch.cat([before_B[:, None], own_BT], dim=1).cummax(dim=1).values[:, 1:]
    since_BT = position_T - last_BT
    cut_BT = (since_BT > 0) & (since_BT % max_tokens == 0)
    return content_BT | cut_BT, last_BT[:, -1]
