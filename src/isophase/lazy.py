"""Packages that offer names and import nothing until one is used: `import isophase` stays quick and needs no torch."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["lazily", "offered"]


def offered(file: str | Path) -> dict[str, str]:
    """Which module each name of a package comes from: what its `if TYPE_CHECKING:` block imports.

    Args:
        file: the package's `__init__.py`.

    Returns:
        Module by name. Type checkers and people read the same block, so there is one list.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {
        alias.asname or alias.name: node.module
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def lazily(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names are imported when they are first used.

    Args:
        package: its `__name__`.
        file: its `__file__`.
    """
    places = offered(file)

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(places[name]), name)

    def listed() -> list[str]:
        return sorted(places)

    return get, listed
