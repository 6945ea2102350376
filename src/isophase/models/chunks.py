"""Chunk boundaries of a forward pass: found once, read by all layers.

Legend: B rows, T new tokens, G groups of KV heads with a rule of their own, E entries, D model width. Where a
rule reads only the number of tokens, one row stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from isophase.chunking import (
    NEVER,
    ChunkLayout,
    ChunkRule,
    FixedStride,
    LocalMaximum,
    NeighbourCosine,
    PackedPlan,
    RuleState,
    Score,
    StackedScores,
    Threshold,
    TokenHash,
    TokenRanks,
    pack,
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
    """What is kept between calls, by family of rules.

    Attributes:
        rules: state of each family.
        open_starts: start of each rule's open chunk, long [F * B], or [F] where one row stands for all.
        counts: entries closed so far, alike.
        tokens: tokens of each closed chunk, long [F * B or F, E], 0 in padding; E is 0 where nobody counts them.
        members: F, rules of each family.
    """

    rules: tuple[RuleState, ...]
    open_starts: tuple[torch.Tensor, ...]
    counts: tuple[torch.Tensor, ...]
    tokens: tuple[torch.Tensor, ...]
    members: tuple[int, ...]

    @property
    def batch(self) -> int:
        """Rows that are told apart; 1 where no rule looks at tokens."""
        return max(len(starts) // count for starts, count in zip(self.open_starts, self.members, strict=True))

    def select(self, rows: torch.Tensor) -> ChunkState:
        """The state of some rows, in the order of the long tensor `rows`."""
        picked: list[tuple[RuleState, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        families = zip(self.rules, self.open_starts, self.counts, self.tokens, self.members, strict=True)
        for state, starts, counts, tokens, members in families:
            if state.scores is None:  # a rule that looks at no token: its one row stands for all
                picked.append((state, starts, counts, tokens))
                continue
            batch = len(starts) // members
            own = (rows.to(starts.device) + torch.arange(members, device=starts.device)[:, None] * batch).flatten()
            starts, counts, tokens = (part.index_select(0, own) for part in (starts, counts, tokens))
            picked.append((state.select(own), starts, counts, tokens))
        rules, open_starts, chunk_counts, chunk_tokens = zip(*picked, strict=True)
        return replace(self, rules=rules, open_starts=open_starts, counts=chunk_counts, tokens=chunk_tokens)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerChunks:
    """What one layer executes over.

    Attributes:
        layouts: chunks that close in this call, one per group, padded alike.
        close_BGE: first query position that may see each entry, old ones included, long; `NEVER` in padding.
        uncovered_BGT: first token that lies in no entry that query t can see.
        past_tokens: tokens read before this call.
        bias_BGE: what is added to the logits of each entry, old ones included, float32; None: nothing.
        closing: whether any chunk of each group closes in this call.
        confidence_BGE: of a router in each new entry; None where there is none, or nothing is to be learned.
        plans: of packed execution, made when the first layer asks.
    """

    layouts: tuple[ChunkLayout, ...]
    close_BGE: torch.Tensor
    uncovered_BGT: torch.Tensor
    past_tokens: int
    closing: tuple[bool, ...]
    bias_BGE: torch.Tensor | None = None
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

    Rules that differ in their score alone are a *family*, which is read at once, each rule on its own rows.

    Args:
        config: of the model; its rules decide.
        routers: of the model, where it has some.
    """

    def __init__(self, config: CompressedQwen3Config, routers: Sequence[BoundaryRouter] = ()) -> None:
        by_layer = rules_of(config, routers)
        self._routers, self._threshold = list(routers), config.chunk_threshold
        self._counts_tokens = config.count_bias
        families: dict[object, list[ChunkRule]] = {}
        for rule in dict.fromkeys(rule for groups in by_layer for rule in groups):
            families.setdefault(_family(rule), []).append(rule)
        self._families = [_together(members) for members in families.values()]
        self._members = tuple(len(members) for members in families.values())
        order = [rule for members in families.values() for rule in members]
        self._layers = [tuple(order.index(rule) for rule in groups) for groups in by_layer]

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
        rules, open_starts, counts, tokens = [], [], [], []
        for number, (rule, members) in enumerate(zip(self._families, self._members, strict=True)):
            # A fixed stride looks at no token, so one row stands for all.
            rows = slice(0, 1) if isinstance(rule, FixedStride) else slice(None)
            before = state.rules[number] if state is not None else RuleState()
            reads = hidden_BTD is not None and not isinstance(rule, FixedStride) and rule.score.needs_hidden
            hidden = hidden_BTD[rows].repeat(members, 1, 1) if reads and hidden_BTD is not None else None
            flags, after = rule.starts(ids_BT[rows].repeat(members, 1), hidden, before)
            zero = torch.zeros(len(flags), dtype=torch.long, device=flags.device)
            opened, count = (state.open_starts[number], state.counts[number]) if state is not None else (zero, zero)
            layout, still_open = ChunkLayout.from_flags(flags, rule.lookahead_tokens, before.tokens, opened)
            rules.append(after)
            open_starts.append(still_open)
            counts.append(count + layout.counts_B)
            held = state.tokens[number] if state is not None else zero.new_zeros(len(flags), 0)
            if self._counts_tokens and layout.entries:
                held = _behind(held, count, layout.length_BE)[:, : int(counts[-1].max())]
            tokens.append(held)
            parts = zip(
                layout.start_BE.chunk(members), layout.end_BE.chunk(members), layout.close_BE.chunk(members),
                count.chunk(members), opened.chunk(members), held.chunk(members), strict=True,
            )  # fmt: skip
            found += [
                _Found(ChunkLayout(start_BE=start, end_BE=end, close_BE=close), before_B, opened_B, tokens_BE)
                for start, end, close, before_B, opened_B, tokens_BE in parts
            ]
        past = state.rules[0].tokens if state is not None else 0
        position_T = torch.arange(past, past + ids_BT.shape[1], device=ids_BT.device)
        # Beyond the first call a router's start may lie behind; its forward value is 1 anyway.
        learns = bool(self._routers) and not past and torch.is_grad_enabled() and hidden_BTD is not None
        weights = [router(hidden_BTD) for router in self._routers] if learns else []
        made = {
            groups: _layer([found[n] for n in groups], position_T, past, weights, self._threshold)
            for groups in dict.fromkeys(self._layers)
        }
        if self._counts_tokens:
            made = {
                groups: replace(chunks, bias_BGE=_bias([found[n] for n in groups], chunks.close_BGE.shape[2]))
                for groups, chunks in made.items()
            }
        after_state = ChunkState(
            rules=tuple(rules),
            open_starts=tuple(open_starts),
            counts=tuple(counts),
            tokens=tuple(tokens),
            members=self._members,
        )
        return [made[groups] for groups in self._layers], after_state

    def counts(self, state: ChunkState) -> list[torch.Tensor]:
        """Entries closed so far, by layer, each long [B or 1, G]."""
        by_rule = [
            own.expand(state.batch)
            for count, members in zip(state.counts, state.members, strict=True)
            for own in count.chunk(members)
        ]
        return [torch.stack([by_rule[n] for n in groups], dim=1) for groups in self._layers]


