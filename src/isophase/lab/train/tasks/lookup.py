"""Training data: record lookup in the `pairs` style of the probes.

A sequence is a context of key-value pairs scattered among filler, then queries `? key value`. Only
the values after the queries are predicted. Data depend on the seed alone, so matched models read
the same sequences in the same order.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from isophase.probes import ASK_ID, FILLER_IDS, KEY_IDS, VALUE_IDS

IGNORED = -100


class LookupStage(BaseModel):
    """One stage of the curriculum.

    Lookup forms only if short sequences come first; the bundled recipes start at 24 context tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["lookup"] = "lookup"
    context_tokens: int = Field(gt=0, description="tokens before the first query")
    pairs: int = Field(gt=0, description="key-value pairs in the context")
    queries: int = Field(gt=0, description="queries after the context, at most `pairs`")
    batch: int = Field(gt=0, description="sequences per step")
    steps: int = Field(gt=0, description="optimiser steps; fixed, so that matched models see equal data")
    lead: int = Field(
        default=8,
        gt=0,
        description="the pairs shift by 0..lead-1 tokens of filler, so every phase of a stride that divides it "
        "is seen equally often",
    )
    alone: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of sequences in which most of the filler lies in one place, around one pair",
    )

    @model_validator(mode="after")
    def _check_fit(self) -> LookupStage:
        if self.pairs > len(KEY_IDS):
            raise ValueError(f"{self.pairs} pairs need as many distinct keys, and there are {len(KEY_IDS)}")
        if 2 * self.pairs + self.lead - 1 > self.context_tokens:
            raise ValueError(
                f"{self.pairs} pairs and a lead of {self.lead} do not fit into {self.context_tokens} context tokens"
            )
        if self.queries > self.pairs:
            raise ValueError(f"{self.queries} queries are more than the {self.pairs} pairs")
        return self


class Batch(BaseModel):
    """Token ids and labels, int64 [batch, tokens]; labels are -100 where nothing is predicted."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]


def lookup_batch(stage: LookupStage, rng: np.random.Generator) -> Batch:
    """Draw one batch of lookup sequences.

    Args:
        stage: lengths and counts.
        rng: source of all randomness.

    Returns:
        `context_tokens + 3 * queries` tokens per sequence.
    """
    filler = stage.context_tokens - 2 * stage.pairs - (stage.lead - 1)
    B, P, Q = stage.batch, stage.pairs, stage.queries
    rows = np.arange(B)[:, None]
    keys_BP = KEY_IDS[rng.random((B, len(KEY_IDS))).argsort(axis=1)[:, :P]]
    values_BP = VALUE_IDS[rng.integers(0, len(VALUE_IDS), (B, P))]

    # Units are filler tokens (one token) and pairs (two); their order decides where pairs fall.
    units = filler + P
    is_pair_BU = np.zeros((B, units), dtype=bool)
    is_pair_BU[rows, rng.random((B, units)).argsort(axis=1)[:, :P]] = True
    gathered = rng.random(B) < stage.alone
    if filler and gathered.any():
        is_pair_BU[gathered] = _one_gap(is_pair_BU[gathered], filler, P, rng)
    starts_BU = np.cumsum(np.where(is_pair_BU, 2, 1), axis=1) - np.where(is_pair_BU, 2, 1)
    # The same filler before or behind: whatever phases the order above prefers, the shift evens them out.
    starts_BP = starts_BU[is_pair_BU].reshape(B, P) + rng.integers(0, stage.lead, (B, 1))

    ids = np.empty((B, stage.context_tokens + 3 * Q), dtype=np.int64)
    ids[:, : stage.context_tokens] = FILLER_IDS[rng.integers(0, len(FILLER_IDS), (B, stage.context_tokens))]
    ids[rows, starts_BP] = keys_BP
    ids[rows, starts_BP + 1] = values_BP
    asked_BQ = rng.random((B, P)).argsort(axis=1)[:, :Q]
    queries = ids[:, stage.context_tokens :].reshape(B, Q, 3)
    queries[:, :, 0] = ASK_ID
    queries[:, :, 1] = keys_BP[rows, asked_BQ]
    queries[:, :, 2] = values_BP[rows, asked_BQ]
    ids[:, stage.context_tokens :] = queries.reshape(B, 3 * Q)

    labels = np.full_like(ids, IGNORED)
    answer_columns = stage.context_tokens + 2 + 3 * np.arange(Q)
    labels[:, answer_columns] = ids[:, answer_columns]
    return Batch(ids=ids, labels=labels)


def _one_gap(
    is_pair_BU: npt.NDArray[np.bool_], filler: int, pairs: int, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Gather most filler around one pair, as the `records` probe does around the queried record."""
    out = np.empty_like(is_pair_BU)
    for row in range(len(out)):
        gathered = int(rng.integers(filler // 2, filler + 1))
        rest = np.array([True] * (pairs - 1) + [False] * (filler - gathered))
        rng.shuffle(rest)
        gap = np.zeros(gathered + 1, dtype=bool)
        gap[rng.integers(0, gathered + 1)] = True
        at = int(rng.integers(0, len(rest) + 1))
        out[row] = np.concatenate([rest[:at], gap, rest[at:]])
    return out
