"""Run the invariants that suit a target, and say what they mean together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

from pydantic import BaseModel, ConfigDict, Field

from isophase.errors import IsophaseError
from isophase.targets import Target
from isophase.targets.invariants import InvariantOutcome, InvariantStatus, shift_by_stride


class CheckedInvariant(BaseModel):
    """One check, as JSON."""

    model_config = ConfigDict(frozen=True)

    name: str
    status: InvariantStatus
    detail: str
    smallest_failing_input: str
    cases: int
    largest_difference: float | None = Field(description="of all cases tried; log-probability, or a ratio")
    limit: float | None = Field(description="what still counts as rounding")
    explanation: str


class InvariantReport(BaseModel):
    """`isophase invariants`: everything found."""

    model_config = ConfigDict(frozen=True)

    target: str
    stride_tokens: int
    passed: int
    failed: int
    not_testable: int
    sentence: str
    invariants: list[CheckedInvariant]


def run_invariants(
    target: Target, *, stride_tokens: int | None = None, say: Callable[[str], None] = lambda _: None
) -> InvariantReport:
    """All checks that a target allows.

    Args:
        target: a model in this process, or a server.
        stride_tokens: S; None: the longest that the configuration names, else 8.
        say: told the name of each check before it runs.

    Returns:
        Outcomes, the determinism floor first.

    Raises:
        IsophaseError: the target is neither, or cannot be used.
    """
    if stride_tokens is not None and not 2 <= stride_tokens <= 1024:
        raise IsophaseError(f"--stride is {stride_tokens}; it must lie between 2 and 1024.", "Give the model's stride.")
    stride, outcomes = _outcomes(target, stride_tokens, say)
    say("shift by one stride")
    outcomes.append(shift_by_stride(target, stride))
    counts = {status: sum(o.status == status for o in outcomes) for status in ("pass", "fail", "not testable")}
    return InvariantReport(
        target=target.name,
        stride_tokens=stride,
        passed=counts["pass"],
        failed=counts["fail"],
        not_testable=counts["not testable"],
        sentence=_sentence(target.name, outcomes),
        invariants=[_checked(outcome) for outcome in outcomes],
    )


def _outcomes(
    target: Target, stride_tokens: int | None, say: Callable[[str], None]
) -> tuple[int, list[InvariantOutcome]]:
    from isophase.targets.invariants import ServerInvariants
    from isophase.targets.server import ServerTarget

    if isinstance(target, ServerTarget):
        server = ServerInvariants(target, stride_tokens=stride_tokens)
        return server.stride, server.run(say)
    if target.name.startswith("planted:"):
        raise IsophaseError(f"{target.name} reads nothing, so nothing can be checked.", "Give a model or a server.")
    from isophase.targets import HuggingFaceTarget
    from isophase.targets.invariants import LocalInvariants

    if not isinstance(target, HuggingFaceTarget):
        raise IsophaseError(f"{target.name} is neither a model nor a server.", "Give hf:, isophase: or http:.")
    local = LocalInvariants(target, stride_tokens=stride_tokens)
    return local.stride, local.run(say)


def _sentence(name: str, outcomes: list[InvariantOutcome]) -> str:
    failed = [outcome.name for outcome in outcomes if outcome.status == "fail"]
    tested = sum(outcome.status != "not testable" for outcome in outcomes)
    if not failed:
        return f"{name} passes all {tested} checks that can be made here."
    if failed == ["left padding"]:
        return (
            f"{name} fails only with pads in front of a prompt, which isophase never sends; "
            f"the other {tested - 1} checks pass."
        )
    return f"{name} fails {len(failed)} of {tested} checks: {', '.join(failed)}. Mend these before blaming the phase."


def _checked(outcome: InvariantOutcome) -> CheckedInvariant:
    values = asdict(outcome)
    for name in ("largest_difference", "limit"):
        if not math.isfinite(values[name]):
            values[name] = None
    return CheckedInvariant.model_validate(values)
