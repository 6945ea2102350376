"""What a memory costs, against a count by hand."""

from __future__ import annotations

import numpy as np
import pytest

from isophase.lab.sweep.memory_use import memory_use
from isophase.models.config import CompressedQwen3Config
from isophase.probes.prompt import Prompt


def prompt(ids: list[int]) -> Prompt:
    return Prompt(
        ids=np.array(ids, dtype=np.int32), answer_ids=(1,), item=0, column=0, position_tokens=0, span_tokens=1
    )


def test_full_attention_keeps_every_token() -> None:
    use = memory_use(CompressedQwen3Config(), [prompt([1] * 30), prompt([1] * 20)])
    assert (use.tokens_per_entry, use.exact_tokens) == (None, 25)


@pytest.mark.parametrize(("local_memory", "exact"), [("window", 5), ("tail", 6)])
def test_a_fixed_grid_has_one_entry_a_stride(local_memory: str, exact: int) -> None:
    settings = {"compression_window": 16, "compression_stride": 8, "local_window": 5, "local_memory": local_memory}
    use = memory_use(CompressedQwen3Config(**settings), [prompt([1] * 30)])
    assert (use.tokens_per_entry, use.exact_tokens) == (8, exact)
    # Of 30 tokens; a sink among the newest is not counted twice.
    for sinks, more in ((4, 4), (99, 30 - exact)):
        use = memory_use(CompressedQwen3Config(**settings, sink_tokens=sinks), [prompt([1] * 30)])
        assert (use.tokens_per_entry, use.exact_tokens) == (8, exact + more)


def test_staggered_heads_are_averaged() -> None:
    settings = {"compression_window": 8, "compression_stride": 8, "grid_shift": "heads", "chunk_groups": 2}
    use = memory_use(CompressedQwen3Config(num_key_value_heads=2, local_window=4, **settings), [prompt([1] * 30)])
    # Heads of one group close at 8, 16, 24; those of the other at 4, 12, 20, 28.
    assert use.tokens_per_entry == round((24 / 2 + 28 / 2) / (3 / 2 + 4 / 2), 3)


def test_content_keeps_what_no_entry_covers() -> None:
    ranks = [0, 1]
    settings = {"chunk_rule": "local_maximum", "chunk_score": "ranks", "chunk_ranks": ranks, "chunk_ties": False}
    config = CompressedQwen3Config(local_window=2, chunk_radius=2, chunk_max_tokens=10, **settings)
    ids = [0] * 7 + [1] + [0] * 8  # a chunk of 7 tokens; then 9 of which no entry knows
    use = memory_use(config, [prompt(ids)])
    assert (use.tokens_per_entry, use.exact_tokens) == (7, 9)
