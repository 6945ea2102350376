"""Is there a residue effect of period m: harmonics, Cochran's Q, and shift tests.

Legend: N items, P window columns, m period, c = floor(P / m) laps, k harmonic (1 <= k <= m / 2), B shifts.

    F_i(k) = sum_j y_ij exp(2 pi i k x_ij / m)
    R(k)   = |sum_i F_i(k)|^2
    z(k)   = R(k) / sum_i |F_i(k)|^2            weighted Rayleigh; about Exp(1), for k = m/2 about chi2(1)
    p(k)   = (1 + #{b : z_b(k) >= z(k)}) / (B + 1)
    T(k)   = 2 (m - 1) R(k) / (c^2 V)           half of that for k = m/2
    Q      = sum_k T(k)                         Cochran's Q (Parseval)

The null distribution comes from cyclic shifts: item i's window is moved by s_i ~ U{0..m-1}, which turns all
its harmonics at once, F_i(k) -> F_i(k) exp(2 pi i k s_i / m). Where window starts were drawn at random the
data and any shift of them are equally likely under the null, so p is exact whatever the trend along the
window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isophase.statistics.observations import FloatArray, Observations, as_float_array

ComplexArray = NDArray[np.complex128]

# Shifted totals held at once; keeps memory near 8 MiB per array whatever B and m are.
_CHUNK_ELEMENTS = 1 << 20
# Shifts that repeat the data must count as ties in spite of rounding; relative to the sum of squares.
TIE_TOLERANCE = 1e-10


@dataclass(frozen=True, eq=False)
class ResidueTest:
    """Tests of one period. Arrays run over harmonics k = 1..floor(m / 2).

    Attributes:
        period_tokens: m.
        power: R(k).
        scatter: sum_i |F_i(k)|^2, the mean of R(k) over shifts.
        z: R(k) / scatter.
        p_values: shift p-value of each harmonic.
        t: share of each harmonic in Q.
        q: Cochran's Q of the lap means.
        q_p_value: shift p-value of Q.
        contrast_p_value: two-sided shift p-value of the contrast that was asked for, or None.
    """

    period_tokens: int
    power: FloatArray
    scatter: FloatArray
    z: FloatArray
    p_values: FloatArray
    t: FloatArray
    q: float
    q_p_value: float
    contrast_p_value: float | None


def harmonic_sums(observations: Observations, period_tokens: int) -> ComplexArray:
    """F_i(k) of every item, over the whole laps of the window.

    Args:
        observations: complete items.
        period_tokens: m, 2 to P.

    Returns:
        [N, floor(m / 2)]; column k - 1 is harmonic k; the last one is real if m is even.
    """
    laps = observations.laps_for(period_tokens)
    # rfft has exp(-2 pi i ...); outcomes are real, so the conjugate has the sign of the definition.
    lines: ComplexArray = np.fft.rfft(observations.lap_means(period_tokens), axis=1)[:, 1:]
    sums: ComplexArray = laps * lines.conj()
    return sums


def rayleigh(sums: ComplexArray) -> FloatArray:
    """Weighted Rayleigh statistic z(k) = |sum_i F_i|^2 / sum_i |F_i|^2.

    Args:
        sums: [N, K] harmonic sums F_i(k).

    Returns:
        [K]; 0 where no item varies. At most N.
    """
    power = np.abs(sums.sum(axis=0)) ** 2
    scatter = (np.abs(sums) ** 2).sum(axis=0)
    return as_float_array(np.divide(power, scatter, out=np.zeros_like(power), where=scatter > 1e-20))


def within_item_sum(lap_means: FloatArray) -> float:
    """V = m sum_i sum_r (y_ir - ybar_i)^2; for outcomes 0 and 1 this is sum_i s_i (m - s_i)."""
    centred = lap_means - lap_means.mean(axis=1, keepdims=True)
    return float(lap_means.shape[1] * (centred**2).sum())


def cochran_q(lap_means: FloatArray) -> float:
    """Cochran's Q (Cochran 1950) of items by residues.

    For outcomes 0 and 1 and one lap this is the textbook statistic. For several laps, or for real scores, the
    same formula is applied to the lap means with V as in `within_item_sum` (Friedman's form without ranks);
    its p-value comes from shifts and needs no chi-square.

    Args:
        lap_means: [N, m] mean outcome by item and residue.

    Returns:
        Q; 0 where no item varies.
    """
    total = within_item_sum(lap_means)
    if total <= 1e-20:
        return 0.0
    periods = lap_means.shape[1]
    columns = lap_means.sum(axis=0)
    spread = periods * ((columns - columns.mean()) ** 2).sum()
    return float((periods - 1) * spread / total)


def harmonic_shares(lap_means: FloatArray) -> FloatArray:
    """T(k), k = 1..floor(m / 2), whose sum is Cochran's Q.

    Args:
        lap_means: [N, m] mean outcome by item and residue.

    Returns:
        [floor(m / 2)].
    """
    period = lap_means.shape[1]
    power = np.abs(np.fft.rfft(lap_means.sum(axis=0)))[1:] ** 2
    total = within_item_sum(lap_means)
    if total <= 1e-20:
        return np.zeros_like(power)
    # Harmonics k and m - k are mirror images, so each counts twice, but for the one in the middle.
    twice = np.full(len(power), 2.0)
    if period % 2 == 0:
        twice[-1] = 1.0
    return as_float_array(twice * (period - 1) * power / total)


def shifted_totals(lap_means: FloatArray, shifts: int, rng: np.random.Generator) -> Iterator[FloatArray]:
    """Column totals after random cyclic shifts of each item, in chunks of shifts.

    Args:
        lap_means: [N, m] mean outcome by item and residue.
        shifts: B, how many joint shifts to draw.
        rng: source of the shifts.

    Yields:
        [b, m] totals over items; the chunk lengths b sum to B.
    """
    items, period = lap_means.shape
    doubled = np.concatenate([lap_means, lap_means], axis=1)
    rows = max(1, min(shifts, _CHUNK_ELEMENTS // max(period, items)))
    for first in range(0, shifts, rows):
        count = min(rows, shifts - first)
        starts = rng.integers(0, period, size=(items, count))
        totals = np.zeros((count, period))
        for item in range(items):
            # Row s of this view is the item's curve read from residue s on: a cyclic shift without a copy.
            turned = np.lib.stride_tricks.sliding_window_view(doubled[item], period)
            totals += turned[starts[item]]
        yield totals


def residue_test(
    observations: Observations,
    period_tokens: int,
    *,
    contrast: FloatArray | None = None,
    shifts: int = 9999,
    seed: int = 0,
) -> ResidueTest:
    """Test all harmonics of a period, Cochran's Q and one contrast against the same cyclic shifts.

    Args:
        observations: complete items, window starts drawn at random.
        period_tokens: m, 2 to P.
        contrast: [m] weights that sum to 0; the statistic is |sum_ir w_r y_ir|. None: no contrast.
        shifts: B, at least 1.
        seed: of the shifts.

    Returns:
        Statistics and p-values; p is at least 1 / (B + 1).

    Raises:
        ValueError: the period does not fit, there is no item, or shifts is below 1.
    """
    if shifts < 1:
        raise ValueError(f"shifts is {shifts}, it must be at least 1")
    if observations.items < 1:
        raise ValueError("no complete item to test")
    laps = observations.laps_for(period_tokens)
    lap_means = observations.lap_means(period_tokens)
    # Item means say nothing about residues; without them constant items are exact zeros.
    lap_means = lap_means - lap_means.mean(axis=1, keepdims=True)
    energy = float((lap_means**2).sum())
    tolerance = TIE_TOLERANCE * energy * period_tokens

    def power_of(totals: FloatArray) -> FloatArray:
        return np.abs(np.fft.rfft(totals, axis=-1))[..., 1:] ** 2

    observed = lap_means.sum(axis=0)
    power, spread = power_of(observed), float((observed**2).sum())
    leaning = 0.0 if contrast is None else abs(float(observed @ contrast))
    power_hits = np.zeros(len(power), dtype=np.int64)
    spread_hits = contrast_hits = 0
    for totals in shifted_totals(lap_means, shifts, np.random.default_rng([seed, 1])):
        power_hits += (power_of(totals) >= power - tolerance).sum(axis=0)
        spread_hits += int(((totals**2).sum(axis=1) >= spread - tolerance).sum())
        if contrast is not None:
            slack = TIE_TOLERANCE * np.sqrt(energy)
            contrast_hits += int((np.abs(totals @ contrast) >= leaning - slack).sum())

    scatter = power_of(lap_means).sum(axis=0)
    return ResidueTest(
        period_tokens=period_tokens,
        power=laps**2 * power,
        scatter=laps**2 * scatter,
        z=np.divide(power, scatter, out=np.zeros_like(power), where=scatter > tolerance),
        p_values=(1 + power_hits) / (shifts + 1),
        t=harmonic_shares(lap_means),
        q=cochran_q(lap_means),
        q_p_value=(1 + spread_hits) / (shifts + 1),
        contrast_p_value=None if contrast is None else (1 + contrast_hits) / (shifts + 1),
    )
