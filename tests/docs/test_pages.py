"""Pages of the documentation: commands exist, links lead somewhere, guides are short, every block is accounted for."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from doc_blocks import PAGES, ROOT, Block, blocks, missing

from isophase.cli.main import app

GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
LONGEST_WORDS = 900
# Those that a person wrote, generated parts included; docs/sweeps is written by `isophase sweep`.
ALL_PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "sweeps" not in page.parts),
]


def commands() -> list[tuple[str, str]]:
    """Pages and the isophase commands in them."""
    found = []
    for page in ALL_PAGES:
        lines = [line for block in blocks(page) if block.language == "bash" for line in block.commands()]
        # "The same again" is for people.
        lines = [line.replace("...the same...", "").strip() for line in lines if line.startswith("isophase ")]
        found += [(page.relative_to(ROOT).as_posix(), line) for line in lines]
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_parse(page: str, line: str) -> None:
    group = typer.main.get_command(app)
    name, *arguments = shlex.split(line)[1:]
    if name.startswith("--"):
        return
    command = group.commands[name]  # type: ignore[attr-defined]
    if name != "embed":  # it resolves its own commands
        while arguments and arguments[0] in getattr(command, "commands", {}):
            name = arguments.pop(0)
            command = command.commands[name]
    with command.make_context(name, list(arguments)) as context:
        assert context.params


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    generated = {"cli.md", "report-json.md", "run-folder.md", "python"}
    for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        target = (page.parent / link).resolve()
        if not link.startswith("http") and not generated & set(target.parts):
            assert target.exists(), link


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in ALL_PAGES:
        for target in re.findall(r"^\s*make ([a-z-]+)", page.read_text(), flags=re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guides_are_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= LONGEST_WORDS


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guides_have_their_parts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert blocks(page)[0].language in ("bash", "python", "text", "yaml")
    for part in ("## When not to", "## What to do next"):
        assert part in text, part


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_that_are_not_run_say_why(page: Path) -> None:
    for block in blocks(page):
        for note in ("not run", "output not compared"):
            assert block.said(note) != "", f"{page.name}:{block.line}: no reason"
        known = ("not run", "output not compared", "exit code", "file")
        assert not block.note or block.note.startswith(known), f"{page.name}:{block.line}: {block.note}"


def test_an_output_is_compared() -> None:
    assert missing("gap 12.8 points\n...\nlast", "first\ngap   12.8 points, more\nand\nlast line") is None
    assert missing("gap 12.8 points", "gap 14.8 points") == "gap 12.8 points"
    assert missing("b\n...\na", "a\nb") == "a"
    assert missing("0  0.93  ███─●┤  best", "0   0.94  █████──●┤   best") is None
    assert missing("it took 12.3 s.", "it took 90 s.") is None


def test_blocks_are_read_as_they_stand(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n\n    isophase plan\\\n        hf:model  # why\n\n<!-- not run: slow -->\n```bash\nisophase models\n"
        "```\n"
        "\n<!-- file: a.txt -->\n```text\nA\n```\n"
    )
    first, second, third = blocks(page)
    assert first.commands() == ["isophase plan hf:model"]
    assert first.is_run
    assert not second.is_run
    assert isinstance(third, Block)
    assert third.said("file") == "a.txt"
