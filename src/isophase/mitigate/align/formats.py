"""Where a text may take neutral tokens without meaning something else, and what in it belongs together."""

from __future__ import annotations

import ast
import json
import re
import tokenize
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from isophase.errors import IsophaseError

FORMATS = ("text", "python", "json", "markdown")
_SUFFIXES = {".py": "python", ".pyi": "python", ".json": "json", ".md": "markdown", ".markdown": "markdown"}

_TRAILING = (" ", " \t", "\t", "\t ")
_BLANK_LINES = ("\n", " \n", "\t\n", " \t\n")
_JSON_SPACE = (" ", "\n", "\t", " \n", "\t\n", " \t")


class Site(NamedTuple):
    """Neutral text `head + unit * n + tail` that may stand at a character; more units are more tokens."""

    at: int
    unit: str
    head: str = ""
    tail: str = ""


class Opening(NamedTuple):
    """A place between two tokens of the format.

    Attributes:
        before: the character that moves first.
        sites: ways to move it, quietest first.
    """

    before: int
    sites: tuple[Site, ...]


class Marked(NamedTuple):
    """Spans as (first character, character behind the last), and openings; both in order."""

    spans: list[tuple[int, int]]
    openings: list[Opening]


def format_of(name: str) -> str:
    """The format that a file's name tells."""
    return next((form for suffix, form in _SUFFIXES.items() if name.lower().endswith(suffix)), "text")


def find(text: str, form: str, *, mark: str | None = None, unit: str = "") -> Marked:
    """Find spans and openings.

    Args:
        text: the whole text.
        form: one of `FORMATS`. Text and Python: spans are lines; Markdown: blocks; JSON: objects and arrays that
            hold no others, else single members.
        mark: regular expression; its matches are the spans instead.
        unit: visible neutral text for plain text, where white space makes no tokens; empty: none.

    Raises:
        IsophaseError: the text is not of this format, or the expression is none or matches nothing.
    """
    finders: dict[str, Callable[[], Marked]] = {
        "text": lambda: _text(text, unit),
        "python": lambda: _python(text),
        "json": lambda: _json(text, everywhere=mark is not None),
        "markdown": lambda: _markdown(text),
    }
    if form not in finders:
        raise IsophaseError(f"--format {form!r} is unknown.", f"Give auto, {', '.join(FORMATS)}.")
    found = finders[form]()
    if mark is None:
        return found
    try:
        spans = [match.span() for match in re.finditer(mark, text, re.MULTILINE) if match.group()]
    except re.error as error:
        raise IsophaseError(f"--mark {mark!r} is no regular expression: {error}.", "Mend it.") from None
    if not spans:
        raise IsophaseError(f"--mark {mark!r} matches nothing.", "Give an expression that matches what must be found.")
    return Marked(spans, found.openings)


def meaning(text: str, form: str) -> object:
    """What must not change: equal for a text and its aligned form.

    Python: the syntax tree; JSON: the value, with the order and repeats of names; Markdown: the page; text: the
    words.
    """
    if form == "python":
        return ast.dump(ast.parse(text))
    if form == "json":
        return json.loads(text, object_pairs_hook=tuple, parse_float=str)
    if form == "markdown":
        return _commonmark().render(text)
    return text.split()


