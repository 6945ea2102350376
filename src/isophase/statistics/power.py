"""How many prompts an answer takes: lambda* = n A^2 / (2 v).

For 90 % power at 5 % lambda* is 12.65 (80 %: 9.63), hence n = 2 v lambda* / A^2. Two corrections, both off by
default, make the published figure honest for a given plan: `tests` divides the level (Bonferroni bounds Holm
and min-P), and `window_tokens` allows for the Rayleigh statistic z = R / sum |F_i|^2, whose denominator grows
with the effect itself, by the factor 1 + P A^2 / (4 v); it matters when one window holds much of the signal.
"""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import chndtr
from scipy.stats import chi2

from isophase.statistics.amplitude import noncentrality_upper

_MOST_PROMPTS = 10**9


def _detection(lam: float, threshold: float, degrees: int) -> float:
    return 1.0 - float(chndtr(threshold, degrees, lam))


def _threshold(alpha: float, tests: int, degrees: int, inflation: float = 1.0) -> float:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}, it must lie between 0 and 1")
    if tests < 1:
        raise ValueError(f"tests is {tests}, it must be at least 1")
    return float(chi2.isf(alpha / tests, degrees)) * inflation


def _solve(power: float, threshold: float, degrees: int) -> float:
    if not 0 < power < 1:
        raise ValueError(f"power is {power}, it must lie between 0 and 1")
    if _detection(0.0, threshold, degrees) >= power:
        return 0.0
    high = (math.sqrt(threshold) + 10.0) ** 2
    return float(brentq(lambda lam: _detection(lam, threshold, degrees) - power, 0.0, high))


def _inflation(amplitude: float, v: float, window_tokens: int | None, degrees: int) -> float:
    if window_tokens is None:
        return 1.0
    return 1.0 + window_tokens * amplitude**2 / (degrees**2 * v)


def noncentrality(power: float = 0.9, alpha: float = 0.05, degrees: int = 2) -> float:
    """Noncentrality lambda* at which a chi-square test at level alpha has this power.

    Args:
        power: 0..1, exclusive.
        alpha: level of the test.
        degrees: degrees of freedom; 1 for period 2.

    Returns:
        lambda*: 12.65 for 90 % at 5 % with two degrees, 9.63 for 80 %.
    """
    return _solve(power, _threshold(alpha, 1, degrees), degrees)


def prompts_needed(
    v: float,
    amplitude: float,
    power: float = 0.9,
    *,
    alpha: float = 0.05,
    tests: int = 1,
    window_tokens: int | None = None,
    degrees: int = 2,
) -> int:
    """Prompts that find a swing of +-amplitude.

    Args:
        v: variance of one outcome around its item's mean, accuracy * (1 - accuracy) at most.
        amplitude: half peak to trough, above 0.
        power: chance to find it.
        alpha: family-wise level.
        tests: tests that share the level: 1 as published, 3 for a known stride, the periods of a scan.
        window_tokens: P, to allow for the effect in the denominator of z; None leaves it out.
        degrees: 2, or 1 for period 2.

    Returns:
        n = degrees * v * lambda* / A^2, rounded to the nearest prompt; at least 1.

    Raises:
        ValueError: v or amplitude is not above 0, or a level is out of range.
    """
    if v <= 0 or amplitude <= 0:
        raise ValueError(f"v and amplitude must be above 0, got {v} and {amplitude}")
    threshold = _threshold(alpha, tests, degrees, _inflation(amplitude, v, window_tokens, degrees))
    return max(1, round(degrees * v * _solve(power, threshold, degrees) / amplitude**2))


def predicted_power(
    prompts: int,
    v: float,
    amplitude: float,
    *,
    alpha: float = 0.05,
    tests: int = 1,
    window_tokens: int | None = None,
    degrees: int = 2,
) -> float:
    """Chance that n prompts find a swing of +-amplitude. Arguments as in `prompts_needed`.

    Returns:
        Power, 0..1.
    """
    if v <= 0 or prompts < 1:
        raise ValueError(f"v must be above 0 and prompts at least 1, got {v} and {prompts}")
    threshold = _threshold(alpha, tests, degrees, _inflation(amplitude, v, window_tokens, degrees))
    return _detection(prompts * amplitude**2 / (degrees * v), threshold, degrees)


def detectable_amplitude(
    prompts: int,
    v: float,
    power: float = 0.9,
    *,
    alpha: float = 0.05,
    tests: int = 1,
    window_tokens: int | None = None,
    degrees: int = 2,
) -> float:
    """Smallest swing that n prompts find with this power. Arguments as in `prompts_needed`.

    Returns:
        Half peak to trough; inf where no swing suffices (too few windows for the statistic to be large).
    """
    if v <= 0 or prompts < 1:
        raise ValueError(f"v must be above 0 and prompts at least 1, got {v} and {prompts}")
    if window_tokens is None:
        lam = _solve(power, _threshold(alpha, tests, degrees), degrees)
        return math.sqrt(degrees * v * lam / prompts)

    def lacking(amplitude: float) -> float:
        return power - predicted_power(
            prompts, v, amplitude, alpha=alpha, tests=tests, window_tokens=window_tokens, degrees=degrees
        )

    low = detectable_amplitude(prompts, v, power, alpha=alpha, tests=tests, degrees=degrees)
    high = low
    while lacking(high) > 0:
        high *= 2
        if high > 1e6:
            return math.inf
    return float(brentq(lacking, low / 2, high)) if high > low else low


def prompts_to_bound(v: float, margin: float, amplitude: float = 0.0, degrees: int = 2) -> int | None:
    """Prompts after which the 95 % upper limit should lie below the margin.

    Args:
        v: noise variance of one outcome.
        margin: amplitude that must be excluded.
        amplitude: the debiased amplitude so far, taken as the truth.
        degrees: 2, or 1 for period 2.

    Returns:
        n; None where the amplitude is too close to the margin for any feasible number.
    """
    if v <= 0 or margin <= 0:
        raise ValueError(f"v and margin must be above 0, got {v} and {margin}")
    median = float(chi2.median(degrees))

    def excess(log_prompts: float) -> float:
        scale = degrees * v / math.exp(log_prompts)
        return math.sqrt(scale * noncentrality_upper(median + amplitude**2 / scale, degrees)) - margin

    high = math.log(_MOST_PROMPTS)
    if excess(high) >= 0:
        return None
    if excess(0.0) <= 0:
        return 1
    return math.ceil(math.exp(float(brentq(excess, 0.0, high))))
