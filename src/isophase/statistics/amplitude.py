"""How large is harmonic 1: amplitude, debiased amplitude and its upper limit.

    A      = 2 sqrt(R(1)) / n                half peak to trough, n = prompts in the window's whole laps
    A_db^2 = max(0, A^2 - 4 v / n)
    n A^2 / (2 v)  is about noncentral chi-square with 2 degrees, lambda = n (true A)^2 / (2 v)

Period 2 is its own mirror image: F(1) is real, half of its power is not shared with a second component, and
a swing of +-A gives F = n A. Hence A = sqrt(R) / n, bias v / n, and n A^2 / v with one degree of freedom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.optimize import brentq
from scipy.special import chndtr

from isophase.statistics.harmonics import harmonic_sums
from isophase.statistics.observations import Observations


@dataclass(frozen=True)
class Amplitude:
    """Effect size of harmonic 1.

    Attributes:
        period_tokens: m.
        amplitude: A, half peak to trough, in outcome units.
        debiased: A less what noise alone adds.
        upper: 95 % upper limit.
        phase_radians: phi of the fit mean + A cos(2 pi r / m - phi).
        variance: v, variance of one outcome around its item's mean.
        noise_variance: variance that debiased and upper rest on, at least v (see `estimate_amplitude`).
        prompts: n.
        degrees: 2, or 1 for period 2.
    """

    period_tokens: int
    amplitude: float
    debiased: float
    upper: float
    phase_radians: float
    variance: float
    noise_variance: float
    prompts: int
    degrees: int


def degrees_of(period_tokens: int) -> int:
    """Degrees of freedom of harmonic 1: 1 for period 2, else 2."""
    return 1 if period_tokens == 2 else 2


def harmonic_amplitude(power: float, prompts: int, degrees: int = 2) -> float:
    """Half peak to trough of a harmonic from its power R."""
    return degrees * math.sqrt(power) / prompts


def debiased_amplitude(amplitude: float, variance: float, prompts: int, degrees: int = 2) -> float:
    """Take off what noise of variance v adds to A^2 on average: 4 v / n (period 2: v / n)."""
    return math.sqrt(max(0.0, amplitude**2 - degrees**2 * variance / prompts))


def noncentrality_upper(statistic: float, degrees: int = 2, confidence: float = 0.95) -> float:
    """Largest lambda under which a noncentral chi-square as small as this one is not yet unusual.

    A statistic below the central median is raised to it: noise that happens to cancel must not promise more
    than a typical null run of this size can (power-constrained limit, Cowan, Cranmer, Gross & Vitells 2011).
    The limit still covers at least `confidence`.

    Args:
        statistic: observed chi-square value, at least 0.
        degrees: 1 or 2.
        confidence: one-sided coverage.

    Returns:
        lambda with P(X <= statistic) = 1 - confidence.
    """
    value = max(statistic, float(stats.chi2.median(degrees)))
    if value > 1e4:  # the series behind chndtr gets slow; sqrt(X) is normal here
        return float((math.sqrt(value) + stats.norm.ppf(confidence)) ** 2)
    high = (math.sqrt(value) + 6.0) ** 2
    return float(brentq(lambda lam: chndtr(value, degrees, lam) - (1 - confidence), 0.0, high))


def amplitude_upper(
    amplitude: float, variance: float, prompts: int, degrees: int = 2, confidence: float = 0.95
) -> float:
    """Upper confidence limit of the amplitude.

    Args:
        amplitude: A.
        variance: v, at least 0.
        prompts: n.
        degrees: 2, or 1 for period 2.
        confidence: one-sided coverage.

    Returns:
        Limit in outcome units; 0 where v is 0 (see `constant_upper` for what such data can still hide).
    """
    if variance <= 0:
        return 0.0
    scale = degrees * variance / prompts
    return math.sqrt(scale * noncentrality_upper(amplitude**2 / scale, degrees, confidence))


def constant_upper(prompts: int, confidence: float = 0.95) -> float:
    """Upper limit of the amplitude when no outcome ever differed from its item's others.

    An accuracy can swing by +-A only if outcomes miss their item's usual value at a mean rate of at least A;
    zero misses in n prompts bound that rate by 1 - (1 - confidence)^(1 / n), about 3 / n (rule of three).

    Args:
        prompts: n, at least 1.
        confidence: one-sided coverage.

    Returns:
        Limit in accuracy units.
    """
    return float(1.0 - (1.0 - confidence) ** (1.0 / prompts))


def estimate_amplitude(observations: Observations, period_tokens: int) -> Amplitude:
    """Effect size of harmonic 1 of a period.

    v assumes noise of equal power at all harmonics. Smooth item curves put more of it at long periods, so
    `debiased` and `upper` use the larger of v and the sample variance of the items' own F_i(1); both have the
    same mean under white noise. For outcomes 0 and 1, v is not taken below that of a rate of 3 / n: a single
    miss among hundreds of hits does not tell a variance. Without any miss the limit is `constant_upper`.

    Args:
        observations: complete items, at least one.
        period_tokens: m, 2 to P.

    Returns:
        Amplitude, limits and phase of the fit.
    """
    window = observations.window_for(period_tokens)
    items, columns = window.outcomes.shape
    prompts = items * columns
    degrees = degrees_of(period_tokens)
    sums = harmonic_sums(window, period_tokens)[:, 0]
    centred = window.outcomes - window.outcomes.mean(axis=1, keepdims=True)
    squares = float((centred**2).sum())
    if squares <= 1e-20 * prompts:
        limit = constant_upper(prompts) if window.binary else 0.0
        return Amplitude(period_tokens, 0.0, 0.0, limit, 0.0, 0.0, 0.0, prompts, degrees)
    variance = squares / (items * (columns - 1))
    total = complex(sums.sum())
    noise = variance
    if items > 1:
        spread = float((np.abs(sums) ** 2).sum()) - abs(total) ** 2 / items
        noise = max(noise, spread / ((items - 1) * columns))
    if window.binary:
        rate = constant_upper(prompts)
        noise = max(noise, rate * (1.0 - rate))
    amplitude = harmonic_amplitude(abs(total) ** 2, prompts, degrees)
    return Amplitude(
        period_tokens=period_tokens,
        amplitude=amplitude,
        debiased=debiased_amplitude(amplitude, noise, prompts, degrees),
        upper=amplitude_upper(amplitude, noise, prompts, degrees),
        phase_radians=float(np.angle(total)),
        variance=variance,
        noise_variance=noise,
        prompts=prompts,
        degrees=degrees,
    )