def _lines(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of every line, its newline not included."""
    for match in re.finditer(r"[^\n]*\n?", text):
        if match.group():
            yield match.start(), match.start() + len(match.group().rstrip("\r\n"))


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    """The same stretch without white space on its sides."""
    inner = text[start:end]
    return start + len(inner) - len(inner.lstrip()), end - (len(inner) - len(inner.rstrip()))


def _text(text: str, unit: str) -> Marked:
    spans, openings = [], []
    before: int | None = None
    for start, end in _lines(text):
        if text[start:end].strip():
            spans.append(_stripped(text, start, end))
            sites = [] if before is None else [Site(before, white) for white in _TRAILING]
            sites += [Site(start, white) for white in _BLANK_LINES]
            if unit:
                sites.append(Site(start, unit, tail="\n") if before is None else Site(before, unit))
            openings.append(Opening(start, tuple(sites)))
        before = end
    return Marked(spans, openings)


def _python(text: str) -> Marked:
    """Lines; a string over several lines belongs to the line that it starts in."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    try:
        ast.parse(text)
        tokens = list(tokenize.generate_tokens(iter([*lines, ""]).__next__))
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError) as error:
        reason = getattr(error, "msg", None) or str(error)
        raise IsophaseError(f"this is no valid Python: {reason}.", "Give --format text, or mend it.") from None
    if re.search(r"\r(?!\n)|\f", text):
        raise IsophaseError("this Python has form feeds, or lines that end in CR alone.", "Convert its line ends.")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    # Where the tokenizer sees a line end, white space and comments may stand: not in strings, nor behind a backslash.
    ends = {
        token.start[0]: starts[token.start[0] - 1] + token.start[1]
        for token in tokens
        if token.type in (tokenize.NEWLINE, tokenize.NL) and token.string
    }
    spans: list[tuple[int, int]] = []
    openings = []
    for row, line in enumerate(lines, start=1):
        start = starts[row - 1]
        if row > 1 and row - 1 not in ends:
            spans[-1:] = [(spans[-1][0], _stripped(text, start, start + len(line))[1])] if line.strip() else spans[-1:]
            continue
        if not line.strip():
            continue
        spans.append(_stripped(text, start, start + len(line)))
        if row <= 2 and _is_read_by_place(lines):
            continue
        blank = [Site(start, white) for white in _BLANK_LINES]
        if row > 1:
            end = ends[row - 1]
            blank = [*(Site(end, white) for white in _TRAILING), Site(end, " .", head="  #"), *blank]
        openings.append(Opening(start, tuple(blank)))
    return Marked(spans, openings)


def _is_read_by_place(lines: list[str]) -> bool:
    """Whether the first lines say which program runs the file, or its encoding: they must stay the first."""
    return lines[0].startswith("#!") or any(re.match(r"\s*#.*coding[:=]", line) for line in lines[:2])


class _Container:
    """An array or object that is being read."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.holds_others = False
        self.members: list[tuple[int, int]] = []
        self.member: int | None = None
        self.member_is_plain = True

    def end_member(self, end: int) -> None:
        if self.member is not None and self.member_is_plain:
            self.members.append((self.member, end))
        self.member, self.member_is_plain = None, True


def _json(text: str, *, everywhere: bool) -> Marked:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IsophaseError(f"this is no JSON: {error}.", "Give --format text, or mend it.") from None
    spans: list[tuple[int, int]] = []
    token_starts = []
    stack: list[_Container] = []
    end = 0
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+', text):
        token, start = match.group(), match.start()
        token_starts.append(start)
        if token in "[{":
            if stack:
                parent = stack[-1]
                parent.holds_others, parent.member_is_plain = True, False
                parent.member = start if parent.member is None else parent.member
            stack.append(_Container(start))
        elif token in "]}":
            closed = stack.pop()
            closed.end_member(end)
            spans += closed.members if closed.holds_others or not stack else [(closed.start, match.end())]
        elif token == ",":
            stack[-1].end_member(end)
        elif stack and stack[-1].member is None and token != ":":
            stack[-1].member = start
        end = match.end()
    spans = sorted(spans) or [(token_starts[0], end)]
    places = token_starts if everywhere else [start for start, _ in spans]
    return Marked(spans, [Opening(at, tuple(Site(at, white) for white in _JSON_SPACE)) for at in places])


def _markdown(text: str) -> Marked:
    """Blocks of the outermost level; between two of them a blank line more is nothing."""
    lines = list(_lines(text))
    blocks = [token.map for token in _commonmark().parse(text) if token.level == 0 and token.map and token.nesting >= 0]
    spans: list[tuple[int, int]] = []
    openings = []
    for first, behind in blocks:
        if behind > len(lines) or (spans and lines[first][0] < spans[-1][1]):
            continue
        start = lines[first][0]
        spans.append(_stripped(text, start, lines[behind - 1][1]))
        # A page may start with front matter, which must be its first line.
        is_free = not text[slice(*lines[first - 1])].strip() if first > 0 else not text.startswith("---")
        if is_free:
            openings.append(Opening(start, tuple(Site(start, white) for white in _BLANK_LINES)))
    return Marked(spans, openings)


def _commonmark() -> Any:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").enable("table")
