"""How well chunks and documents are found: nDCG and recall, and intervals over questions.

Legend: N chunks, Q questions, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from scipy.stats import bootstrap

from isophase.retrieval.late.pooling import FloatArray, unit
from isophase.retrieval.late.tokens import IntArray

Scores = NDArray[np.float64]
TOP = 10


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an answer stands.

    Attributes:
        document: number of the document.
        start_char: first character; None where only the document is known.
        end_char: one past the last.
    """

    document: int
    start_char: int | None = None
    end_char: int | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question and the places of its answer."""

    text: str
    places: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Units:
    """What is ranked: chunks with vectors, documents in order.

    Attributes:
        document_N: number of the document, never falling.
        start_N: first character.
        end_N: one past the last.
        grid_N: which grid the chunk belongs to.
        vectors_ND: any length; compared by cosine.
    """

    document_N: IntArray
    start_N: IntArray
    end_N: IntArray
    grid_N: IntArray
    vectors_ND: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """By question, [Q]; NaN where a question names no place inside its document.

    Attributes:
        chunk_ndcg: nDCG@10 of chunks.
        chunk_recall: share of the relevant chunks among the first 10.
        document_ndcg: nDCG@10 of documents, ranked by their best chunk.
        document_recall: share of the relevant documents among the first 10.
        first: best chunk's place, document and first character, [Q, 2].
    """

    chunk_ndcg: Scores
    chunk_recall: Scores
    document_ndcg: Scores
    document_recall: Scores
    first: IntArray


def evaluate(units: Units, questions: Sequence[Question], vectors_QD: FloatArray) -> Found:
    """Rank all chunks for every question.

    A chunk is relevant if half of it lies in the answer, or half of the answer in it; of each grid, at least the chunk
    that holds most of the answer. With several grids, chunks that overlap a better one are left out: the best offset
    wins, and no text is shown twice. The ideal ranking has as many relevant chunks as the first grid.
    """
    scores_QN = unit(vectors_QD) @ unit(units.vectors_ND).T
    starts = np.flatnonzero(np.diff(units.document_N, prepend=-1))
    best_QM = np.maximum.reduceat(scores_QN, starts, axis=1)
    documents = units.document_N[starts]
    many = len(np.unique(units.grid_N)) > 1
    rows, first = [], []
    for question, scores_N, best_M in zip(questions, scores_QN, best_QM, strict=True):
        top = best_places(units, scores_N, TOP, many)
        gold = {place.document for place in question.places}
        hits = np.isin(documents[np.argsort(-best_M, kind="stable")[:TOP]], list(gold))
        row = [np.nan, np.nan, _ndcg(hits, len(gold)), hits.sum() / len(gold)]
        relevant_N = relevant(units, question.places)
        if relevant_N.any():
            ideal = int(relevant_N[units.grid_N == units.grid_N.min()].sum()) or 1
            found = relevant_N[top]
            row[:2] = [_ndcg(found, ideal), min(1.0, found.sum() / ideal)]
        rows.append(row)
        first.append((units.document_N[top[0]], units.start_N[top[0]]))
    table = np.array(rows, dtype=np.float64).reshape(-1, 4)
    return Found(
        chunk_ndcg=table[:, 0],
        chunk_recall=table[:, 1],
        document_ndcg=table[:, 2],
        document_recall=table[:, 3],
        first=np.array(first, dtype=np.int64),
    )


def best_places(units: Units, scores_N: Scores | FloatArray, top: int, many: bool) -> IntArray:
    """Numbers of the best chunks, best first; with `many` grids, none that overlaps a better one."""
    order = np.argsort(-scores_N, kind="stable")
    if not many:
        return order[:top]
    taken: list[int] = []
    for n in order:
        clash = any(
            units.document_N[n] == units.document_N[m]
            and units.start_N[n] < units.end_N[m]
            and units.start_N[m] < units.end_N[n]
            for m in taken
        )
        if not clash:
            taken.append(int(n))
            if len(taken) == top:
                break
    return np.array(taken, dtype=np.int64)


def relevant(units: Units, places: Sequence[Place]) -> NDArray[np.bool_]:
    """Which chunks answer, [N]; see `evaluate`."""
    out = np.zeros(len(units.document_N), dtype=np.bool_)
    for place in places:
        if place.start_char is None or place.end_char is None:
            continue
        low = np.maximum(units.start_N, place.start_char)
        shared = np.where(
            units.document_N == place.document, np.maximum(np.minimum(units.end_N, place.end_char) - low, 0), 0
        )
        least = np.minimum(units.end_N - units.start_N, place.end_char - place.start_char)
        out |= (shared > 0) & (2 * shared >= least)
        for grid in np.unique(units.grid_N):
            here = np.where(units.grid_N == grid, shared, 0)
            if here.any():
                out[here.argmax()] = True
    return out


def _ndcg(hits: NDArray[np.bool_], relevant: int) -> float:
    """Discounted gain of a ranking over that of the ideal one (Järvelin and Kekäläinen 2002), at most 1."""
    discount = 1 / np.log2(np.arange(2, TOP + 2))
    ideal = discount[: min(relevant, TOP)].sum()
    return min(1.0, float(discount[: len(hits)][hits].sum() / ideal))


class Estimate(BaseModel):
    """A mean over questions with a bootstrap interval."""

    model_config = ConfigDict(frozen=True)

    mean: float
    low: float
    high: float


def estimate(values: Scores, *, confidence: float = 0.95, seed: int = 0, resamples: int = 4999) -> Estimate | None:
    """Mean and percentile bootstrap interval over questions (Efron 1979); NaN is left out, None if nothing is left."""
    kept = values[np.isfinite(values)]
    if not len(kept):
        return None
    mean = float(kept.mean())
    if len(kept) < 2 or np.ptp(kept) == 0:
        return Estimate(mean=mean, low=mean, high=mean)
    found = bootstrap(
        (kept,),
        np.mean,
        confidence_level=confidence,
        n_resamples=resamples,
        batch=500,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(mean=mean, low=float(found.low), high=float(found.high))
