"""All vectors that a comparison needs, from one reading of the documents, and one more for naive vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from isophase.chunking import ChunkRule
from isophase.retrieval.compare.metrics import Units
from isophase.retrieval.late.chunker import LateChunker, groups
from isophase.retrieval.late.pooling import FloatArray, mean_over_grids, unit
from isophase.retrieval.late.rules import TextRule
from isophase.retrieval.late.spans import Spans, cut, needs_hidden


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """Vectors by document and grid.

    Attributes:
        spans: chunks.
        late: vectors that have read the document.
        naive: vectors of chunks read alone; None for grids that were not asked for.
    """

    spans: list[list[Spans]]
    late: list[list[FloatArray]]
    naive: list[list[FloatArray | None]]

    def units(self, grids: Sequence[int], late_weight: float, *, average: bool = True) -> Units:
        """Chunks of some grids.

        Args:
            grids: numbers of rules; several are offsets of one fixed stride.
            late_weight: 1 for late vectors, 0 for naive ones, or a mixture.
            average: average the vectors of several grids, as `LateChunker` does.
        """
        document, start, end, grid = [], [], [], []
        vectors: list[FloatArray] = []
        for number, per_grid in enumerate(self.spans):
            chosen = [per_grid[g] for g in grids]
            own = [self._blend(number, g, late_weight) for g in grids]
            vectors += mean_over_grids(chosen, own) if average else own
            for g, spans in zip(grids, chosen, strict=True):
                document.append(np.full(len(spans), number))
                grid.append(np.full(len(spans), g))
                start.append(spans.start_char_E)
                end.append(spans.end_char_E)
        return Units(
            document_N=np.concatenate(document),
            start_N=np.concatenate(start),
            end_N=np.concatenate(end),
            grid_N=np.concatenate(grid),
            vectors_ND=np.concatenate(vectors),
        )

    def _blend(self, document: int, grid: int, late_weight: float) -> FloatArray:
        late = self.late[document][grid]
        if late_weight == 1:
            return late
        alone = self.naive[document][grid]
        assert alone is not None
        return unit(late_weight * unit(late) + (1 - late_weight) * unit(alone)) if late_weight else alone


def read_all(
    chunker: LateChunker,
    documents: Sequence[str],
    rules: Sequence[ChunkRule | TextRule | None],
    naive: Sequence[bool],
    say: Callable[[int], None] | None = None,
) -> Reading:
    """Read documents for several rules.

    Args:
        chunker: its encoder and overlap count, its own rule does not.
        documents: texts.
        rules: one for each grid; None for one chunk a document.
        naive: for each grid, whether its chunks are also read alone.
        say: called with the number of documents read.
    """
    late = LateChunker(chunker.encoder, mode="late", overlap_tokens=chunker.overlap_tokens)
    alone = LateChunker(chunker.encoder, mode="naive", overlap_tokens=chunker.overlap_tokens)
    out = Reading(spans=[], late=[], naive=[])
    for group in groups(documents, len):
        read = [chunker.encoder.documents.read(text) for text in group]
        hidden = chunker.token_vectors(read) if any(map(needs_hidden, rules)) else [None] * len(read)
        cuts = [[cut(rule, tokens, h) for rule in rules] for tokens, h in zip(read, hidden, strict=True)]
        out.spans.extend(cuts)
        out.late.extend(late.chunk_vectors(read, cuts))
        asked = [g for g, wanted in enumerate(naive) if wanted]
        for found in alone.chunk_vectors(read, [[grids[g] for g in asked] for grids in cuts]):
            by_grid: list[FloatArray | None] = [None] * len(rules)
            for g, vectors in zip(asked, found, strict=True):
                by_grid[g] = vectors
            out.naive.append(by_grid)
        if say is not None:
            say(len(out.spans))
    return out
