"""Neighbours that cost least are merged, to the exact number of chunks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isophase.chunking import Chain, merge_neighbours


def cost(weights: list[float], lengths: list[int]) -> float:
    """Of a partition, from the definition."""
    total, first = 0.0, 0
    for length in lengths:
        total += sum(weights[first : first + length]) * (1 - 1 / length)
        first += length
    return total


def best(weights: list[float], chunks: int) -> float:
    """Least cost of so many chunks, by dynamic programming."""
    units = len(weights)
    least = np.full((chunks + 1, units + 1), np.inf)
    least[0, 0] = 0
    for number in range(1, chunks + 1):
        for end in range(1, units + 1):
            for first in range(end):
                length = end - first
                own = sum(weights[first:end]) * (1 - 1 / length)
                least[number, end] = min(least[number, end], least[number - 1, first] + own)
    return float(least[chunks, units])


def merged(weights: list[list[float]], chunks: int, most: int = 99) -> torch.Tensor:
    weight = torch.tensor(weights)
    chain = Chain(tokens_RU=torch.ones(weight.shape, dtype=torch.long), weight_RU=weight)
    return merge_neighbours(chain, torch.full((len(weight),), chunks), most_tokens=most)


@given(units=st.integers(1, 40), chunks=st.integers(1, 40), most=st.integers(2, 8), seed=st.integers(0, 99))
@settings(deadline=None)
def test_as_many_chunks_as_asked_rising_and_whole(units, chunks, most, seed) -> None:
    weight = torch.rand(3, units, generator=torch.Generator().manual_seed(seed))
    tokens = torch.ones(3, units, dtype=torch.long)
    tokens[1, : units // 3] = 0  # a shorter row, empty on the left
    tokens[2, units // 2 :] = 0  # and one on the right
    tokens[2, 0] = 1
    chain = Chain(tokens_RU=tokens, weight_RU=weight * (tokens > 0))
    group = merge_neighbours(chain, torch.tensor([chunks] * 3), most_tokens=most)
    for row in range(3):
        own = group[row][tokens[row] > 0]
        assert bool((group[row][tokens[row] == 0] == -1).all())
        number = min(chunks, len(own))
        assert own.unique().tolist() == list(range(number))
        assert set(own.diff().tolist()) <= {0, 1}
        if number * most >= 2 * len(own):  # twice the room: nobody is forced
            assert int(own.bincount().max()) <= most


def test_close_to_the_cheapest_partition() -> None:
    shares = []
    for seed in range(60):
        weights = (np.random.default_rng(seed).random(14) ** 3 * 5).tolist()
        shares.append(cost(weights, merged([weights], 6)[0].bincount().tolist()) / best(weights, 6))
    assert min(shares) >= 1 - 1e-5
    assert np.mean(shares) < 1.15
    assert max(shares) < 1.9


def test_heavy_units_stay_alone_and_rows_are_independent() -> None:
    light = [0.1] * 12
    heavy = [*light[:4], 50.0, *light[:3], 50.0, *light[:3]]
    both = merged([light, heavy], 5)
    assert both[1].bincount()[both[1][[4, 8]]].tolist() == [1, 1]
    assert torch.equal(both[0], merged([light], 5)[0])


def test_equal_weights_are_not_merged_one_a_round() -> None:
    assert merged([[1.0] * 4096], 1024)[0].max() == 1023


def test_merging_in_steps_keeps_the_sums() -> None:
    weight = torch.rand(1, 30, generator=torch.Generator().manual_seed(0))
    chain = Chain(tokens_RU=torch.ones(1, 30, dtype=torch.long), weight_RU=weight)
    group = merge_neighbours(chain, torch.tensor([12]))
    less = chain.summed(group, 12)
    assert int(less.tokens_RU.sum()) == 30
    torch.testing.assert_close(less.weight_RU.sum(), weight.sum())
    again = merge_neighbours(less, torch.tensor([5]))
    assert again.max() == 4
