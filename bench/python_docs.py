"""Two retrieval sets made from Python's own documentation (sources in reStructuredText).

    apt-get download python3.11-doc && dpkg -x python3.11-doc_*.deb FOLDER
    python bench/python_docs.py FOLDER/usr/share/doc/python3.11/html/_sources

*faq*: questions are the headings of the FAQ, answers what stands below them; headings are removed from the pages, so
neighbouring passages have little to do with each other. *library*: entries of the library reference whose meaning
depends on their page. An entry's first sentence, without its name, and the page's one-line description are the
question; what follows the first sentence is the passage, from which the entry's and the module's names and the words
of the description are removed. Only the page's introduction keeps them.
"""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_DROPPED = {"contents", "only", "index", "sectionauthor", "moduleauthor", "module", "audit-event", "deprecated"}
_ENTRY = re.compile(r"^(\s*)\.\. (?:function|method|class|classmethod|staticmethod|coroutinefunction)::\s*(.+)$")
_DIRECTIVE = re.compile(r"^(\s*)\.\.(?:\s+([\w:-]+)::.*|\s.*|$)")
_SMALL_WORDS = {"with", "from", "that", "this", "into", "their", "your", "used", "using", "other", "which", "python"}


@dataclass(frozen=True, kw_only=True)
class Page:
    """A document made of passages, joined by blank lines."""

    name: str
    passages: tuple[str, ...]

    @property
    def text(self) -> str:
        """All passages."""
        return "\n\n".join(self.passages)

    def place(self, passage: int) -> tuple[int, int]:
        """First character of a passage, and one past its last."""
        start = sum(len(p) + 2 for p in self.passages[:passage])
        return start, start + len(self.passages[passage])


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question, the number of its page and of the passage that answers it."""

    text: str
    page: int
    passage: int


def faq(sources: Path) -> tuple[list[Page], list[Asked]]:
    """Pages and questions of the FAQ."""
    pages, asked = [], []
    for path in sorted((sources / "faq").glob("*.rst.txt")):
        if path.name.startswith("index"):
            continue
        passages: list[str] = []
        for heading, body in _sections(path.read_text(encoding="utf-8")):
            text = clean(body)
            if not text:
                continue
            passages.append(text)
            if heading.endswith("?"):
                asked.append(Asked(text=clean(heading), page=len(pages), passage=len(passages) - 1))
        pages.append(Page(name=path.name.removesuffix(".rst.txt"), passages=tuple(passages)))
    return pages, asked


def library(sources: Path, *, pages: int = 40, per_page: int = 8, seed: int = 0) -> tuple[list[Page], list[Asked]]:
    """Pages of the library reference, and questions about their entries; drawn by the seed."""
    rng = random.Random(seed)
    made = [m for p in sorted((sources / "library").glob("*.rst.txt")) if (m := _library_page(p)) is not None]
    made = rng.sample(made, min(pages, len(made)))
    out, asked = [], []
    for name, introduction, entries in made:
        chosen = sorted(rng.sample(range(len(entries)), min(per_page, len(entries))))
        asked += [Asked(text=entries[n][0], page=len(out), passage=n + 1) for n in chosen]
        out.append(Page(name=name, passages=(introduction, *(passage for _, passage in entries))))
    return out, asked


def _library_page(path: Path) -> tuple[str, str, list[tuple[str, str]]] | None:
    """Name, introduction, and (question, passage) of every entry; None for a page with fewer than 4."""
    source = path.read_text(encoding="utf-8")
    module = path.name.removesuffix(".rst.txt")
    synopsis = re.search(r"^\s+:synopsis:\s*(.+)$", source, flags=re.M)
    if synopsis is None:
        return None
    topic = clean(synopsis.group(1)).rstrip(".")
    banned = {w.lower() for w in re.findall(r"\w+", topic) if len(w) > 3} - _SMALL_WORDS
    banned |= {part for part in re.split(r"[._]", module.lower()) if len(part) > 2} | {module.lower()}
    lines = source.splitlines()
    first = next((n for n, line in enumerate(lines) if _ENTRY.match(line)), None)
    if first is None:
        return None
    introduction = clean("\n".join(body for _, body in _sections("\n".join(lines[:first]))))
    entries = []
    for n, line in enumerate(lines):
        match = _ENTRY.match(line)
        if match is None:
            continue
        name = re.split(r"[(\s]", match.group(2))[0]
        text = clean("\n".join(_body(lines, n + 1, len(match.group(1)))))
        head, _, rest = text.replace("\n", " ").partition(". ")
        names = {name.lower(), name.split(".")[-1].lower()}
        question = f"{topic}: {_without(head, names)}"
        passage = _without(rest, banned | names)
        if len(passage.split()) >= 25 and len(head.split()) >= 5:
            entries.append((question, passage))
    total = sum(len(passage) for _, passage in entries)
    if len(entries) < 4 or total > 30_000 or len(introduction) < 100:
        return None
    return module, f"{topic}. {introduction}"[:2000], entries


def _body(lines: list[str], start: int, indent: int) -> list[str]:
    """Lines indented deeper than an entry, up to the next entry."""
    out = []
    for line in lines[start:]:
        if line.strip() and (len(line) - len(line.lstrip()) <= indent or _ENTRY.match(line)):
            break
        out.append(line)
    return out


def _without(text: str, words: set[str]) -> str:
    pattern = "|".join(re.escape(word) + "s?" for word in sorted(words, key=len, reverse=True) if word)
    return " ".join(re.sub(rf"(?<![\w])(?:{pattern})(?![\w])(?:\(\))?", " ", text, flags=re.I).split())


def _sections(source: str) -> list[tuple[str, str]]:
    """Headings and the text below each."""
    out: list[tuple[str, list[str]]] = [("", [])]
    lines = source.splitlines()
    n = 0
    while n < len(lines):
        line, below = lines[n], lines[n + 1] if n + 1 < len(lines) else ""
        if re.fullmatch(r"([=\-~^*\"#])\1{2,}", below) and line.strip() and not line.startswith(" "):
            out.append((line.strip(), []))
            n += 2
        elif re.fullmatch(r"([=\-~^*\"#])\1{2,}", line):
            n += 1
        else:
            out[-1][1].append(line)
            n += 1
    return [(heading, "\n".join(body)) for heading, body in out]


def clean(source: str) -> str:
    """Text without markup: directives that carry no text, labels, comments and roles go."""
    out: list[str] = []
    skip: int | None = None
    for line in source.splitlines():
        indent = len(line) - len(line.lstrip())
        if skip is not None:
            if not line.strip() or indent > skip:
                continue
            skip = None
        if match := _DIRECTIVE.match(line):
            # Unknown to `_DROPPED`, such as notes and code: the directive's line goes, its text stays.
            if match.group(2) is None or match.group(2) in _DROPPED:
                skip = indent
            continue
        out.append(line.rstrip())
    text = "\n".join(out)
    text = re.sub(r":[\w:+-]+:`[!~]?([^`<]+?)(?:\s*<[^`>]*>)?`", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]*>`_{1,2}", r"\1", text)
    text = re.sub(r"``([^`]+)``", r"\1", text)
    text = re.sub(r"`([^`]+)`_{0,2}", r"\1", text).replace("::\n", ":\n")
    text = re.sub(r"(?<!\w)\*{1,2}([^*\n]+)\*{1,2}(?!\w)", r"\1", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for name, build in (("faq", faq), ("library", library)):
        pages, asked = build(Path(sys.argv[1]))
        print(f"{name}: {len(pages)} pages, {sum(len(p.text) for p in pages)} characters, {len(asked)} questions")
        for question in asked[:: max(1, len(asked) // 4)]:
            print(f"  {pages[question.page].name}: {question.text!r}")
            print(f"      {pages[question.page].passages[question.passage][:200]!r}")


if __name__ == "__main__":
    main()
