"""Pages that are generated whenever the site is built: commands, files, and the Python reference.

`mkdocs` loads this file as a hook (mkdocs.yml). Nothing that it writes is kept in the repository, so nothing can fall
behind the code. What it cannot describe, it warns of, and a strict build fails.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel

SRC = Path(__file__).parent.parent / "src"
sys.path.insert(0, str(SRC))
log = logging.getLogger("mkdocs.hooks.isophase")

# The order in which a person meets the commands; one that is missing here comes last.
COMMANDS = [
    "audit", "plan", "report", "show", "compare", "check", "invariants", "needle", "explain", "models", "train",
    "sweep", "prefill", "embed", "search", "align", "repair", "serve",
]  # fmt: skip

# One page for each package: what it is, then modules, or names where the package itself offers them (`__all__`).
PACKAGES: dict[str, tuple[str, list[str]]] = {
    "audit": ("Plan, ask, assess and report.", ["run", "settings", "plan", "analyse", "check", "compare", "store"]),
    "probes": ("Prompts in which only the phase of the queried fact moves.", ["", "own", "windows"]),
    "targets": ("What answers prompts.", ["", "huggingface", "compressed", "sparse", "planted", "strides"]),
    "statistics": ("Is there a period, how large is it, and how sure: pure functions on arrays.", [""]),
    "cache": ("Compress the cache of an existing model.", [""]),
    "prefill": ("Read long prompts sparsely.", [""]),
    "retrieval": ("Embed and search long documents.", ["", "late.adapters", "index.tables", "index.search"]),
    "chunking": ("Where chunks start, and what everyone else reads.", ["rules", "layout", "packing", "merging"]),
    "models": (
        "Trainable causal language models with a compressed memory.",
        ["config", "qwen3", "memory", "pages", "router", "bundled"],
    ),
    "mitigate": (
        "Remedies for models that are already deployed.",
        [
            "vote.generate", "vote.shifts", "vote.rules", "align.text", "align.plan", "align.file", "repair.run",
            "proxy.app", "proxy.settings",
        ],
    ),
    "lab": (
        "Train matched models, sweep over them, and find causes.",
        ["train.recipe", "train.run", "sweep.grid", "sweep.report", "explain.run", "explain.schema"],
    ),
}  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "reference/cli.md": cli_page(),
        "reference/report-json.md": report_page(),
        "reference/run-folder.md": run_folder_page(),
        "reference/python/index.md": python_index(),
    }
    pages |= {f"reference/python/{name}.md": package_page(name) for name in PACKAGES}
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


# --- commands ---------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """Every command with its arguments and options, read from the typer application."""
    from isophase.cli.main import app

    group = typer.main.get_command(app)
    assert hasattr(group, "commands")
    found = dict(_commands(group.commands))
    order = {name: number for number, name in enumerate(COMMANDS)}
    names = sorted(found, key=lambda name: (order.get(name.split()[0], len(order)), name.count(" ")))
    out = [
        "# Commands", "",
        "`isophase COMMAND --help` prints the same. `isophase --version` prints the version, and `isophase --debug "
        "COMMAND` shows the traceback of a fault. [Exit codes](exit-codes.md), [specs of models](specs.md).", "",
    ]  # fmt: skip
    for name in names:
        out += _command(name, found[name])
    return "\n".join(out)


def _commands(commands: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Names and commands; groups are resolved, and a group's nameless command has the name of its group."""
    for name, command in commands.items():
        inner = getattr(command, "commands", None)
        if inner is None:
            visible = re.fullmatch(r"[a-z-]+", name) is not None and name != "index"
            yield (f"{before} {name}" if visible else before).strip(), command
        else:
            yield from _commands(inner, f"{before} {name}".strip())


