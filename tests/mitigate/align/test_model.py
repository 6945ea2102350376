"""Alignment on a bundled model: no phase is worse than another, and it costs hardly a token."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from align import measure


@pytest.mark.slow
def test_no_phase_is_weak_any_more():
    found = measure("w8s8", items=24)
    assert found["gap_points_before"] > 25
    assert found["gap_points_after"] <= 5
    assert 0 < found["added_percent"] < 15
