"""Embeddings of chunks that have read the whole document.

Legend: T tokens of a text, E chunks, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from isophase.chunking import ChunkRule
from isophase.errors import IsophaseError
from isophase.retrieval.late.encoder import Encoder
from isophase.retrieval.late.pooling import FloatArray, SpanSums, mean_over_grids, prefix_sums, unit
from isophase.retrieval.late.rules import Sentences, TextRule
from isophase.retrieval.late.spans import Spans, cut, needs_hidden, shifted
from isophase.retrieval.late.tokens import IntArray, Tokens, Window, windows

MODES = ("late", "naive", "whole", "blended")
# Documents are batched by length within groups of about so many characters; a group is also what is kept in memory.
_GROUP_CHARACTERS, _GROUP_DOCUMENTS = 400_000, 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """A part of a document, and its vector.

    Attributes:
        document: number of the document, from 0.
        chunk: number within the document and its grid, from 0.
        text: characters; all chunks of one grid joined give the document.
        start_char: first character.
        end_char: one past the last.
        start_token: first token, special tokens not counted.
        end_token: one past the last.
        shift_tokens: of the fixed grid that the chunk belongs to; 0 without one.
        vector: float32 [D].
    """

    document: int
    chunk: int
    text: str
    start_char: int
    end_char: int
    start_token: int
    end_token: int
    shift_tokens: int
    vector: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class _Piece:
    """Tokens that are read as one text, and the chunks that they are pooled over."""

    ids_T: IntArray
    grids: list[Spans]


class LateChunker:
    """Cuts documents into chunks and embeds them.

    Args:
        model: folder or hub id of a mean-pooling model, a loaded `SentenceTransformer`, or an `Encoder`.
        rule: any rule of `isophase.chunking`, or one that reads the text (`Sentences`, `Delimiters`).
        mode: `late` averages the vectors of tokens that have read the whole document (in windows, where it is
            longer than the model); `naive` reads every chunk on its own; `whole` makes one chunk of each document;
            `blended` is a weighted sum of late and naive vectors, and reads everything twice.
        late_weight: of the late vector when blending, 0 to 1.
        offsets: grids of a fixed stride, equally spaced; with `late` they share one reading. The vectors of several
            grids are averaged, see `pooling.mean_over_grids`.
        overlap_tokens: tokens that a later window reads again, for context; their outputs are dropped. Default a
            sixteenth of a window, at most 128.
        options: of `Encoder`: `window_tokens`, `batch_tokens`, `device`, `dtype`, `document_prompt`, `query_prompt`.

    Raises:
        IsophaseError: for a model or settings that cannot work.

    Source: Günther et al., Late Chunking (arXiv 2409.04701). The paper cuts by sentences or a number of tokens; here
        any chunk rule cuts, several grids may be laid over one reading, and each window has its own special tokens.
    """

    def __init__(
        self,
        model: str | Any,
        *,
        rule: ChunkRule | TextRule | None = None,
        mode: str = "late",
        late_weight: float = 0.5,
        offsets: int = 1,
        overlap_tokens: int | None = None,
        **options: Any,
    ) -> None:
        if mode not in MODES:
            raise IsophaseError(f"mode {mode!r} is unknown.", f"Give one of {', '.join(MODES)}.")
        if not 0 <= late_weight <= 1:
            raise IsophaseError(f"the weight of late vectors is {late_weight}.", "Give a number from 0 to 1.")
        self.encoder = model if isinstance(model, Encoder) else Encoder(model, **options)
        self.mode, self.late_weight = mode, late_weight
        self.rules: list[ChunkRule | TextRule | None] = [None]
        if mode != "whole":
            self.rules = shifted(rule or Sentences(), offsets)
        capacity = self.encoder.capacity(self.encoder.documents)
        self.overlap_tokens = min(capacity // 16, 128) if overlap_tokens is None else overlap_tokens
        if not 0 <= self.overlap_tokens < capacity:
            raise IsophaseError(
                f"windows overlap by {self.overlap_tokens} of their {capacity} tokens.",
                f"Give --overlap 0 to {capacity - 1}.",
            )

    def encode(self, documents: Iterable[str], say: Callable[[int], None] | None = None) -> list[Chunk]:
        """Chunks of all documents, in order; a document without tokens has none.

        Args:
            documents: texts.
            say: called now and then with the number of documents done.
        """
        out: list[Chunk] = []
        done = 0
        for group in groups(documents, len):
            out += self.encode_group(group, done)
            done += len(group)
            if say is not None:
                say(done)
        return out

    def stream(self, documents: Iterable[str]) -> Iterator[list[Chunk]]:
        """As `encode`, a group of documents at a time: memory does not grow with their number."""
        first = 0
        for group in groups(documents, len):
            yield self.encode_group(group, first)
            first += len(group)

    def encode_group(self, documents: Sequence[str], first: int = 0) -> list[Chunk]:
        """Chunks of documents that are batched together.

        Args:
            documents: texts.
            first: number of the first one.
        """
        read = [self.encoder.documents.read(text) for text in documents]
        hidden = self.token_vectors(read) if any(needs_hidden(rule) for rule in self.rules) else [None] * len(read)
        cuts = [[cut(rule, t, h) for rule in self.rules] for t, h in zip(read, hidden, strict=True)]
        vectors = [self._average(*pair) for pair in zip(cuts, self.chunk_vectors(read, cuts), strict=True)]
        return [
            Chunk(
                document=first + number,
                chunk=n,
                text=spans.text(read[number], n),
                start_char=int(spans.start_char_E[n]),
                end_char=int(spans.end_char_E[n]),
                start_token=int(spans.start_token_E[n]),
                end_token=int(spans.end_token_E[n]),
                shift_tokens=spans.shift_tokens,
                vector=vectors[number][grid][n],
            )
            for number, grids in enumerate(cuts)
            for grid, spans in enumerate(grids)
            for n in range(len(spans))
        ]

    def chunk_vectors(self, read: Sequence[Tokens], cuts: Sequence[list[Spans]]) -> list[list[FloatArray]]:
        """Vectors [E, D] by document and grid, as the mode says; every grid for itself."""
        if self.mode == "naive":
            return self._naive(read, cuts)
        late = [
            [self._finish(means) for means in grids]
            for grids in self._pool([_Piece(ids_T=t.ids_T, grids=g) for t, g in zip(read, cuts, strict=True)])
        ]
        if self.mode != "blended":
            return late
        naive, weight = self._naive(read, cuts), self.late_weight
        return [
            [unit(weight * unit(a) + (1 - weight) * unit(b)) for a, b in zip(*pair, strict=True)]
            for pair in zip(late, naive, strict=True)
        ]

    def encode_queries(self, texts: Sequence[str]) -> FloatArray:
        """Vectors of questions, [len(texts), D]; a question longer than a window is read in windows.

        Raises:
            IsophaseError: for a question without tokens.
        """
        tokenizer = self.encoder.queries
        read = [tokenizer.read(text) for text in texts]
        if empty := [text for text, tokens in zip(texts, read, strict=True) if not len(tokens)]:
            raise IsophaseError(f"the question {empty[0]!r} has no tokens.", "Ask something.")
        pieces = [_Piece(ids_T=t.ids_T, grids=[cut(None, t)]) for t in read]
        means = self._pool(pieces, query=True)
        return np.concatenate([self._finish(grids[0]) for grids in means]) if means else np.zeros((0, 0), np.float32)

    def token_vectors(self, read: Sequence[Tokens]) -> list[torch.Tensor]:
        """Vectors [T, D] of every token of each text, special tokens left out."""
        out = [torch.zeros(len(t), self.encoder.width) for t in read]
        for piece, window, vectors in self._windows([t.ids_T for t in read], False):
            head = len(self.encoder.documents.head_ids)
            own = vectors[head : head + window.end - window.start]
            out[piece][window.keep_from : window.end] = torch.from_numpy(own[window.keep_from - window.start :])
        return out

    def _naive(self, read: Sequence[Tokens], cuts: Sequence[list[Spans]]) -> list[list[FloatArray]]:
        """Every chunk as a text of its own, in the tokens that it has in the document."""
        pieces = []
        for tokens, grids in zip(read, cuts, strict=True):
            for spans in grids:
                for start, end in zip(spans.start_token_E, spans.end_token_E, strict=True):
                    pieces.append(_Piece(ids_T=tokens.ids_T[start:end], grids=[_one_chunk(int(end - start))]))
        means = iter(self._pool(pieces))
        return [
            [
                self._finish(np.concatenate([next(means)[0] for _ in range(len(spans))]))
                if len(spans)
                else np.zeros((0, self.encoder.width), np.float32)
                for spans in grids
            ]
            for grids in cuts
        ]

    def _pool(self, pieces: Sequence[_Piece], query: bool = False) -> list[list[FloatArray]]:
        """Mean token vectors by piece and grid: each window is read once, and added to every grid's spans."""
        width = self.encoder.width
        tokenizer = self.encoder.queries if query else self.encoder.documents
        head, tail = len(tokenizer.head_ids), len(tokenizer.tail_ids)
        sums = [[SpanSums(spans, width) for spans in piece.grids] for piece in pieces]
        for number, window, vectors in self._windows([piece.ids_T for piece in pieces], query):
            kept = vectors[head + window.keep_from - window.start : head + window.end - window.start]
            prefix = prefix_sums(kept)
            for grid in sums[number]:
                grid.add(window.keep_from, prefix)
                if window.first and head:
                    grid.add_special(0, vectors[:head])
                if window.last and tail:
                    grid.add_special(-1, vectors[-tail:])
        return [[grid.means() for grid in grids] for grids in sums]

    def _windows(self, texts: Sequence[IntArray], query: bool) -> Iterator[tuple[int, Window, FloatArray]]:
        """Read all windows of all texts, longest first: number of the text, window, vectors with special tokens."""
        tokenizer = self.encoder.queries if query else self.encoder.documents
        capacity = self.encoder.capacity(tokenizer)
        overlap = min(self.overlap_tokens, capacity - 1)
        places = [(n, w) for n, ids in enumerate(texts) if len(ids) for w in windows(len(ids), capacity, overlap)]
        inputs = [
            np.concatenate([tokenizer.head_ids, texts[n][w.start : w.end], tokenizer.tail_ids]) for n, w in places
        ]
        for place, vectors in self.encoder.vectors(inputs):
            yield *places[place], vectors

    def _average(self, grids: list[Spans], vectors: list[FloatArray]) -> list[FloatArray]:
        if len(grids) == 1:
            return vectors
        averaged = mean_over_grids(grids, vectors)
        return list(map(unit, averaged)) if self.encoder.normalises or self.mode == "blended" else averaged

    def _finish(self, means_ED: FloatArray) -> FloatArray:
        return unit(means_ED) if self.encoder.normalises else means_ED


def _one_chunk(tokens: int) -> Spans:
    start, end = np.zeros(1, dtype=np.int64), np.array([tokens])
    return Spans(start_token_E=start, end_token_E=end, start_char_E=start, end_char_E=end)


_Item = TypeVar("_Item")


def groups(items: Iterable[_Item], characters: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Neighbours that are read together, by their sizes alone, so that a resumed run makes the same groups."""
    group: list[_Item] = []
    size = 0
    for item in items:
        group.append(item)
        size += characters(item)
        if size >= _GROUP_CHARACTERS or len(group) >= _GROUP_DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group
