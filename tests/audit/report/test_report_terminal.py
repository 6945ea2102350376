"""The terminal report: within its width, without colour, and safe against hostile names."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from isophase.audit.report import overall_verdict, print_report
from isophase.audit.report.words import number, p_value, phase_list
from isophase.audit.schema import Report

Make = Callable[[str], Report]
TITLES = {"sensitive": "SENSITIVE", "none": "NO SENSITIVITY ABOVE THE MARGIN", "inconclusive": "INCONCLUSIVE"}


def printed(report: Report, width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict" if encoding == "utf-8" else "replace")
    print_report(report, Console(file=stream, width=width))
    stream.flush()
    return raw.getvalue().decode(encoding)


def phase_rows(text: str) -> list[str]:
    """The lines of the bar chart."""
    return [line for line in text.splitlines() if re.match(r" {2,4}\d+ +(\d\.\d\d|n/a)", line)]


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_stays_within_the_width(report: Report, width: int) -> None:
    lines = printed(report, width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].rstrip() == TITLES[overall_verdict(report)]


def test_shows_every_phase_of_a_short_axis(make: Make) -> None:
    text = printed(make("sensitive"))
    rows = {row.split()[0]: row for row in phase_rows(text)}
    assert set(rows) == {str(phase) for phase in range(8)}
    assert rows["7"].endswith("worst, chunk edge")
    assert "0.02" in rows["7"]
    assert "1.00" in rows["7"]  # the control
    assert rows["7"].count("█") < rows["0"].count("█")
    for words in ("What to do next", "Why", "p boundary", "97.2 points", "models/full"):
        assert words in text


def test_condenses_a_long_axis(make: Make) -> None:
    text = printed(make("long_axis"))
    rows = phase_rows(text)
    assert 8 <= len(rows) <= 12
    assert any(row.startswith("  127") and row.endswith("worst, chunk edge") for row in rows)
    assert "other phases lie between" in text


def test_several_findings_open_with_a_table(make: Make) -> None:
    lines = printed(make("several")).splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("model "))
    assert "verdict" in lines[header]
    assert "models/full (control)" in lines[header + 2]
    assert header < next(i for i, line in enumerate(lines) if "probe)" in line)


def test_foreign_text_neither_steers_the_terminal_nor_becomes_markup(make: Make) -> None:
    text = printed(make("hostile"))
    assert "\x1b" not in text
    assert "\x00" not in text
    assert "[red]said[/red]" in text
    assert "n/a" in text


def test_without_unicode_bars_are_ascii(make: Make) -> None:
    rows = [line for line in printed(make("sensitive"), encoding="ascii").splitlines() if line[:5].strip().isdigit()]
    assert all("?" not in row for row in rows)
    assert "#" in rows[0]


def test_colour_only_where_there_is_a_terminal(make: Make) -> None:
    stream = io.StringIO()
    print_report(make("sensitive"), Console(file=stream, width=80, force_terminal=True, color_system="standard"))
    assert "\x1b[" in stream.getvalue()
    assert "\x1b" not in printed(make("sensitive"))


def test_numbers_in_words() -> None:
    assert number(None) == number(float("nan")) == "n/a"
    assert number(-0.0001) == "0.00"
    assert number(-0.5, 1) == "-0.5"
    assert p_value(0.0004) == "< 0.001"
    assert phase_list([7, 5, 6, 3]) == "3, 5-7"
    assert phase_list([]) == "none"
    assert phase_list(list(range(0, 40, 2)), limit=2) == "0, 2 and 18 more"


def test_says_what_was_dropped_and_what_the_scan_names(make: Make) -> None:
    text = " ".join(printed(make("long_axis"), 140).split())
    assert "2 items dropped" in text
    assert "the scan names 64" in text
    assert "grids HCA: window 128, stride 128" in text
