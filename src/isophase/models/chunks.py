"""Chunk boundaries of a forward pass: found once, read by all layers.

Legend: B rows, T new tokens, G groups of KV heads with a rule of their own, E entries, D model width. Where a
rule reads only the number of tokens, one row stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from isophase.chunking.layout import NEVER, ChunkLayout
from isophase.chunking.packing import PackedPlan, pack
from isophase.chunking.rules import (
    ChunkRule,
    FixedStride,
    LocalMaximum,
    NeighbourCosine,
    RuleState,
    Score,
    Threshold,
    TokenHash,
    TokenRanks,
)
from isophase.models.config import CompressedQwen3Config
from isophase.models.router import BoundaryRouter, RouterScore, confidence


def rules_of(
    config: CompressedQwen3Config, routers: Sequence[BoundaryRouter] = ()
) -> tuple[tuple[ChunkRule, ...], ...]:
    """The rule of every layer and group of KV heads.

    Args:
        config: of the model.
        routers: one for each group, where the score is a router's.
    """
    scores = [_score(config, group, routers) for group in range(config.chunk_groups)]
    layers, groups = config.num_hidden_layers, config.chunk_groups
    rules: list[tuple[ChunkRule, ...]] = []
    for layer in range(layers):
        own: list[ChunkRule] = []
        for group in range(groups):
            if config.chunk_rule == "fixed":
                stride = config.compression_stride
                assert stride is not None
                # Shifts are spread evenly over a stride.
                part = {"none": 0, "heads": group * stride // groups, "layers": layer * stride // layers}
                own.append(FixedStride(stride_tokens=stride, shift_tokens=part[config.grid_shift]))
            elif config.chunk_rule == "threshold":
                least, longest = config.chunk_threshold, config.chunk_max_tokens
                own.append(Threshold(score=scores[group], threshold=least, max_tokens=longest))
            else:
                radius, longest = config.chunk_radius, config.chunk_max_tokens
                own.append(LocalMaximum(score=scores[group], radius_tokens=radius, max_tokens=longest))
        rules.append(tuple(own))
    return tuple(rules)


def _score(config: CompressedQwen3Config, group: int, routers: Sequence[BoundaryRouter]) -> Score:
    salt = config.chunk_salt + group
    if config.chunk_score == "router":
        return RouterScore(routers[group])
    if config.chunk_score == "cosine":
        return NeighbourCosine()
    if config.chunk_score == "ranks":
        assert config.chunk_ranks is not None
        return TokenRanks(ranks=tuple(config.chunk_ranks), salt=salt, break_ties=config.chunk_ties)
    return TokenHash(salt=salt)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkState:
    """What is kept between calls, by rule.

    Attributes:
        rules: state of each rule.
        open_starts: start of each rule's open chunk, long [B] or [1].
        counts: entries closed so far, long [B] or [1].
    """

    rules: tuple[RuleState, ...]
    open_starts: tuple[torch.Tensor, ...]
    counts: tuple[torch.Tensor, ...]

    def select(self, rows: torch.Tensor) -> ChunkState:
        """The state of some rows, in the order of the long tensor `rows`."""

        def pick(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            # A rule without scores looks at no token: its one row stands for all.
            return tuple(
                t if rule.scores is None else t.index_select(0, rows.to(t.device))
                for t, rule in zip(tensors, self.rules, strict=True)
            )

        return ChunkState(
            rules=tuple(state.select(rows) for state in self.rules),
            open_starts=pick(self.open_starts),
            counts=pick(self.counts),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerChunks:
    """What one layer executes over.

    Attributes:
        layouts: chunks that close in this call, one per group, padded alike.
        close_BGE: first query position that may see each entry, old ones included, long; `NEVER` in padding.
        uncovered_BGT: first token that lies in no entry that query t can see.
        past_tokens: tokens read before this call.
        closing: whether any chunk of each group closes in this call.
        confidence_BGE: of a router in each new entry; None where there is none, or nothing is to be learned.
        plans: of packed execution, made when the first layer asks.
    """

    layouts: tuple[ChunkLayout, ...]
    close_BGE: torch.Tensor
    uncovered_BGT: torch.Tensor
    past_tokens: int
    closing: tuple[bool, ...]
    confidence_BGE: torch.Tensor | None = None
    plans: dict[tuple[int, ...], PackedPlan] = field(default_factory=dict, init=False)

    def plan(
        self, group: int, batch: int, tokens: int, first_token: int, window_tokens: int, overlap_tokens: int
    ) -> PackedPlan:
        """How a group's chunks are packed; arguments as of `isophase.chunking.packing.pack`."""
        asked = (group, batch, tokens, first_token, window_tokens, overlap_tokens)
        if asked not in self.plans:
            sizes = {"overlap_tokens": overlap_tokens, "first_token": first_token}
            self.plans[asked] = pack(self.layouts[group], batch, tokens, window_tokens, **sizes)
        return self.plans[asked]

    @property
    def anchor_BGE(self) -> torch.Tensor:
        """Positions at which the new entries are rotated."""
        return torch.stack([layout.start_BE for layout in self.layouts], dim=1)

    @property
    def filled_BGE(self) -> torch.Tensor:
        """Which of the new entries are no padding."""
        return torch.stack([layout.filled_BE for layout in self.layouts], dim=1)


