"""Where the window of target positions of each item starts.

Every item sweeps `window_tokens` neighbouring positions, so it meets each residue once. What is left to
choose is the start. A start drawn uniformly over residues makes the random-shift test exact and gives
every residue the same mean position, but not the same spread: residue r is then reached from two places
`window_tokens` apart with odds that depend on r, and a depth trend leaks into the residues' variances.
`window_starts` dithers the start so that mean and variance of the position are equal for all residues.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isophase.errors import IsophaseError

_STREAM = 0
"""Keeps these draws apart from the ones that probes make with the same seed."""


def window_starts(
    items: int, window_tokens: int, earliest_tokens: int, latest_tokens: int, seed: int
) -> npt.NDArray[np.int64]:
    """Draw the first target position of every item, position moments matched over residues.

    With m = `window_tokens`, item i starts at `base_i + a_i - b_i`, where `a_i = (u_i + b_i) mod m` and
    `base_i` is a multiple of m, so the start has residue `u_i` and lies in `base_i - (m-1) .. base_i + m-1`
    (the difference of two uniforms, hence the triangular name of this dither). Every block of m items
    holds each `u` once; every m blocks hold each pair `(u, b)` once. Then, with base constant, the
    position at each residue has mean `base + (m-1)/2` and variance `(m^2-1)/4` over m*m items. The means
    stay equal for any bases and any multiple of m items.

    Args:
        items: number of items, >= 1.
        window_tokens: positions per item (m), >= 1.
        earliest_tokens: smallest position that a target may take, >= 0.
        latest_tokens: largest position that a target may take.
        seed: >= 0.

    Returns:
        int64 [items], start x_i; item i uses positions `x_i .. x_i + m - 1`, all in the given range.

    Raises:
        IsophaseError: no multiple of m leaves room for the dithered window.
    """
    m = window_tokens
    lowest = -(-(earliest_tokens + m - 1) // m)
    highest = (latest_tokens - 2 * (m - 1)) // m
    if highest < lowest:
        room = max(0, latest_tokens - earliest_tokens + 1)
        raise IsophaseError(
            f"No room for the target window: {m} positions need {4 * m - 3} tokens to move in, and {room} are free.",
            "Raise --length, or lower --window or --records.",
        )
    rng = np.random.default_rng([seed, _STREAM, 0, 0])
    blocks = -(-items // m)
    residue = np.concatenate([rng.permutation(m) for _ in range(blocks)])[:items]
    # Latin square: within a block, b is a permutation of u; from block to block it shifts, so that
    # m blocks visit every pair. Rows of the square come in a fresh random order for every m blocks.
    shift = np.concatenate([rng.permutation(m) for _ in range(-(-blocks // m))])[:blocks]
    relabel = rng.permutation(m)
    block = np.arange(items) // m
    dither = (relabel[residue] + shift[block]) % m
    base = m * rng.integers(lowest, highest + 1, size=items)
    starts: npt.NDArray[np.int64] = base + (residue + dither) % m - dither
    return starts
