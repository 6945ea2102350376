"""An audit: plan, ask resumably, assess, report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.audit.analyse import build_report
    from isophase.audit.check import CheckResult, run_check
    from isophase.audit.compare import compare_runs
    from isophase.audit.invariants import run_invariants
    from isophase.audit.plan import OpenTarget, costs, make_plan, needs_pilot, outlook
    from isophase.audit.run import default_folder, plan_for, run_plan
    from isophase.audit.schema import Interval, Report
    from isophase.audit.settings import AuditSettings, Plan
    from isophase.audit.store import ANSWERS, MANIFEST, AnswersFile, read_answers, read_plan, write_error

__all__ = [
    "ANSWERS",
    "MANIFEST",
    "AnswersFile",
    "AuditSettings",
    "CheckResult",
    "Interval",
    "OpenTarget",
    "Plan",
    "Report",
    "build_report",
    "compare_runs",
    "costs",
    "default_folder",
    "make_plan",
    "needs_pilot",
    "outlook",
    "plan_for",
    "read_answers",
    "read_plan",
    "run_check",
    "run_invariants",
    "run_plan",
    "write_error",
]

__getattr__, __dir__ = lazily(__name__, __file__)
