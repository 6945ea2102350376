"""Block-sparse: for each block of queries the windows of keys that its mean query likes best.

Source: MInference 1.0, arXiv 2407.02490, section 3. Where we differ: windows can overlap, so that a short fact at a
window's edge is not diluted.

Legend: T queries, L keys, D head width, Q blocks of queries, N blocks of keys, P pooled windows of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from isophase.prefill.patterns.reads import BlockReads, Reads, at_least
from isophase.prefill.sample import Geometry, HeadSample


@dataclass(frozen=True, kw_only=True)
class BlockSparse:
    """For each block of queries, the windows of keys whose mean key its mean query likes best.

    Attributes:
        windows: windows that each block of queries reads.
        window_tokens: keys that are pooled into one.
        overlap: windows that each key lies in. 1 is MInference's grid of blocks, which dilutes a fact that an edge
            cuts; with 2 or more, every fact of up to `window_tokens * (1 - 1 / overlap)` tokens lies whole in one.
    """

    windows: int = 16
    window_tokens: int = 64
    overlap: int = 2
    name: str = field(default="block_sparse", init=False)

    def __post_init__(self) -> None:
        at_least(self, windows=1, window_tokens=1, overlap=1)
        if self.window_tokens % self.overlap:
            raise ValueError(f"overlap is {self.overlap}; give a divisor of the {self.window_tokens} tokens per window")

    def choose(self, sample: HeadSample) -> Reads:
        """What this head reads."""
        share_QP = self.shares(sample)
        best = share_QP.topk(min(self.windows, share_QP.shape[1])).indices
        chosen_QP = torch.zeros(share_QP.shape, dtype=torch.bool, device=share_QP.device).scatter_(1, best, True)
        blocks_QN = self.spread(chosen_QP & (share_QP > 0), sample.geometry)
        return BlockReads(geometry=sample.geometry, blocks_QN=blocks_QN)

    def shares(self, sample: HeadSample) -> torch.Tensor:
        """Softmax over windows before each block of queries, float32 [Q, P]; 0 for windows that it cannot read."""
        geometry = sample.geometry
        if self.stride_tokens % geometry.key_tokens:
            raise ValueError(
                f"windows every {self.stride_tokens} tokens do not fit blocks of {geometry.key_tokens} keys; "
                "give a multiple"
            )
        query_QD = _pool_blocks(sample.query_TD.float(), geometry.query_tokens)
        key_PD = _pool_windows(sample.key_LD.float(), self.window_tokens, self.stride_tokens)
        starts_P = torch.arange(len(key_PD), device=geometry.device) * self.stride_tokens
        logits_QP = (query_QD @ key_PD.T).mul_(sample.scaling)
        logits_QP = logits_QP.masked_fill(starts_P >= geometry.starts_Q[:, None], -torch.inf)
        return logits_QP.softmax(dim=-1).nan_to_num(0.0)

    @property
    def stride_tokens(self) -> int:
        """Keys from one window to the next."""
        return self.window_tokens // self.overlap

    def spread(self, window_QP: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """For each block of keys the largest value of the windows that it lies in, [Q, N]; of bools, whether any."""
        per_stride = self.stride_tokens // geometry.key_tokens
        pieces = -(-geometry.key_blocks // per_stride)
        read_QN = window_QP.new_zeros(len(window_QP), pieces)
        for shift in range(self.overlap):
            part = window_QP[:, : pieces - shift]
            into = read_QN[:, shift : shift + part.shape[1]]
            torch.maximum(into, part, out=into)
        return read_QN.repeat_interleave(per_stride, dim=1)[:, : geometry.key_blocks]


def _pool_blocks(rows_TD: torch.Tensor, size: int) -> torch.Tensor:
    """Means of blocks of rows; the last may be shorter."""
    whole = len(rows_TD) // size * size
    means = rows_TD[:whole].reshape(-1, size, rows_TD.shape[1]).mean(1)
    return torch.cat([means, rows_TD[whole:].mean(0, keepdim=True)]) if whole < len(rows_TD) else means


def _pool_windows(rows_LD: torch.Tensor, size: int, stride: int) -> torch.Tensor:
    """Means of windows of `size` rows at every multiple of `stride`, which divides it; those at the end are shorter."""
    pieces = -(-len(rows_LD) // stride)
    pad = pieces * stride - len(rows_LD)
    sums_PD = torch.nn.functional.pad(rows_LD, (0, 0, 0, pad)).view(pieces, stride, -1).sum(1)
    total_PD = sums_PD.clone()
    for shift in range(1, min(size // stride, pieces)):
        total_PD[:-shift] += sums_PD[shift:]
    starts_P = torch.arange(pieces, device=rows_LD.device) * stride
    means_PD: torch.Tensor = total_PD / (len(rows_LD) - starts_P).clamp(max=size)[:, None]
    return means_PD
