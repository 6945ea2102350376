"""Who may import whom (docs of the design, section 2), and what works without torch."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import isophase
from isophase.lazy import offered

ROOT = Path(isophase.__file__).parent
PARTS = {p.name for p in ROOT.iterdir() if p.is_dir() and list(p.rglob("*.py"))}
BASICS = {"atomic", "errors", "lazy", "specs"}  # modules of the package's root; `specs` reads and opens nothing

# Part -> parts that it may import, besides itself and the basics.
ALLOWED: dict[str, set[str]] = {
    "chunking": set(),
    "statistics": set(),
    "models": {"chunking"},
    "cache": {"chunking"},
    "prefill": {"chunking"},
    "retrieval": {"chunking"},
    "probes": set(),
    "targets": {"probes", "models", "cache", "prefill"},
    "audit": {"probes", "targets", "statistics"},
}
ALLOWED["needle"] = {"probes", "targets", "statistics", "audit", "models", "cache"}
ALLOWED["mitigate"] = {*ALLOWED, "lab"}  # a repair looks with the instruments of `explain`
ALLOWED["lab"] = {*ALLOWED, "mitigate"}  # and a sweep measures remedies; no circle of rooms comes of it, see below
ALLOWED["cli"] = {*ALLOWED, "lab", "mitigate"}

# Parts that must load where torch is not installed.
WITHOUT_TORCH = {"statistics", "probes", "audit", "cli", "atomic.py", "errors.py", "lazy.py", "specs.py", "__init__.py"}
# Files of `targets` that are loaded only for a model in this process.
NEEDS_TORCH = {
    "targets/huggingface.py", "targets/compressed.py", "targets/bundled.py", "targets/sparse.py", "targets/modified.py",
    "targets/invariants/local.py",
}  # fmt: skip
HEAVY = {"torch", "transformers", "safetensors", "accelerate", "gguf"}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every imported module, with whether it is loaded together with the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    later: set[ast.AST] = set()
    for node in ast.walk(tree):
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        types_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if inside or types_only:
            later.update(ast.walk(node))
    package = ("isophase", *path.relative_to(ROOT).with_suffix("").parts)[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node not in later
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            yield module, node not in later
            for name in node.names:
                # A name that a package offers lazily comes from the module that it names.
                place = OFFERED.get(module, {}).get(name.name)
                yield f"{place or module}.{name.name}", node not in later
                if place:
                    yield place, node not in later


def files() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py"))


PACKAGES = {
    ".".join(("isophase", *p.relative_to(ROOT).parts[:-1])): p for p in sorted(ROOT.rglob("__init__.py"))
}  # fmt: skip
OFFERED = {name: offered(path) for name, path in PACKAGES.items()}


def public(package: str) -> set[str]:
    """What a package lists in `__all__`."""
    for node in ast.parse(PACKAGES[package].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def test_the_rules_name_every_part() -> None:
    assert set(ALLOWED) >= PARTS


@pytest.mark.parametrize("name", files())
def test_a_file_imports_only_what_its_part_may(name: str) -> None:
    part = name.split("/")[0].removesuffix(".py")
    allowed = ALLOWED.get(part, set()) | {part} | BASICS
    if part in BASICS:
        allowed = {"errors"}
    for module, at_once in imports(ROOT / name):
        parts = module.split(".")
        if parts[0] != "isophase" or len(parts) == 1 or module == "isophase.__version__":
            continue
        if name == "__init__.py":  # the front of the house offers what is inside, and loads none of it
            assert not at_once or parts[1] in BASICS, f"{name} loads {module}"
            continue
        assert parts[1] in allowed, f"{name} imports {module}"


@pytest.mark.parametrize("name", files())
def test_across_rooms_only_public_names_are_imported(name: str) -> None:
    part = name.split("/")[0].removesuffix(".py")
    for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("isophase."):
            continue
        module = str(node.module)
        other = module.split(".")[1]
        if other in BASICS or other == part:
            continue
        assert module in PACKAGES, f"{name} imports from the inside of {other}: {module}"
        assert not {n.name for n in node.names} - public(module), f"{name}: {module} does not list these"


@pytest.mark.parametrize("package", [p for p in PACKAGES if public(p)])
def test_what_is_listed_is_there(package: str) -> None:
    module = importlib.import_module(package)
    for name in public(package):
        assert getattr(module, name) is not None, name
    if OFFERED[package]:
        assert set(OFFERED[package]) == public(package)
        # A module of the same name would take the place of what is offered.
        beside = {path.stem for path in PACKAGES[package].parent.iterdir()}
        assert not public(package) & beside
    with pytest.raises(AttributeError, match="nothing_like_it"):
        module.nothing_like_it  # noqa: B018


def test_rooms_make_no_circle() -> None:
    """A room is a folder with its own files; `lab` and `mitigate` use each other's rooms, never in a circle."""
    graph: dict[str, set[str]] = {}
    for name in files():
        room = name.rpartition("/")[0]
        if room in ("", "cli"):
            continue
        for module, at_once in imports(ROOT / name):
            parts = module.split(".")
            if parts[0] != "isophase" or not at_once or len(parts) < 2 or parts[1] in BASICS:
                continue
            where = ROOT.joinpath(*parts[1:])
            while not (where.is_dir() or where.with_suffix(".py").is_file()) and where != ROOT:
                where = where.parent
            other = str((where if where.is_dir() else where.parent).relative_to(ROOT))
            part = room.split("/")[0]
            if other.split("/")[0] != part or part in ("lab", "mitigate"):
                graph.setdefault(room, set()).add(other)
    graph = {room: others - {room} for room, others in graph.items()}
    assert list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("name", files())
