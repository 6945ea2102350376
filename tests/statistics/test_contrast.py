from __future__ import annotations

import numpy as np
import pytest
from statsmodels.stats.contingency_tables import mcnemar

from isophase.statistics import (
    Observations,
    boundary_contrast,
    contrast_weights,
    mcnemar_p_value,
    mcnemar_pairs,
    residue_test,
    straddling_phases,
)
from isophase.statistics.contrast import _pair_columns


@pytest.mark.parametrize("stride", [2, 4, 8])
@pytest.mark.parametrize("span", [1, 2, 3, 4, 5, 8, 9])
def test_straddling_phases_by_definition(stride: int, span: int) -> None:
    expected = [phase for phase in range(stride) if (phase + span - 1) // stride > 0]
    assert straddling_phases(stride, span) == expected
    exists = 0 < len(expected) < stride
    assert (contrast_weights(stride, span) is not None) == exists


def test_pairs_take_the_nearest_neighbour_on_alternating_sides() -> None:
    bad = np.zeros(12, dtype=bool)
    bad[[3, 7, 11]] = True
    assert _pair_columns(bad, 0) == ([3, 7, 11], [2, 8, 10])
    assert _pair_columns(bad, 1) == ([3, 7, 11], [4, 6, 10])
    block = np.zeros(8, dtype=bool)
    block[3:6] = True
    columns, partners = _pair_columns(block, 0)
    assert columns == [3, 4, 5]
    assert partners == [2, 6, 1]
    crowded = np.ones(4, dtype=bool)
    crowded[2] = False
    assert _pair_columns(crowded, 0) == ([0], [2])


@pytest.mark.parametrize("stride", [4, 8])
def test_mcnemar_agrees_with_statsmodels(sim, stride: int) -> None:
    data = sim.draw(np.random.default_rng(1), 40, 24, sim.weak_residue(stride, stride - 1, 0.15))
    straddling, inside = (side.astype(int) for side in mcnemar_pairs(data, stride))
    assert len(straddling) == 40 * 24 // stride
    table = np.zeros((2, 2))
    np.add.at(table, (straddling, inside), 1)
    assert mcnemar_p_value(data, stride) == pytest.approx(mcnemar(table, exact=True).pvalue)


def test_mcnemar_without_discordant_pairs() -> None:
    data = Observations(np.ones((3, 8)), np.arange(8) + np.arange(3)[:, None], 2)
    assert mcnemar_p_value(data, 4) == 1.0
    assert mcnemar_p_value(Observations(data.outcomes, data.positions, 1), 4) == 1.0


def test_contrast_finds_one_dead_phase_in_128_with_12_items(sim) -> None:
    data = sim.draw(np.random.default_rng(2), 12, 128, sim.weak_residue(128, 127, 0.8))
    test = residue_test(data, 128, contrast=contrast_weights(128, 2), shifts=1999)
    assert test.p_values[0] > 0.05
    assert test.contrast_p_value is not None
    found = boundary_contrast(data, 128, test.contrast_p_value)
    assert found is not None
    assert found.p_value < 0.01
    assert found.difference_points == pytest.approx(100 * (found.straddling_accuracy - found.inside_accuracy))
    assert found.difference_points < -60
    straddles = data.positions % 128 == 127
    assert found.straddling_accuracy == pytest.approx(data.outcomes[straddles].mean())
    assert found.inside_accuracy == pytest.approx(data.outcomes[~straddles].mean())


def test_no_contrast_where_all_or_none_straddle(sim) -> None:
    data = sim.draw(np.random.default_rng(3), 5, 8, span=9)
    assert boundary_contrast(data, 8, 1.0) is None