def _family(rule: ChunkRule) -> object:
    """What rules have in common that can be read at once; the rule itself where there is no other."""
    if isinstance(rule, LocalMaximum):
        return LocalMaximum, rule.radius_tokens, rule.max_tokens, rule.score.needs_hidden
    if isinstance(rule, Threshold):
        return Threshold, rule.threshold, rule.max_tokens, rule.score.needs_hidden
    return rule


def _together(members: list[ChunkRule]) -> FixedStride | LocalMaximum | Threshold:
    """One rule that reads the rows of all members of a family, one after the other."""
    first = members[0]
    assert isinstance(first, FixedStride | LocalMaximum | Threshold)
    if len(members) == 1 or isinstance(first, FixedStride):
        return first
    return replace(first, score=StackedScores(scores=tuple(rule.score for rule in members)))  # type: ignore[attr-defined]


class _Found(NamedTuple):
    """What one rule found in a call."""

    layout: ChunkLayout
    before: torch.Tensor  # entries before the call
    open_start: torch.Tensor  # of the chunk that was open before it
    tokens: torch.Tensor  # of all chunks that have closed, with those of the call


def _layer(
    found: list[_Found], position_T: torch.Tensor, past: int, weights: list[torch.Tensor], threshold: float
) -> LayerChunks:
    most = max(one.layout.entries for one in found)
    padded = [one.layout.padded_to(most) for one in found]
    counts_BG = torch.stack([one.before for one in found], dim=1)
    new_BGE = torch.stack([layout.close_BE for layout in padded], dim=1)
    if not past:
        close_BGE = new_BGE
    elif not most:
        close_BGE = _old_entries(counts_BG, int(counts_BG.max()))
    else:
        # Entries of each row stand close together: old ones, which every new query sees, then new ones.
        total = int((counts_BG + (new_BGE != NEVER).sum(dim=-1)).max())
        close_BGE = new_BGE.new_full((*counts_BG.shape, total + most), NEVER)
        close_BGE.scatter_(2, counts_BG[..., None] + torch.arange(most, device=position_T.device), new_BGE)
        close_BGE = torch.where(close_BGE == NEVER, _old_entries(counts_BG, total + most), close_BGE)
        close_BGE = close_BGE[..., :total]
    # The end of the last chunk that each query sees; before the first one, where the open chunk starts.
    open_BG1 = torch.stack([one.open_start for one in found], dim=1)[..., None]
    if most:
        position_BGT = position_T.expand(*counts_BG.shape, -1).contiguous()
        seen_BGT = torch.searchsorted(new_BGE.contiguous(), position_BGT, right=True)
        ends_BGE = torch.stack([layout.end_BE for layout in padded], dim=1)
        uncovered_BGT = torch.cat([open_BG1, ends_BGE], dim=2).gather(2, seen_BGT)
    else:  # most steps of decoding
        uncovered_BGT = open_BG1.expand(*counts_BG.shape, len(position_T))
    sure = [confidence(p, layout.start_BE, threshold) for p, layout in zip(weights, padded, strict=False)]
    return LayerChunks(
        confidence_BGE=torch.stack(sure, dim=1) if sure else None,
        layouts=tuple(padded),
        closing=tuple(bool(one.layout.entries and (one.layout.close_BE != NEVER).any()) for one in found),
        close_BGE=close_BGE,
        uncovered_BGT=uncovered_BGT,
        past_tokens=past,
    )


def _bias(found: list[_Found], entries: int) -> torch.Tensor:
    """The bias log n of every entry that stands for n tokens; 0 in padding. [B, G, entries]."""
    tokens = [torch.nn.functional.pad(one.tokens, (0, entries - one.tokens.shape[1])) for one in found]
    return torch.stack(tokens, dim=1).clamp(min=1).log()


def _behind(old_BE: torch.Tensor, counts_B: torch.Tensor, new_BE: torch.Tensor) -> torch.Tensor:
    """New numbers close behind the `counts` old ones of each row; 0 in padding. [B, old + new]."""
    place_BE = counts_B[:, None] + torch.arange(new_BE.shape[1], device=new_BE.device)
    return torch.nn.functional.pad(old_BE, (0, new_BE.shape[1])).scatter(1, place_BE, new_BE)


def _old_entries(counts_BG: torch.Tensor, total: int) -> torch.Tensor:
    """When entries of earlier calls are visible: always; `NEVER` in the padding behind them. [B, G, total]."""
    old_BGE = torch.arange(total, device=counts_BG.device) < counts_BG[..., None]
    return torch.where(old_BGE, 0, NEVER)
