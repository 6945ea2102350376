"""Which phases are strong, as an audit measured it."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from isophase.audit import Report
from isophase.errors import IsophaseError


def read_curve(folder: Path) -> tuple[float, ...]:
    """Accuracy by phase of an audit's first finding.

    Args:
        folder: of the audit, or its `report.json`.

    Returns:
        One accuracy per phase, in 0..1; as many as the period found, or the stride.

    Raises:
        IsophaseError: there is no such report, or one of its phases was never asked.
    """
    path = folder / "report.json" if folder.is_dir() else folder
    remedy = "Give --curve the folder of an audit, isophase-runs/NAME."
    try:
        report = Report.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise IsophaseError(f"cannot read {str(path)!r}: {error.strerror}.", remedy) from None
    except (ValueError, ValidationError):
        raise IsophaseError(f"{str(path)!r} is no report of an audit.", remedy) from None
    curve = [value for value in report.accuracy_by_phase if value is not None]
    if len(curve) < len(report.accuracy_by_phase):
        raise IsophaseError(f"{str(path)!r} has phases without an answer.", "Audit with more --items.")
    return tuple(curve)
