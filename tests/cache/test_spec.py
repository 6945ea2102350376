"""Methods written as text."""

from __future__ import annotations

import pytest
import torch

from isophase.cache import (
    ChunkKV,
    DynamicChunkKV,
    Full,
    MergedChunks,
    SnapKV,
    StreamingLLM,
    VotedChunkKV,
    hash_rule,
)
from isophase.cache.spec import parse_method
from isophase.errors import IsophaseError

WORDS = ["a", "b.", "c", "\n", "d,", 'e!"', "f", "g", "h", "i"]


def parse(spec: str):
    return parse_method(spec, lambda ids: "".join(WORDS[i] for i in ids), len(WORDS))


@pytest.mark.parametrize(
    ("spec", "method"),
    [
        ("full", Full()),
        ("full()", Full()),
        ("chunkkv(budget=128, chunk_tokens=10)", ChunkKV(budget=128, chunk_tokens=10)),
        ("chunkkv(ratio=.1,reuse_layers=2, share_heads=True)", ChunkKV(ratio=0.1, reuse_layers=2, share_heads=True)),
        (" snapkv( budget=(64, 32), pooling=max )", SnapKV(budget=(64, 32), pooling="max")),
        ("chunkkv(budget=((64, 32), (32, 64)))", ChunkKV(budget=((64, 32), (32, 64)))),
        ("chunkkv(budget=((64, 32),))", ChunkKV(budget=((64, 32),))),
        ("snapkv(budget_bytes=1000000, pooling='max')", SnapKV(budget_bytes=1_000_000, pooling="max")),
        ("streaming(budget=64, sink_tokens=2)", StreamingLLM(budget=64, sink_tokens=2)),
        ("voted(budget=64, votes=None)", VotedChunkKV(budget=64)),
        ("merged(budget=64, merged_share=0)", MergedChunks(budget=64, merged_share=0)),
        ("dynamic(budget=64, rule=hash, radius_tokens=3)", DynamicChunkKV(budget=64, rule=hash_rule(radius_tokens=3))),
    ],
)
def test_reads(spec, method) -> None:
    assert parse(spec) == method


def test_delimiters_end_their_chunks() -> None:
    method = parse("dynamic(budget=64, radius_tokens=1, max_tokens=8)")
    assert isinstance(method, DynamicChunkKV)
    ids = torch.tensor([[0, 2, 1, 6, 7, 4, 8, 9, 3, 0, 2, 6, 5, 7, 8, 9]])
    flags, _ = method.rule.starts(ids)
    shift = method.rule.lookahead_tokens
    starts = [t - shift for t in flags[0].nonzero()[:, 0].tolist()]
    # After "b.", "d,", the line end and 'e!"'.
    assert starts == [3, 6, 9, 13]


@pytest.mark.parametrize(("tokens", "cut"), [(47, False), (60, True)])
def test_long_sentences_stay_whole_up_to_48_tokens(tokens, cut) -> None:
    method = parse("dynamic(budget=64)")
    assert isinstance(method, DynamicChunkKV)
    ids = torch.tensor([[0] * 9 + [1] + [0] * (tokens - 1) + [1] + [0] * 9])
    flags, _ = method.rule.starts(ids)
    starts = [t - method.rule.lookahead_tokens for t in flags[0].nonzero()[:, 0].tolist()]
    assert starts[:2] == ([10, 58] if cut else [10, 10 + tokens])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "cannot read the cache method ''. Write it like chunkkv("),
        ("chunkkv(128)", "cannot read"),
        ("chunkkv(budget=", "cannot read"),
        ("chunkkv(**{})", "cannot read"),
        ("chunkkv(budget=__import__('os'))", "cannot read"),
        ("a.b(budget=1)", "cannot read"),
        ("h2o(budget=64)", "cache method 'h2o' is unknown. Give one of full, streaming, snapkv,"),
        ("chunkkv(budgets=64)", "chunkkv has no setting 'budgets'. It has budget, ratio,"),
        ("chunkkv(budget='many')", "budget of \"chunkkv(budget='many')\" is 'many'."),
        ("chunkkv(budget=64.5)", "is 64.5."),
        ("chunkkv(budget=((64, 32), 64))", "is ((64, 32), 64)."),
        ("chunkkv(budget=((64, 32), ()))", "is ((64, 32), ())."),
        ("chunkkv(budget=True)", "is True."),
        ("chunkkv(budget=64, chunk_tokens=None)", "is None."),
        ("chunkkv(budget=64, share_heads=1)", "is 1."),
        ("chunkkv(budget=8)", "budget 8 is below the window of 16 tokens"),
        ("chunkkv", "exactly one"),
        ("dynamic(budget=64, rule=verses)", "rule 'verses' of"),
        ("dynamic(budget=64, radius_tokens=0)", "radius 0 must be at least 1"),
        ("dynamic(budget=64, radius=2)", "no setting 'radius'"),
    ],
)
def test_refuses(spec, words) -> None:
    with pytest.raises(IsophaseError) as caught:
        parse(spec)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
