"""Training sequences: what the context says is what the answers are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from isophase.lab.train.tasks.lookup import IGNORED, LookupStage, lookup_batch
from isophase.probes.pairs import ASK_ID, FILLER_IDS, KEY_IDS, VALUE_IDS

KEYS, VALUES, FILLER = (set(ids.tolist()) for ids in (KEY_IDS, VALUE_IDS, FILLER_IDS))


@st.composite
def stages(draw: st.DrawFn) -> LookupStage:
    pairs = draw(st.integers(1, 20))
    return LookupStage(
        context_tokens=2 * pairs + 7 + draw(st.integers(0, 60)),
        pairs=pairs,
        queries=draw(st.integers(1, pairs)),
        batch=draw(st.integers(1, 6)),
        steps=1,
        alone=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )


def pairs_of(context: list[int]) -> dict[int, int]:
    """Read a context token by token; anything that is no pair must be filler."""
    found: dict[int, int] = {}
    place = 0
    while place < len(context):
        if context[place] in KEYS:
            assert context[place + 1] in VALUES
            assert context[place] not in found
            found[context[place]] = context[place + 1]
            place += 2
        else:
            assert context[place] in FILLER
            place += 1
    return found


@settings(max_examples=150, deadline=None)
@given(stages(), st.integers(0, 2**32))
def test_every_answer_stands_in_the_context(stage: LookupStage, seed: int) -> None:
    batch = lookup_batch(stage, np.random.default_rng(seed))
    shape = (stage.batch, stage.context_tokens + 3 * stage.queries)
    assert batch.ids.shape == batch.labels.shape == shape
    assert batch.ids.dtype == batch.labels.dtype == np.int64
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
        pairs = pairs_of(ids[: stage.context_tokens])
        assert len(pairs) == stage.pairs
        asked = []
        for n in range(stage.queries):
            start = stage.context_tokens + 3 * n
            mark, key, value = ids[start : start + 3]
            assert mark == ASK_ID
            assert pairs[key] == value
            assert labels[start : start + 3] == [IGNORED, IGNORED, value]
            asked.append(key)
        assert len(set(asked)) == stage.queries
        assert labels[: stage.context_tokens] == [IGNORED] * stage.context_tokens


@given(stages(), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_the_seed_decides_everything(stage: LookupStage, seed: int) -> None:
    one, same = (lookup_batch(stage, np.random.default_rng(seed)) for _ in range(2))
    assert one.ids.tobytes() == same.ids.tobytes()
    assert one.labels.tobytes() == same.labels.tobytes()
    rng = np.random.default_rng(seed)
    lookup_batch(stage, rng)
    assert lookup_batch(stage, rng).ids.tobytes() != one.ids.tobytes()


def test_every_phase_is_trained_equally() -> None:
    """Whatever phases the order of pairs and filler prefers, the lead evens them out, for every divisor."""
    for alone in (0.0, 0.5, 1.0):
        stage = LookupStage(context_tokens=112, pairs=24, queries=16, batch=3000, steps=1, alone=alone, lead=24)
        ids = lookup_batch(stage, np.random.default_rng(1)).ids[:, : stage.context_tokens]
        positions = np.nonzero(np.isin(ids, KEY_IDS))[1]
        for stride in (4, 6, 8, 12):
            share = np.bincount(positions % stride, minlength=stride) / len(positions)
            # Standard error of a share, pairs of a sequence counted as one: about 0.006 at most.
            assert np.abs(share - 1 / stride).max() < 0.025


def test_alone_puts_a_pair_into_a_wide_gap() -> None:
    def widest(alone: float) -> float:
        stage = LookupStage(context_tokens=112, pairs=24, queries=16, batch=200, steps=1, alone=alone)
        ids = lookup_batch(stage, np.random.default_rng(1)).ids[:, : stage.context_tokens]
        gaps = []
        for row in np.isin(ids, KEY_IDS):
            starts = np.flatnonzero(row)
            # Filler on both sides of a pair together.
            edges = np.concatenate([[-2], starts, [stage.context_tokens]])
            gaps.append((edges[2:] - edges[:-2] - 4).max())
        return float(np.mean(gaps))

    assert widest(1.0) > 40 > widest(0.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pairs": 7}, ["7 pairs", "16 context tokens"]),
        ({"queries": 4}, ["4 queries", "3 pairs"]),
        ({"context_tokens": 200, "pairs": 65, "queries": 1}, ["65 pairs", "64"]),
        ({"alone": 1.5}, ["less than or equal to 1"]),
        ({"batch": 0}, ["greater than 0"]),
        ({"pair": 3}, ["Extra inputs"]),
    ],
)
def test_impossible_stages_are_refused(changes: dict[str, float], words: list[str]) -> None:
    settings = {"context_tokens": 16, "pairs": 3, "queries": 2, "batch": 2, "steps": 1}
    with pytest.raises(ValidationError) as caught:
        LookupStage.model_validate({**settings, **changes})
    assert all(word in str(caught.value) for word in words)