def _command(name: str, command: Any) -> list[str]:
    out = [f"## isophase {name} {{#{name.replace(' ', '-')}}}", "", *_paragraphs(command.help or ""), ""]
    if not command.help:
        log.warning("isophase %s has no help", name)
    rows = [_argument(p) for p in command.params if p.param_type_name == "argument"]
    if rows:
        out += ["| argument | |", "|---|---|", *rows, ""]
    rows = [_option(p, name) for p in command.params if p.param_type_name == "option" and p.name != "help"]
    if rows:
        out += ["| option | meaning | default |", "|---|---|---|", *rows, ""]
    return out


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name or "").upper().strip("[]{}.")
    more = " One or more." if parameter.nargs == -1 and parameter.required else ""
    more = " May be left out." if not parameter.required else more
    return f"| `{name}` | {_cell(getattr(parameter, 'help', '') or '')}{more} |"


def _option(parameter: Any, command: str) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    if not parameter.help:
        log.warning("isophase %s %s has no help", command, parameter.opts[0])
    text = _cell(parameter.help or "")
    default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
    if parameter.required:
        shown = "must be given"
    elif default in (None, (), []) or callable(default) or parameter.is_flag:
        shown = ""
    else:
        shown = f"`{str(default)!r}`" if str(default) != str(default).strip() else f"`{default}`"
    return f"| {names} | {text} | {shown} |"


# --- files ------------------------------------------------------------------------------------------------------


def report_page() -> str:
    """`report.json`, `explain.json` and `needle.json`, read from their models."""
    from isophase.audit.schema import Report
    from isophase.lab.explain.schema import Explanation
    from isophase.needle.summary import NeedleResult

    out = ["# Results as JSON", "", _read("report-json"), ""]
    for title, model, words in [
        ("report.json", Report, "What `isophase audit` writes. The top level repeats the first finding, so that a "
         "script can read one number without a loop. The same file and seed give the same bytes, but for `seconds`."),
        ("explain.json", Explanation, "What `isophase explain` writes."),
        ("needle.json", NeedleResult, "What `isophase needle` writes."),
    ]:  # fmt: skip
        out += [f"## {title} {{#{title.replace('.', '-')}}}", "", words, "", *_models(model, level=3)]
    return "\n".join(out)


def run_folder_page() -> str:
    """What a run folder holds, read from the models of its files."""
    from isophase.audit.settings import Plan
    from isophase.needle.settings import NeedleSettings
    from isophase.needle.store import NeedleAnswer
    from isophase.targets.base import Answer

    out = ["# Run folders", "", _read("run-folder"), ""]
    out += ["## plan.json {#plan-json}", "", "Everything that decides the prompts, written before the first question."]
    out += ["", *_models(Plan, level=3)]
    out += ["## answers.jsonl {#answers-jsonl}", "", "One line for each answer, appended as it comes: `row`, and what"]
    out += ["the target answered.", "", *_table(_attributes(Answer), types_of(Answer)), ""]
    out += ["## A needle run {#needle-run}", "", "`isophase needle` writes `settings.json` first and then one line for"]
    out += ["each prompt. [needle.json](report-json.md#needle-json) is what it made of them.", ""]
    out += [*_models(NeedleSettings, level=3), *_models(NeedleAnswer, level=3)]
    return "\n".join(out)


def _models(model: type[BaseModel], level: int) -> list[str]:
    """A model and the models inside it, each once, in the order of their first mention."""
    seen: list[type[BaseModel]] = [model]
    out: list[str] = []
    for kind in seen:
        inside = [inner for field in kind.model_fields.values() for inner in _inner(field.annotation)]
        seen += [inner for inner in inside if inner not in seen]
    for kind in dict.fromkeys(seen):
        base = next((b for b in kind.__mro__[1:] if b in seen), None)
        fields = {k: f for k, f in kind.model_fields.items() if base is None or k not in base.model_fields}
        words = inspect.getdoc(kind) or ""
        out += [f"{'#' * level} {kind.__name__} {{#{_anchor(kind)}}}", "", _paragraphs(words)[0], ""]
        if base is not None:
            out += [f"All fields of [{base.__name__}](#{_anchor(base)}), and:", ""]
        told = _attributes(kind)
        rows = {name: field.description or told.get(name, "") for name, field in fields.items()}
        for name, text in rows.items():
            if not text:
                log.warning("%s.%s has no description", kind.__name__, name)
        out += [*_table(rows, {name: _type(field.annotation) for name, field in fields.items()}), ""]
    return out


