"""Commands in the README and docs exist, with the options they are shown with; links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from isophase.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        # Only code blocks; comments and "the same again" are for people.
        lines = [line for line in text.splitlines() if line.startswith("    isophase ")]
        found += [(page.name, line.split("#")[0].replace("...the same...", "").strip()) for line in lines]
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_parse(page: str, line: str) -> None:
    group = typer.main.get_command(app)
    name, *arguments = shlex.split(line)[1:]
    if name.startswith("--"):
        return
    command = group.commands[name]  # type: ignore[attr-defined]
    while arguments and arguments[0] in getattr(command, "commands", {}):
        name = arguments.pop(0)
        command = command.commands[name]
    with command.make_context(name, list(arguments)) as context:
        assert context.params


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"^\s*make ([a-z-]+)", page.read_text(), flags=re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
