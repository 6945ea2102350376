"""A fact in a long text: lengths by depths by phases, for several cache methods on one reading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.needle.prompts import NeedleTask
    from isophase.needle.report import render_json, results_table, write_report
    from isophase.needle.run import run_needle, settings_for
    from isophase.needle.settings import NeedleSettings, parse_lengths
    from isophase.needle.summary import summarise

__all__ = [
    "NeedleSettings",
    "NeedleTask",
    "parse_lengths",
    "render_json",
    "results_table",
    "run_needle",
    "settings_for",
    "summarise",
    "write_report",
]

__getattr__, __dir__ = lazily(__name__, __file__)
