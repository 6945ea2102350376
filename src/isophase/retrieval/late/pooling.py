"""Means of token vectors over spans, from prefix sums: any number of spans costs no encoder time.

Legend: N tokens of a piece of text, E spans, C parts of a text that no grid cuts, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from isophase.retrieval.late.spans import Spans
from isophase.retrieval.late.tokens import IntArray

FloatArray = NDArray[np.float32]
PrefixArray = NDArray[np.float64]


def prefix_sums(vectors_ND: FloatArray | PrefixArray) -> PrefixArray:
    """Sums of the first 0..N token vectors, float64 [N + 1, D]: a span's sum is a difference of two rows."""
    out = np.zeros((len(vectors_ND) + 1, vectors_ND.shape[1]))
    np.cumsum(vectors_ND, axis=0, dtype=np.float64, out=out[1:])
    return out


class SpanSums:
    """Collects the token vectors of a text by span, piece by piece, in any order of pieces.

    Special tokens belong to the outer chunks, as in the paper's code: what stands before the text to the first, what
    stands behind it to the last. With one chunk, its mean is the model's own embedding of the text.

    Args:
        spans: chunks of the text, at least one.
        width: D.

    Source: arXiv 2409.04701, algorithm 1.
    """

    def __init__(self, spans: Spans, width: int) -> None:
        self._start_E, self._end_E = spans.start_token_E, spans.end_token_E
        self._sums_ED = np.zeros((len(spans), width))
        self._count_E: IntArray = np.zeros(len(spans), dtype=np.int64)

    def add(self, first_token: int, prefix: PrefixArray) -> None:
        """Add tokens `first_token` and on, given as their prefix sums."""
        last = first_token + len(prefix) - 1
        begin = int(np.searchsorted(self._end_E, first_token, side="right"))
        stop = int(np.searchsorted(self._start_E, last, side="left"))
        low = np.maximum(self._start_E[begin:stop], first_token) - first_token
        high = np.minimum(self._end_E[begin:stop], last) - first_token
        self._sums_ED[begin:stop] += prefix[high] - prefix[low]
        self._count_E[begin:stop] += high - low

    def add_special(self, chunk: int, vectors_ND: FloatArray) -> None:
        """Add special tokens to a chunk: 0 for the first, -1 for the last."""
        self._sums_ED[chunk] += vectors_ND.sum(axis=0, dtype=np.float64)
        self._count_E[chunk] += len(vectors_ND)

    def means(self) -> FloatArray:
        """Mean token vector of each span, float32 [E, D]."""
        assert (self._count_E > 0).all()
        means: FloatArray = (self._sums_ED / self._count_E[:, None]).astype(np.float32)
        return means


def mean_over_grids(grids: Sequence[Spans], vectors: Sequence[FloatArray]) -> list[FloatArray]:
    """Vectors of several grids over one text, averaged: what a chunk is worth then depends little on where grids lie.

    A token's vector is the mean of the chunks that it lies in, one of each grid; a chunk's is the mean over its tokens.
    With many grids this weighs what stands around a chunk by a triangle, which moves with the text.

    Args:
        grids: chunks by grid; every grid covers the text.
        vectors: float32 [E, D] by grid.
    """
    if len(grids) == 1 or not len(grids[0]):
        return list(vectors)
    edges = np.unique(np.concatenate([grids[0].end_token_E[-1:], *(spans.start_token_E for spans in grids)]))
    cells_CD = np.zeros((len(edges) - 1, vectors[0].shape[1]))
    for spans, own_ED in zip(grids, vectors, strict=True):
        cells_CD += own_ED[np.searchsorted(spans.start_token_E, edges[:-1], side="right") - 1]
    prefix = prefix_sums(cells_CD * (np.diff(edges) / len(grids))[:, None])
    out: list[FloatArray] = []
    for spans in grids:
        low, high = np.searchsorted(edges, spans.start_token_E), np.searchsorted(edges, spans.end_token_E)
        tokens_E = spans.end_token_E - spans.start_token_E
        out.append(((prefix[high] - prefix[low]) / tokens_E[:, None]).astype(np.float32))
    return out


def unit(vectors_ED: FloatArray) -> FloatArray:
    """Vectors of length 1, float32; a zero vector stays."""
    norm = np.linalg.norm(vectors_ED, axis=-1, keepdims=True)
    scaled: FloatArray = (vectors_ED / np.maximum(norm, 1e-12)).astype(np.float32)
    return scaled