def _table(rows: dict[str, str], kinds: dict[str, str]) -> list[str]:
    body = [f"| `{name}` | {kinds.get(name, '')} | {_cell(text)} |" for name, text in rows.items()]
    return ["| field | type | meaning |", "|---|---|---|", *body]


def _attributes(kind: type) -> dict[str, str]:
    """Descriptions under `Attributes:` in the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, text = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        entry = r"^ {4}(\w+): (.*(?:\n {5,}.*)*)"
        found |= {name: " ".join(words.split()) for name, words in re.findall(entry, text, flags=re.MULTILINE)}
    return found


def types_of(kind: type) -> dict[str, str]:
    """Types of a dataclass's or a model's fields, as text."""
    from typing import get_type_hints

    return {name: _type(hint) for name, hint in get_type_hints(kind).items()}


def _inner(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _inner(argument)


def _type(annotation: Any) -> str:
    """A type in words, with links to models on the same page."""
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}
    if annotation in names:
        return names[annotation]
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part) for part in inside)
    if origin is tuple and inside and inside[-1] is not Ellipsis:
        return "interval" if inside == (float, float) else f"[{', '.join(_type(part) for part in inside)}]"
    if origin in (list, tuple):
        return f"list of {_type(inside[0])}" if inside else "list"
    if origin is dict:
        return f"{_type(inside[0])}: {_type(inside[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{_anchor(annotation)})"
    return getattr(annotation, "__name__", str(annotation))


def _anchor(kind: type) -> str:
    # Several files have a model of the same name.
    return f"{kind.__module__.split('.')[1]}-{kind.__name__}".lower()


# --- Python -----------------------------------------------------------------------------------------------------


def python_index() -> str:
    """The packages, one a line."""
    rows = [f"| [`isophase.{name}`]({name}.md) | {words} |" for name, (words, _) in PACKAGES.items()]
    return "\n".join(
        [
            "# Python", "",
            "Generated from the docstrings. `import isophase` itself imports neither torch nor a model; the "
            "packages do when they need them.", "", "| package | |", "|---|---|", *rows, "",
        ]
    )  # fmt: skip


def package_page(name: str) -> str:
    """One package: the names that it offers, then the modules that a reader may import from."""
    words, modules = PACKAGES[name]
    out = [f"# isophase.{name}", "", words, ""]
    for module in modules:
        if module:
            out += [f"::: isophase.{name}.{module}", "    options: {show_root_full_path: true}", ""]
            continue
        package = importlib.import_module(f"isophase.{name}")
        out += ["```python", f"from isophase.{name} import ...", "```", ""]
        for public in _in_order(package):
            out += [f"::: isophase.{name}.{public}", ""]
    return "\n".join(out)


def _in_order(package: types.ModuleType) -> list[str]:
    """Names of a package that have a docstring of their own, functions and classes first."""
    kinds: list[Callable[[Any], bool]] = [inspect.isclass, inspect.isfunction]
    return [n for kind in kinds for n in package.__all__ if kind(getattr(package, n))]


# --- text -------------------------------------------------------------------------------------------------------


def _read(name: str) -> str:
    """The part of a generated page that a person wrote."""
    return (Path(__file__).parent / "reference" / f"_{name}.md").read_text(encoding="utf-8").strip()


def _paragraphs(text: str) -> list[str]:
    parts = re.split(r"\n\s*\n", inspect.cleandoc(text))
    return "\n\n".join(_escape(" ".join(part.split())) for part in parts).split("\n") or [""]


def _cell(text: str) -> str:
    return _escape(" ".join(text.split())).replace("|", "\\|")


def _escape(text: str) -> str:
    # Square brackets are no links and angle brackets no tags in help texts.
    return re.sub(r"(?<!`)([\[\]<>*])", r"\\\1", text)
