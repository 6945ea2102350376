"""Moving a fact by exactly one stride leaves its phase, and should leave its answer: any target that does a task."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from isophase.errors import IsophaseError
from isophase.probes import ProbeSettings, build_probe
from isophase.targets.base import Target
from isophase.targets.invariants.outcome import Case, InvariantOutcome, NotTestableError, judge

NAME = "shift by one stride"
_ITEMS, _RECORDS = 6, 4
_MOST_STRIDE = 32
# Ratio of differences one stride apart to those one token more or less apart: 1 without any phase effect.
_LIMIT = 1.5
_NEGLIGIBLE = 0.02

_EXPLANATION = (
    "Answers one whole stride apart differ more than answers one token more or less apart: the grid is not where the "
    "configuration puts it, or something else than the phase moves along."
)


def shift_by_stride(target: Target, stride_tokens: int) -> InvariantOutcome:
    """Compare log-probabilities of the answer S tokens apart with those S-1 and S+1 tokens apart.

    Args:
        target: that can do the records task.
        stride_tokens: S.
    """

    def difference() -> float:
        if stride_tokens > _MOST_STRIDE:
            raise NotTestableError(f"a stride of {stride_tokens} tokens needs too many prompts; audit it instead")
        defaults = target.defaults
        settings = ProbeSettings(
            probe="records",
            items=_ITEMS,
            records=defaults.records or _RECORDS,
            length_tokens=defaults.length_tokens or 512,
            window_tokens=2 * stride_tokens + 2,
            seed=0,
            demonstrations=min(defaults.demonstrations, _RECORDS - 1),
            style=defaults.style or "auto",
        )
        try:
            probe = build_probe(settings, target.tokenizer)
            answers = list(target.answer(list(probe)))
        except IsophaseError as error:
            raise NotTestableError(f"the records task does not fit: {error.problem}") from error
        values = np.array([a.log_probability for a in answers]).reshape(_ITEMS, -1)
        if not np.isfinite(values).all():
            raise NotTestableError("no log-probability of the answers is known at every position")
        if sum(a.correct for a in answers) < len(answers) / 4:
            raise NotTestableError("the target does not do the task")
        return _ratio(values, stride_tokens)

    detail = f"{_ITEMS} records moved by {stride_tokens} tokens against {stride_tokens - 1} and {stride_tokens + 1}"
    return judge(NAME, detail, [Case(f"a shift of {stride_tokens} tokens", difference)], _LIMIT, _EXPLANATION)


def _ratio(values: npt.NDArray[np.float64], stride: int) -> float:
    """Mean difference S apart over that of its neighbours; 0 where both are negligible."""

    def apart(tokens: int) -> float:
        return float(np.abs(values[:, tokens:] - values[:, :-tokens]).mean())

    same, near = apart(stride), (apart(stride - 1) + apart(stride + 1)) / 2
    if same < _NEGLIGIBLE:
        return 0.0
    return same / near if near > 0 else math.inf
