"""Code blocks of the documentation, and what comments in front of them say.

| comment on the line before a block | means |
|---|---|
| `<!-- not run: REASON -->` | the block is not run; its commands must parse |
| `<!-- exit code N -->` | the last command of the block ends with N instead of 0 |
| `<!-- file: NAME -->` | the block is the content of a file, without the line end behind it |
| `<!-- output not compared: REASON -->` | the block is an output, and differs from machine to machine |

A `text` block behind a block that runs is its output: its lines must come in the real output, in that order. White
space and bars do not count, times are anything, numbers may differ a little, and a line `...` stands for lines that are
left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md", ROOT / "docs/index.md", ROOT / "docs/getting-started.md", ROOT / "docs/reference/exit-codes.md",
    *sorted((ROOT / "docs/guides").glob("*.md")),
]  # fmt: skip

_FENCE = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*?) -->\n)?(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```$",
    flags=re.MULTILINE | re.DOTALL,
)
_INDENTED = re.compile(r"(?:^<!-- (?P<note>[^\n]*?) -->\n\n?)?(?P<body>(?:^ {4}[^\n]+\n)+)", flags=re.MULTILINE)
_NUMBER = r"[-−]?\d[\d,]*(?:\.\d+)?"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A code block.

    Attributes:
        page: where it stands.
        line: of its first line of code.
        language: bash, python, text, json, yaml, or empty.
        body: the code.
        note: comment in front of it; empty for none.
    """

    page: Path
    line: int
    language: str
    body: str
    note: str

    def said(self, what: str) -> str | None:
        """What the comment says after these words; None if it does not."""
        return self.note.removeprefix(what).lstrip(": ") if self.note.startswith(what) else None

    @property
    def is_run(self) -> bool:
        """Whether it runs in a test."""
        return self.language in ("bash", "python") and self.said("not run") is None

    def commands(self) -> list[str]:
        """Commands of a bash block: continued lines joined, comments and blank lines dropped."""
        lines = re.sub(r" *\\\n\s*", " ", self.body).splitlines()
        stripped = [re.sub(r"\s+# .*$", "", line).strip() for line in lines]
        return [line for line in stripped if line and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    """Blocks of a page, in order: fenced ones, and indented ones as bash."""
    text = page.read_text(encoding="utf-8")
    return sorted(_blocks(page, text), key=lambda block: block.line)


def _blocks(page: Path, text: str) -> Iterator[Block]:
    def block(found: re.Match[str], language: str, body: str) -> Block:
        line = text.count("\n", 0, found.start("body")) + 1
        return Block(page=page, line=line, language=language, body=body, note=found["note"] or "")

    for found in _FENCE.finditer(text):
        yield block(found, found["language"], re.sub(rf"^{found['indent']}", "", found["body"], flags=re.MULTILINE))
    rest = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
    for found in _INDENTED.finditer(rest):
        if re.match(r" {4}(isophase|make|pip|export|python) ", found["body"]):
            yield block(found, "bash", re.sub(r"^ {4}", "", found["body"], flags=re.MULTILINE))


def missing(shown: str, real: str) -> str | None:
    """The first part of a shown output that the real one does not have, or None.

    Args:
        shown: of a page.
        real: what was printed.
    """
    rest, at = _plain(real), 0
    for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE):
        wanted = _plain(part)
        pattern = "".join(
            f"({_NUMBER})" if re.fullmatch(_NUMBER, piece) else re.escape(piece)
            for piece in re.split(f"({_NUMBER})", wanted)
        )
        numbers = re.findall(_NUMBER, wanted)
        for found in re.compile(pattern).finditer(rest, at):
            if all(_close(a, b) for a, b in zip(numbers, found.groups(), strict=True)):
                at = found.end()
                break
        else:
            return wanted
    return None


def _plain(text: str) -> str:
    text = re.sub(r"[█├─●┤▌▏▎▍▋▊▉]+", " ", text)
    text = re.sub(r"\b\d+(\.\d+)? (s|min)\b", "SOME TIME", text)
    return " ".join(text.split())


def _close(shown: str, real: str) -> bool:
    a, b = (float(text.replace(",", "").replace("−", "-")) for text in (shown, real))
    return abs(a - b) <= max(0.02, 0.05 * abs(a)) or ("." not in shown and abs(a - b) <= 3)
