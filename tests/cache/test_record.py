"""One reading compressed by many methods equals one reading for each."""

from __future__ import annotations

import pytest
import torch

from isophase.cache import (
    ChunkKV,
    DynamicChunkKV,
    Full,
    MergedChunks,
    Record,
    SnapKV,
    StreamingLLM,
    VotedChunkKV,
    compress,
    compressed,
)
from isophase.models.compat import cache_argument

METHODS = [
    Full(), StreamingLLM(budget=20), SnapKV(budget=20, window_tokens=6), ChunkKV(budget=20, window_tokens=6),
    ChunkKV(budget=20, window_tokens=6, reuse_layers=2), VotedChunkKV(budget=20, window_tokens=6),
    DynamicChunkKV(budget=20, window_tokens=6), MergedChunks(budget=20, window_tokens=6),
    SnapKV(budget=20, window_tokens=6, every_tokens=2), SnapKV(budget=200),
    ChunkKV(budget=((20, 11),), window_tokens=6), DynamicChunkKV(budget=((9, 20),), window_tokens=6, every_tokens=2),
]  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_equals_reading_again(family, padded, make_model, random_ids) -> None:
    model, ids, new = make_model(family), random_ids(60, rows=2), random_ids(6, rows=2, seed=4)
    mask = torch.ones(2, 66, dtype=torch.long)
    mask[0, :13] = 0 if padded else 1
    recorded = compress(model, Record())
    with torch.no_grad():
        model(ids, attention_mask=mask[:, :60], **cache_argument(recorded))
        for method in METHODS:
            if family == "gemma3" and isinstance(method, MergedChunks):
                continue
            direct = compress(model, method)
            model(ids, attention_mask=mask[:, :60], **cache_argument(direct))
            copy = compressed(model, recorded, method)
            assert copy.get_seq_length() == 60
            for step in range(60, 66):
                want, got = (
                    model(new[:, step - 60 : step - 59], attention_mask=mask[:, : step + 1], **cache_argument(c)).logits
                    for c in (direct, copy)
                )
                assert torch.equal(want, got)
            copy.close()
            direct.close()
    assert recorded.get_seq_length() == 60


def test_what_was_not_recorded(make_model, random_ids) -> None:
    model = make_model("llama")
    plain = compress(model, Full())
    with pytest.raises(ValueError, match="did not record"):
        compressed(model, plain, ChunkKV(budget=20))
    recorded = compress(model, Record(window_tokens=8))
    with torch.no_grad():
        model(random_ids(40), **cache_argument(recorded))
    with pytest.raises(ValueError, match=r"8 queries were recorded.*Record\(window_tokens=16\)"):
        compressed(model, recorded, ChunkKV(budget=20))
