"""The HTML page and the JSON file: whole, self-contained, escaped, and equal for equal findings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

import isophase.audit.report as package
from isophase.audit.report import overall_verdict, render_html, render_json, write_report
from isophase.audit.report.fold import control_for
from isophase.audit.report.svg import nice_ticks
from isophase.audit.schema import Report
from isophase.statistics import wilson

Make = Callable[[str], Report]
VOID = {"meta", "br", "link", "img", "input", "hr"}
EMPTY_SVG = {"path", "line", "circle", "rect"}
FIGURES = {"phases", "scan", "log-probability", "trend", "boundary", "heat", "completion", "rankings"}


class Outline(HTMLParser):
    """Open tags must close in order; also gathers what the tests ask about."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in EMPTY_SVG, f"<{tag}/> does not close itself in HTML"
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def drawings(page: str) -> list[str]:
    """Outermost <svg> elements, as text."""
    found, depth, start = [], 0, 0
    for tag in re.finditer(r"<svg\b|</svg>", page):
        if tag.group() == "</svg>":
            depth -= 1
            if depth == 0:
                found.append(page[start : tag.end()])
        else:
            start = tag.start() if depth == 0 else start
            depth += 1
    return found


def figures_of(page: str) -> set[str]:
    return {(a["class"] or "").split()[0] for tag, a in outline(page).tags if tag == "figure"}