class ChunkReader:
    """Reads the tokens of a call and lays out the chunks that close, for every layer.

    Args:
        config: of the model; its rules decide.
        routers: of the model, where it has some.
    """

    def __init__(self, config: CompressedQwen3Config, routers: Sequence[BoundaryRouter] = ()) -> None:
        by_layer = rules_of(config, routers)
        self._routers, self._threshold = list(routers), config.chunk_threshold
        self._rules = list(dict.fromkeys(rule for groups in by_layer for rule in groups))
        self._layers = [tuple(self._rules.index(rule) for rule in groups) for groups in by_layer]

    def read(
        self, ids_BT: torch.Tensor, hidden_BTD: torch.Tensor | None, state: ChunkState | None
    ) -> tuple[list[LayerChunks], ChunkState]:
        """Find boundaries.

        Args:
            ids_BT: new tokens.
            hidden_BTD: their embeddings; only scores that read states need them.
            state: what the previous call returned; None at the start of a text.

        Returns:
            What each layer executes over (equal layers share one object), and the state.
        """
        found: list[_Found] = []
        for number, rule in enumerate(self._rules):
            # A fixed stride looks at no token, so one row stands for all.
            rows = slice(0, 1) if isinstance(rule, FixedStride) else slice(None)
            before = state.rules[number] if state is not None else RuleState()
            hidden = None if hidden_BTD is None else hidden_BTD[rows]
            flags, after = rule.starts(ids_BT[rows], hidden, before)
            zero = torch.zeros(len(flags), dtype=torch.long, device=flags.device)
            opened, count = (state.open_starts[number], state.counts[number]) if state is not None else (zero, zero)
            layout, still_open = ChunkLayout.from_flags(flags, rule.lookahead_tokens, before.tokens, opened)
            found.append(_Found(layout, count, opened, after, still_open))
        past = state.rules[0].tokens if state is not None else 0
        position_T = torch.arange(past, past + ids_BT.shape[1], device=ids_BT.device)
        # Beyond the first call a router's start may lie behind; its forward value is 1 anyway.
        learns = bool(self._routers) and not past and torch.is_grad_enabled() and hidden_BTD is not None
        weights = [router(hidden_BTD) for router in self._routers] if learns else []
        made = {
            groups: _layer([found[n] for n in groups], position_T, past, weights, self._threshold)
            for groups in dict.fromkeys(self._layers)
        }
        after_state = ChunkState(
            rules=tuple(one.state for one in found),
            open_starts=tuple(one.still_open for one in found),
            counts=tuple(one.before + one.layout.counts_B for one in found),
        )
        return [made[groups] for groups in self._layers], after_state

    def counts(self, state: ChunkState) -> list[torch.Tensor]:
        """Entries closed so far, by layer, each long [B or 1, G]."""
        rows = max(len(count) for count in state.counts)
        counts = [count.expand(rows) for count in state.counts]
        return [torch.stack([counts[n] for n in groups], dim=1) for groups in self._layers]


class _Found(NamedTuple):
    """What one rule found in a call."""

    layout: ChunkLayout
    before: torch.Tensor  # entries before the call
    open_start: torch.Tensor  # of the chunk that was open before it
    state: RuleState
    still_open: torch.Tensor


def _layer(
    found: list[_Found], position_T: torch.Tensor, past: int, weights: list[torch.Tensor], threshold: float
) -> LayerChunks:
    layouts = [one.layout for one in found]
    most = max(layout.entries for layout in layouts)
    padded = [layout.padded_to(most) for layout in layouts]
    counts_BG = torch.stack([one.before for one in found], dim=1)
    new_BGE = torch.stack([layout.close_BE for layout in padded], dim=1)
    totals_BG = counts_BG + (new_BGE != NEVER).sum(dim=-1)
    total = int(totals_BG.max()) if past else most
    if not past:
        close_BGE = new_BGE
    else:
        # Entries of each row stand close together: old ones, which every new query sees, then new ones.
        close_BGE = new_BGE.new_full((*counts_BG.shape, total + most), NEVER)
        close_BGE.scatter_(2, counts_BG[..., None] + torch.arange(most, device=position_T.device), new_BGE)
        old = torch.arange(total + most, device=position_T.device) < counts_BG[..., None]
        close_BGE = close_BGE.masked_fill(old, 0)[..., :total]
    # The end of the last chunk that each query sees; before the first one, where the open chunk starts.
    uncovered = []
    for layout, one in zip(padded, found, strict=True):
        start = one.open_start
        seen_BT = torch.searchsorted(
            layout.close_BE.contiguous(), position_T.expand(len(start), -1).contiguous(), right=True
        )
        bounds = torch.cat([start[:, None], layout.end_BE], dim=1)
        uncovered.append(bounds.gather(1, seen_BT))
    sure = [confidence(p, layout.start_BE, threshold) for p, layout in zip(weights, padded, strict=False)]
    return LayerChunks(
        confidence_BGE=torch.stack(sure, dim=1) if sure else None,
        layouts=tuple(padded),
        closing=tuple(layout.entries > 0 for layout in layouts),
        close_BGE=close_BGE,
        uncovered_BGT=torch.stack(uncovered, dim=1),
        past_tokens=past,
    )
