"""Where in a model its phase effect comes from: heads, gates, causes; and the page that shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.lab.explain.anatomy import GateBranch, Remake, average, changed, gate_branches, roll
    from isophase.lab.explain.outcomes import Questions, ask, questions_of
    from isophase.lab.explain.page import render_explanation, render_json
    from isophase.lab.explain.run import explain
    from isophase.lab.explain.schema import Explanation

__all__ = [
    "Explanation",
    "GateBranch",
    "Questions",
    "Remake",
    "ask",
    "average",
    "changed",
    "explain",
    "gate_branches",
    "questions_of",
    "render_explanation",
    "render_json",
    "roll",
]

__getattr__, __dir__ = lazily(__name__, __file__)