def test_is_well_formed_and_self_contained(report: Report) -> None:
    page = render_html(report)
    parsed = outline(page)
    assert page.startswith("<!DOCTYPE html>")
    for tag, attributes in parsed.tags:
        assert tag not in {"script", "img", "iframe", "link", "object", "embed", "image", "use"}
        assert not {"src", "href", "xlink:href", "srcset", "style"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    style = re.search(r"<style>(.*)</style>", page, re.DOTALL)
    assert style is not None
    assert not re.search(r"url\(|@import|https?:", style.group(1))
    for drawing in drawings(page):
        ElementTree.fromstring(drawing)
    assert not re.search(r"\bnan\b|\binf\b|None|Undefined", page.split("</style>")[1])


def test_equal_findings_give_equal_bytes(report: Report) -> None:
    slower = report.model_copy(
        update={
            "seconds": 99.875,
            "findings": [f.model_copy(update={"seconds": 99.875}) for f in report.findings],
        }
    )
    page = render_html(report)
    assert page == render_html(slower)
    assert "99.875" not in page
    assert "12.3456" not in page
    assert "seconds" not in page


def test_verdict_comes_first_and_headings_are_in_order(report: Report) -> None:
    page = render_html(report)
    parsed = outline(page)
    levels = [int(tag[1]) for tag, _ in parsed.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    word = {
        "sensitive": "Sensitive",
        "none": "No sensitivity above the margin",
        "inconclusive": "Inconclusive",
    }
    body = page.split("<body>")[1]
    assert word[overall_verdict(report)] in body[:1200]
    ids = [a["id"] for _, a in parsed.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    for _, attributes in parsed.tags:
        assert attributes.get("aria-labelledby") is None or attributes["aria-labelledby"] in ids


def test_drawings_are_named_for_those_who_do_not_see_them(report: Report) -> None:
    for tag, attributes in outline(render_html(report)).tags:
        if tag == "svg" and attributes.get("class") == "plot":
            assert attributes["role"] == "img"
            assert len(attributes["aria-label"] or "") > 20


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("sensitive", {"completion", "rankings"}),
        ("none", {"completion", "rankings", "boundary"}),
        ("nothing_right", {"completion", "rankings", "scan"}),
        ("long_axis", {"completion", "rankings"}),
        ("completion", {"trend", "boundary"}),
    ],
)
def test_every_figure_that_has_data_is_there(name: str, absent: set[str], make: Make) -> None:
    assert figures_of(render_html(make(name))) == FIGURES - absent


def test_control_over_another_axis_gets_its_own_picture(make: Make) -> None:
    assert "phases-control" in figures_of(render_html(make("hostile")))
    assert "phases-control" not in figures_of(render_html(make("sensitive")))


def test_foreign_text_is_escaped(make: Make) -> None:
    page = render_html(make("hostile"))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "\x1b" not in page
    assert "\x00" not in page
    assert page.count("</style>") == 1


def test_numbers_by_phase_are_a_table(make: Make) -> None:
    page = render_html(make("long_axis"))
    table = page[page.index("The numbers by phase") :]
    assert table.count('<th scope="row">', 0, table.index("</table>")) == 128
    sensitive = render_html(make("sensitive"))
    assert "worst, chunk edge" in sensitive
    assert ">Control</th>" in sensitive


def test_many_items_stay_compact(make: Make) -> None:
    page = render_html(make("long_axis"))
    assert len(page) < 300_000
    assert "Here 230 items share 200 rows" in page
    assert 'class="hatch"' in page


def test_several_findings_open_with_a_table(make: Make) -> None:
    page = render_html(make("several"))
    assert "Of 4 tests, 2 are sensitive to the phase, 1 is inconclusive, 1 shows no sensitivity" in page
    summary = page[page.index('id="summary"') : page.index('id="finding-1"')]
    assert summary.count('<tr role="row"') == 6
    assert page.count('<section class="finding"') == 4
    assert 'id="summary"' not in render_html(make("sensitive"))


@pytest.mark.parametrize("name", ["sensitive", "several"])
def test_json_reads_back_to_the_same_report(name: str, make: Make) -> None:
    text = render_json(make(name))
    assert text.endswith("}\n")
    assert Report.model_validate_json(text) == make(name)
    assert render_json(Report.model_validate_json(text)) == text
    assert list(json.loads(text)) == list(Report.model_fields)


def test_both_files_are_written_whole(make: Make, tmp_path: Path) -> None:
    report = make("sensitive")
    page = write_report(report, tmp_path)
    assert page.read_text(encoding="utf-8") == render_html(report)
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == render_json(report)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.json"}


def test_ticks_are_round_and_cover_the_range() -> None:
    assert nice_ticks(0, 46.9) == [0, 20, 40, 60]
    assert nice_ticks(-3.9, -0.01) == [-4, -3, -2, -1, 0]
    assert nice_ticks(2, 2)[0] < 2 < nice_ticks(2, 2)[-1]


def test_colours_keep_their_contrast() -> None:
    sheet = (Path(package.__file__).parent / "style.css").read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", part)) for part in sheet.split("@media")[:2])
    for palette in (light, dark):
        for name in ("ink", "soft", "blue-ink", "orange-ink"):
            assert contrast(palette[name], palette["paper"]) >= 4.5, name
        for name in ("blue", "orange", "grey"):
            assert contrast(palette[name], palette["paper"]) >= 3, name


def contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio."""

    def luminance(colour: str) -> float:
        channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_a_control_over_a_multiple_of_the_axis_is_folded(make: Make) -> None:
    target, control = make("sensitive").findings
    values = [1.0, 0.5, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0] * 2
    wide = control.model_copy(
        update={
            "axis_tokens": 16,
            "accuracy_by_phase": values,
            "interval_by_phase": [(0.0, 1.0)] * 16,
            "prompts_by_phase": [10] * 8 + [30] * 8,
            "log_probability_by_phase": [-1.0] * 8 + [-3.0] * 8,
        }
    )
    folded = control_for(target, wide)
    assert folded is not None
    assert folded.accuracy_by_phase == values[:8]
    assert folded.prompts_by_phase == [40] * 8
    assert folded.log_probability_by_phase == pytest.approx([-2.5] * 8)
    low, high = wilson(20, 40)
    assert folded.interval_by_phase[1] == (float(low), float(high))
    assert control_for(target, wide.model_copy(update={"axis_tokens": 12})) is None


def test_votes_are_drawn_by_their_cost_and_chosen_shifts_last(make: Make) -> None:
    page = render_html(make("voted"))
    assert page.count("What a vote gains") == 1
    drawn = page[page.index("What a vote gains") :]
    drawn = drawn[: drawn.index("</figure>")]
    places = [drawn.index(f">{words}</text>") for words in ("once", "2 times", "4 times", "0, 8, 16, 24")]
    assert places == sorted(places)
    assert drawn.count('class="whisker"') == 4
    assert "What a vote gains" not in render_html(make("several"))