def test_torch_is_loaded_only_where_it_may_be(name: str) -> None:
    part = name.split("/")[0]
    if name in NEEDS_TORCH or part not in WITHOUT_TORCH | {"targets"}:
        return
    for module, at_once in imports(ROOT / name):
        top = module.split(".")[0]
        torch_file = f"{module.removeprefix('isophase.').replace('.', '/')}.py" in NEEDS_TORCH
        assert not (at_once and (top in HEAVY or torch_file)), f"{name} loads {module} at once"


@pytest.mark.parametrize("name", [f for f in files() if f.startswith("cli/")])
def test_the_command_line_holds_no_logic(name: str) -> None:
    """No numerical or model library: commands only call what the parts offer."""
    for module, _ in imports(ROOT / name):
        assert module.split(".")[0] not in HEAVY | {"numpy", "scipy"}, f"{name} imports {module}"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert "open_target" in dir(isophase)
    loaded = run(
        """
        import sys, isophase
        assert isophase.__version__
        print(sorted({"torch", "transformers", "scipy", "numpy", "pydantic"} & set(sys.modules)))
        """
    )
    assert loaded.strip() == "[]"


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "safetensors", "accelerate"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


def test_plans_and_targets_load_without_torch() -> None:
    out = run(
        BLOCK
        + textwrap.dedent(
            """
            import isophase.audit.plan, isophase.audit.run, isophase.audit.analyse, isophase.audit.report
            import isophase.cli.main
            from isophase.errors import IsophaseError
            from isophase.targets import open_target
            for spec in ("hf:somewhere", "isophase:full"):
                try:
                    open_target(spec)
                except IsophaseError as error:
                    print(error)
            """
        )
    )
    for spec, line in zip(("hf:somewhere", "isophase:full"), out.splitlines(), strict=True):
        assert line == (
            f"{spec} needs torch and transformers, and torch is not installed. "
            "Install them with: pip install 'isophase[torch]'."
        )


def test_a_planted_audit_runs_without_torch(tmp_path: Path) -> None:
    code = f"""
        import sys
        from isophase.cli.main import main
        out = {str(tmp_path / "run")!r}
        sys.argv = ["isophase", "audit", "planted:period=4,amplitude=.3,accuracy=.6", "--stride", "4"]
        sys.argv += ["--items", "12", "--records", "6", "--length", "220", "--probe", "records", "--out", out]
        try:
            code = main()
        except SystemExit as done:
            code = done.code
        assert not {{"torch", "transformers"}} & set(sys.modules)
        print("exit", code)
        """
    out = run(BLOCK + textwrap.dedent(code))
    assert "exit 10" in out, out
    assert list(tmp_path.joinpath("run").iterdir())
