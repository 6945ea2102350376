"""Who may import whom (docs of the design, section 2), and what works without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import isophase

ROOT = Path(isophase.__file__).parent
PARTS = {p.name for p in ROOT.iterdir() if p.is_dir() and list(p.rglob("*.py"))}
BASICS = {"errors", "atomic"}  # modules of the package's root that import nothing of ours

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
ALLOWED["mitigate"] = set(ALLOWED)
ALLOWED["lab"] = set(ALLOWED)  # a sweep measures remedies too
ALLOWED["cli"] = {*ALLOWED, "lab", "mitigate"}

# Parts that must load where torch is not installed.
WITHOUT_TORCH = {"statistics", "probes", "audit", "cli"}
# Files of `targets` that are loaded only for a model in this process.
NEEDS_TORCH = {
    "targets/huggingface.py", "targets/compressed.py", "targets/bundled.py", "targets/sparse.py",
    "targets/invariants_local.py",
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
                yield f"{module}.{name.name}", node not in later


def files() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py"))


def test_the_rules_name_every_part() -> None:
    assert set(ALLOWED) >= PARTS


@pytest.mark.parametrize("name", files())
def test_a_file_imports_only_what_its_part_may(name: str) -> None:
    part = name.split("/")[0].removesuffix(".py")
    allowed = ALLOWED.get(part, set()) | {part} | BASICS
    if part in BASICS or name == "__init__.py":
        allowed = set()
    for module, _ in imports(ROOT / name):
        parts = module.split(".")
        if parts[0] != "isophase" or len(parts) == 1 or module == "isophase.__version__":
            continue
        assert parts[1] in allowed, f"{name} imports {module}"


@pytest.mark.parametrize("name", files())
def test_torch_is_loaded_only_where_it_may_be(name: str) -> None:
    part = name.split("/")[0]
    if name in NEEDS_TORCH or part not in WITHOUT_TORCH | {
        "targets",
        "__init__.py",
        "errors.py",
        "atomic.py",
    }:
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
