"""What sparse attention reads: for each head and each block of queries, which blocks of keys and which columns.

Everything reads this one type: patterns and the adaptive mode write it, executors follow it, recall and density
are counted on it.

Legend: H query heads, T queries, L keys, Q blocks of queries, N blocks of keys, S sampled queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Which keys each query reads.

    The queries are the last T of L positions. A query at position p in block i reads key j when j <= p, when j is
    inside the window, and when one of three holds: j is in the query's own block, j's block is chosen for (head, i),
    or j is one of the head's columns. So every query reads itself, and nothing is read twice.

    Attributes:
        blocks_HQN: chosen blocks of keys, bool. Block n holds keys n * key_tokens and on.
        columns: for each head, sorted positions of single keys that every query block reads, long.
        tokens: L, keys.
        first_query: position of the first query, L - T.
        query_tokens: queries per block; the last block may be shorter.
        key_tokens: keys per block, at most `query_tokens`.
        window_tokens: of a sliding layer, keys that a query may see, itself included; else None.

    Raises:
        ValueError: for shapes that do not fit each other, or columns out of range or out of order.
    """

    blocks_HQN: torch.Tensor
    columns: tuple[torch.Tensor, ...]
    tokens: int
    first_query: int
    query_tokens: int
    key_tokens: int
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        heads = self.blocks_HQN.shape[0]
        if not 0 <= self.first_query < self.tokens:
            raise ValueError(f"first query {self.first_query} is not one of 0..{self.tokens - 1}")
        if not 1 <= self.key_tokens <= self.query_tokens:
            raise ValueError(f"blocks of {self.key_tokens} keys for {self.query_tokens} queries; give 1 to as many")
        want = (heads, -(-self.queries // self.query_tokens), -(-self.tokens // self.key_tokens))
        if tuple(self.blocks_HQN.shape) != want or self.blocks_HQN.dtype != torch.bool:
            raise ValueError(f"blocks are {tuple(self.blocks_HQN.shape)}, {self.blocks_HQN.dtype}; they must be {want}")
        if len(self.columns) != heads:
            raise ValueError(f"columns of {len(self.columns)} heads for {heads} heads")
        for column in self.columns:
            if column.numel() and (
                int(column[0]) < 0 or int(column[-1]) >= self.tokens or bool((column.diff() <= 0).any())
            ):
                raise ValueError(f"columns must rise and lie in 0..{self.tokens - 1}")
        if self.window_tokens is not None and self.window_tokens < 1:
            raise ValueError(f"a window of {self.window_tokens} tokens; give 1 or more")

    @property
    def heads(self) -> int:
        """H, query heads."""
        return self.blocks_HQN.shape[0]

    @property
    def queries(self) -> int:
        """T, queries."""
        return self.tokens - self.first_query

    @cached_property
    def starts_Q(self) -> torch.Tensor:
        """Position of the first query of each block, long."""
        device = self.blocks_HQN.device
        return torch.arange(self.first_query, self.tokens, self.query_tokens, device=device)

    def rows(self, head: int, positions_S: torch.Tensor) -> torch.Tensor:
        """What queries read, bool [S, L].

        Args:
            head: query head.
            positions_S: positions of the queries, long, first_query..L-1.
        """
        block_S = (positions_S - self.first_query) // self.query_tokens
        chosen_SL = self.blocks_HQN[head, block_S].repeat_interleave(self.key_tokens, dim=1)[:, : self.tokens]
        chosen_SL[:, self.columns[head]] = True
        key_L = torch.arange(self.tokens, device=chosen_SL.device)
        chosen_SL |= key_L >= self.starts_Q[block_S, None]
        chosen_SL &= key_L <= positions_S[:, None]
        if self.window_tokens is not None:
            chosen_SL &= key_L > positions_S[:, None] - self.window_tokens
        return chosen_SL

    def dense_mask(self) -> torch.Tensor:
        """The plan as a mask for dense attention, bool [H, T, L]: the reference that executors must equal."""
        positions_T = torch.arange(self.first_query, self.tokens, device=self.blocks_HQN.device)
        return torch.stack([self.rows(head, positions_T) for head in range(self.heads)])

    def history_HQ(self) -> torch.Tensor:
        """Keys before its own block that each block of queries reads, long [H, Q], windows not counted."""
        first_N = torch.arange(self.blocks_HQN.shape[2], device=self.blocks_HQN.device) * self.key_tokens
        found = []
        for first in range(0, len(self.starts_Q), 128):
            starts_S = self.starts_Q[first : first + 128]
            chosen_HSN = self.blocks_HQN[:, first : first + 128]
            size_SN = (starts_S[:, None] - first_N).clamp(0, self.key_tokens)
            keys_HS = torch.stack([(chosen_SN * size_SN).sum(-1) for chosen_SN in chosen_HSN])
            for head, column in enumerate(self.columns):
                if column.numel():
                    alone_SC = ~chosen_HSN[head][:, column // self.key_tokens] & (column < starts_S[:, None])
                    keys_HS[head] += alone_SC.sum(-1)
            found.append(keys_HS)
        return torch.cat(found, dim=1)

    def density(self) -> torch.Tensor:
        """Keys read by key that dense attention reads, float64 [H], 0..1."""
        sizes_Q = torch.full_like(self.starts_Q, self.query_tokens)
        sizes_Q[-1] = self.tokens - int(self.starts_Q[-1])
        own = (sizes_Q * (sizes_Q + 1) // 2).sum()
        if self.window_tokens is None:
            read_H = (self.history_HQ() * sizes_Q).sum(-1) + own
            return read_H.double() / self.queries / (self.first_query + (self.queries + 1) / 2)
        positions_T = torch.arange(self.first_query, self.tokens, device=sizes_Q.device)
        dense = (positions_T + 1).clamp(max=self.window_tokens).sum().double()
        # Windows cut blocks, so keys are counted one by one, in stretches of bounded size.
        step = max(1, 2**24 // self.tokens)
        parts = [positions_T[n : n + step] for n in range(0, self.queries, step)]
        read = [sum(int(self.rows(head, part).sum()) for part in parts) for head in range(self.heads)]
        return torch.tensor(read, dtype=torch.float64, device=sizes_Q.device) / dense


def full_plan(
    heads: int, tokens: int, *, first_query: int = 0, query_tokens: int = 128, window_tokens: int | None = None,
    device: torch.device | str = "cpu",
) -> Plan:  # fmt: skip
    """Every key that a query may see: dense attention, or a sliding window without the keys outside of it.

    Args:
        heads: query heads.
        tokens: keys.
        first_query: position of the first query.
        query_tokens: queries, and keys, per block.
        window_tokens: of a sliding layer.
        device: where the plan lives.
    """
    starts_Q = torch.arange(first_query, tokens, query_tokens, device=device)
    end_N = (torch.arange(-(-tokens // query_tokens), device=device) + 1) * query_tokens
    seen_QN = (end_N - query_tokens)[None] < starts_Q[:, None]
    if window_tokens is not None:
        seen_QN = seen_QN & (end_N[None] > starts_Q[:, None] - window_tokens + 1)
    none = torch.empty(0, dtype=torch.long, device=device)
    return Plan(
        blocks_HQN=seen_QN.expand(heads, -1, -1), columns=(none,) * heads, tokens=tokens, first_query=first_query,
        query_tokens=query_tokens, key_tokens=query_tokens, window_tokens=window_tokens,
    )  # fmt: skip
